/* SPDX-License-Identifier: Apache-2.0 */
/* rollout.c -- a paged model on the store of a training. */
#include "tune/align/rollout.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "base/clock.h"
#include "base/mem.h"
#include "base/rng.h"
#include "base/stop.h"
#include "base/text.h"
#include "model/serve.h"
#include "tune/align/portion.h"

enum { SEQUENCES = 64 };

struct lm_rollout {
    lm_rollout_site site;
    lm_rollout_opts o;
    lm_loaded weights; /* the store's; nothing of it is ours */
    lm_paged *g;
    lm_rollout_text *text; /* [cap] of the last run */
    size_t cap;
    /* Of a run: prompts of this rank are [next, own.end) of n. */
    const lm_rollout_prompt *prompt;
    int64_t n, group, next, done;
    lm_portion own;
    lm_arena *arena;
};

/* ---- life ---- */

static lm_loaded weights_of(const lm_rollout_site *s)
{
    return (
        lm_loaded){ .config = *s->config, .par = s->par, .store = (lm_store *)(uintptr_t)s->store };
}

/* Sizes of the caches for texts of this length. */
static lm_code choose_room(const lm_rollout_site *s, const lm_rollout_opts *o, lm_serve_room *out,
                           lm_err *e)
{
    const lm_loaded w = weights_of(s);
    const int64_t context = o->most_prompt + o->most_new,
                  sequences = o->sequences > 0 ? o->sequences : SEQUENCES,
                  prompts = o->prompts > 0 ? o->prompts : sequences;
    const lm_serve_sizes ask = { .sequences = sequences,
                                 .context = context,
                                 .prompts = prompts * o->most_prompt,
                                 .memory = o->memory,
                                 .like = s->model,
                                 .name = { "rollout memory" } };
    if (o->most_new < 1 || o->most_prompt < 1)
        return lm_fail(e, LM_EUSAGE, "rollout", NULL, "texts without tokens are asked for");
    return lm_serve_choose(&w, s->model->build.precision.low, s->backend, &ask, out, e);
}

lm_code lm_rollout_new(const lm_rollout_site *site, const lm_rollout_opts *o, lm_rollout **out,
                       lm_err *e)
{
    lm_rollout *r = NULL;
    lm_serve_room room;
    *out = NULL;
    if (choose_room(site, o, &room, e) || lm_alloc_n(&r, 1, sizeof *r, "rollouts", e))
        return e->code;
    r->site = *site;
    r->o = *o;
    r->weights = weights_of(site);
    if (lm_paged_new(&r->weights, site->model->build.precision.low, &room.pages, site->backend,
                     &r->g, e)) {
        lm_rollout_free(r);
        return e->code;
    }
    *out = r;
    return LM_OK;
}

void lm_rollout_free(lm_rollout *r)
{
    if (!r)
        return;
    lm_paged_free(r->g);
    lm_arena_free(r->arena);
    lm_free(r->text);
    lm_free(r);
}

size_t lm_rollout_bytes(const lm_rollout *r)
{
    return lm_paged_bytes(r->g) + lm_paged_arena(r->g);
}

lm_code lm_rollout_outlook(const lm_rollout_site *site, const lm_rollout_opts *o, size_t *bytes,
                           lm_err *e)
{
    const lm_loaded w = weights_of(site);
    lm_serve_room room;
    if (choose_room(site, o, &room, e))
        return e->code;
    return lm_paged_outlook(&w, site->model->build.precision.low, &room.pages, site->backend, bytes,
                            e);
}

/* ---- a run ---- */

static lm_code give_prompt(void *ctx, lm_completion *c, bool *got, lm_err *e)
{
    lm_rollout *r = ctx;
    *got = r->next < r->own.end;
    if (!*got)
        return LM_OK;
    const lm_rollout_prompt *p = &r->prompt[r->next++];
    if (lm_grow(&c->ids.v, &c->ids.cap, (size_t)p->n, sizeof *c->ids.v, "tokens", e))
        return e->code;
    memcpy(c->ids.v, p->ids, (size_t)p->n * sizeof *p->ids);
    c->ids.n = (size_t)p->n;
    c->max_new = r->o.most_new;
    return LM_OK;
}

static lm_code take_text(void *ctx, lm_completion *c, lm_err *e)
{
    lm_rollout *r = ctx;
    const size_t n = c->ids.n - c->n_prompt;
    uint32_t *ids;
    float *logp;
    char *text;
    if (lm_arena_alloc(r->arena, &ids, n, sizeof *ids, e) ||
        lm_arena_alloc(r->arena, &logp, n, sizeof *logp, e) ||
        lm_arena_strdup(r->arena, &text, c->text.data ? c->text.data : "", c->text.len, e))
        return e->code;
    memcpy(ids, c->ids.v + c->n_prompt, n * sizeof *ids);
    memcpy(logp, c->logprob, n * sizeof *logp);
    r->text[c->index * r->group + c->sample] =
        (lm_rollout_text){ .ids = ids,
                           .logp = logp,
                           .n = (int64_t)n,
                           .text = text,
                           .len = c->text.len,
                           .truncated = strcmp(c->finish, "stop") != 0 };
    r->done++;
    return LM_OK;
}

static lm_code check_prompts(const lm_rollout *r, lm_err *e)
{
    for (int64_t i = 0; i < r->n; i++)
        if (r->prompt[i].n < 1 || r->prompt[i].n > r->o.most_prompt)
            return lm_fail(e, LM_EUSAGE, "rollout", "allow longer prompts, or leave it out",
                           "prompt %" PRId64 " has %" PRId64 " tokens; 1 to %" PRId64
                           " are allowed",
                           i + 1, r->prompt[i].n, r->o.most_prompt);
    return LM_OK;
}

/* Forget the last run, and make room for this one. */
static lm_code begin_run(lm_rollout *r, const lm_rollout_prompt *prompt, int64_t n, int64_t group,
                         lm_err *e)
{
    r->prompt = prompt;
    r->n = n;
    r->group = group;
    r->own = lm_portion_own(r->site.comm, n);
    r->next = r->own.first;
    r->done = 0;
    lm_arena_free(r->arena);
    r->arena = NULL;
    if (check_prompts(r, e) || lm_arena_new(&r->arena, 1 << 20, e) ||
        lm_grow(&r->text, &r->cap, (size_t)(n * r->group) + 1, sizeof *r->text, "completions", e))
        return e->code;
    memset(r->text, 0, (size_t)(n * r->group) * sizeof *r->text);
    return LM_OK;
}

static void count_texts(const lm_rollout *r, const lm_complete_stats *st, const lm_serve_stats *kv,
                        lm_rollout_stats *out)
{
    *out = (lm_rollout_stats){ .tokens = st->new_tokens,
                               .seconds = kv->seconds,
                               .prompt_seconds = st->prompt_seconds,
                               .again = kv->sched.paused };
    for (int64_t i = r->own.first * r->group; i < r->own.end * r->group; i++)
        out->truncated += r->text[i].truncated;
}

static lm_code run_own(lm_rollout *r, int64_t step, lm_rollout_stats *stats, lm_err *e)
{
    const lm_complete_opts how = { .sample = r->o.sample,
                                   .seed = lm_rng_key(r->o.seed, (uint64_t)step, 0),
                                   .first = r->own.first,
                                   .samples = r->group,
                                   .eos = r->o.eos,
                                   .n_eos = r->o.n_eos,
                                   .stop = r->o.stop,
                                   .n_stop = r->o.n_stop,
                                   .logprobs = true,
                                   .skip_special = true,
                                   .any_order = true };
    const lm_complete_hooks hooks = { .next = give_prompt, .done = take_text, .ctx = r };
    const lm_serve_opts serve = { .measure = false };
    lm_complete_stats st = { 0 };
    lm_serve_stats kv = { 0 };
    if (r->own.first < r->own.end &&
        lm_serve_run(r->g, &serve, r->site.tokenizer, &how, &hooks, &st, &kv, e))
        return e->code;
    count_texts(r, &st, &kv, stats);
    return LM_OK;
}

/* ---- several ranks ---- */

/* A completion in a message, before its ids, log-probabilities and text. */
typedef struct {
    int64_t n, len, truncated;
} heading;

static lm_code write_text(const lm_rollout_text *x, lm_buf *out, lm_err *e)
{
    const heading h = { x->n, (int64_t)x->len, x->truncated };
    return lm_buf_add(out, (const char *)&h, sizeof h, e) ||
                   lm_buf_add(out, (const char *)x->ids, (size_t)x->n * sizeof *x->ids, e) ||
                   lm_buf_add(out, (const char *)x->logp, (size_t)x->n * sizeof *x->logp, e) ||
                   lm_buf_add(out, x->text, x->len, e)
               ? e->code
               : LM_OK;
}

static lm_code read_text(lm_rollout *r, const char **at, lm_rollout_text *out, lm_err *e)
{
    heading h;
    memcpy(&h, *at, sizeof h);
    const size_t n = (size_t)h.n;
    const char *ids_at = *at + sizeof h, *logp_at = ids_at + n * sizeof(uint32_t),
               *text_at = logp_at + n * sizeof(float);
    uint32_t *ids;
    float *logp;
    char *text;
    if (lm_arena_alloc(r->arena, &ids, n, sizeof *ids, e) ||
        lm_arena_alloc(r->arena, &logp, n, sizeof *logp, e) ||
        lm_arena_strdup(r->arena, &text, text_at, (size_t)h.len, e))
        return e->code;
    memcpy(ids, ids_at, n * sizeof *ids);
    memcpy(logp, logp_at, n * sizeof *logp);
    *out = (lm_rollout_text){ .ids = ids,
                              .logp = logp,
                              .n = h.n,
                              .text = text,
                              .len = (size_t)h.len,
                              .truncated = h.truncated != 0 };
    *at = text_at + h.len;
    return LM_OK;
}

static lm_code join_texts(lm_rollout *r, lm_err *e)
{
    const int64_t first = r->own.first * r->group, end = r->own.end * r->group;
    lm_buf own = { 0 };
    char *all = NULL;
    size_t bytes;
    for (int64_t i = first; i < end && !e->code; i++)
        write_text(&r->text[i], &own, e);
    if (!e->code &&
        !lm_portion_parts(r->site.comm, own.data ? own.data : "", own.len, &all, &bytes, e)) {
        const char *at = all;
        for (int64_t i = 0; i < r->n * r->group && !e->code; i++) {
            lm_rollout_text x;
            if (!read_text(r, &at, &x, e) && (i < first || i >= end))
                r->text[i] = x;
        }
    }
    lm_buf_fini(&own);
    lm_free(all);
    return e->code;
}

static lm_code join_stats(lm_comm *c, lm_rollout_stats *s, lm_err *e)
{
    lm_rollout_stats *all = NULL;
    if (lm_comm_gather_each(c, s, sizeof *s, (void *)&all, e))
        return e->code;
    *s = (lm_rollout_stats){ 0 };
    for (int r = 0; r < lm_comm_size(c); r++) {
        s->tokens += all[r].tokens;
        s->truncated += all[r].truncated;
        s->again += all[r].again;
        s->seconds = fmax(s->seconds, all[r].seconds);
        s->prompt_seconds = fmax(s->prompt_seconds, all[r].prompt_seconds);
    }
    lm_free(all);
    return LM_OK;
}

/* The completions of all ranks; *whole: all are there. */
static lm_code join_ranks(lm_rollout *r, lm_rollout_stats *stats, bool *whole, lm_err *e)
{
    lm_comm *c = r->site.comm;
    int32_t missing = !*whole;
    if (lm_comm_all_reduce(c, &missing, &missing, 1, LM_DTYPE_I32, LM_COMM_MAX, e))
        return e->code;
    *whole = !missing;
    return missing || join_texts(r, e) || join_stats(c, stats, e) ? e->code : LM_OK;
}

lm_code lm_rollout_run(lm_rollout *r, int64_t step, const lm_rollout_prompt *prompt, int64_t n,
                       int64_t group, const lm_rollout_text **out, bool *whole,
                       lm_rollout_stats *stats, lm_err *e)
{
    lm_rollout_stats own = { 0 };
    if (begin_run(r, prompt, n, group, e) || run_own(r, step, &own, e))
        return e->code;
    *out = r->text;
    *whole = r->done == (r->own.end - r->own.first) * group;
    if (r->site.comm && join_ranks(r, &own, whole, e))
        return e->code;
    if (stats)
        *stats = own;
    return LM_OK;
}
