/* SPDX-License-Identifier: Apache-2.0 */
/* rollout.c -- a paged model on the store of a training. */
#include "tune/align/rollout.h"

#include <inttypes.h>
#include <string.h>

#include "base/clock.h"
#include "base/mem.h"
#include "base/rng.h"
#include "base/stop.h"
#include "base/text.h"
#include "model/serve.h"

enum { SEQUENCES = 64 };

struct lm_rollout {
    lm_rollout_site site;
    lm_rollout_opts o;
    lm_loaded weights; /* the store's; nothing of it is ours */
    lm_paged *g;
    lm_rollout_text *text; /* [cap] of the last run */
    size_t cap;
    /* Of a run: */
    const lm_rollout_prompt *prompt;
    int64_t n, group, next, done;
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
    *got = r->next < r->n;
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
    r->next = r->done = 0;
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
    for (int64_t i = 0; i < r->n * r->group; i++)
        out->truncated += r->text[i].truncated;
}

lm_code lm_rollout_run(lm_rollout *r, int64_t step, const lm_rollout_prompt *prompt, int64_t n,
                       int64_t group, const lm_rollout_text **out, bool *whole,
                       lm_rollout_stats *stats, lm_err *e)
{
    const lm_complete_opts how = { .sample = r->o.sample,
                                   .seed = lm_rng_key(r->o.seed, (uint64_t)step, 0),
                                   .samples = group,
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
    if (begin_run(r, prompt, n, group, e) ||
        lm_serve_run(r->g, &serve, r->site.tokenizer, &how, &hooks, &st, &kv, e))
        return e->code;
    *out = r->text;
    *whole = r->done == n * group;
    if (stats)
        count_texts(r, &st, &kv, stats);
    return LM_OK;
}
