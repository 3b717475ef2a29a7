/* SPDX-License-Identifier: Apache-2.0 */
/* serve.c -- the loop around a scheduler and a paged model. */
#include "model/serve.h"

#include "base/clock.h"
#include "base/mem.h"
#include "model/complete_queue.h"
#include "model/model.h"
#include "model/serve_metrics.h"

/* A request of the scheduler generates `text`.  Until its first token is chosen it stands for `more` other samples of
 * the prompt, too, which are forked from it then: `text` is the last of them, linked to those before it. */
typedef struct {
    lm_completion *text;
    int64_t more;
} owner;

typedef struct {
    lm_paged *g;
    const lm_paged_opts *o;
    const lm_serve_opts *serve;
    const lm_complete_opts *how;
    lm_complete_stats *st;
    lm_serve_stats kv;
    lm_sched *sched;
    lm_tiers *tiers;
    lm_complete_queue q;
    owner *of; /* of each request of the scheduler */
    size_t cap_of;
    lm_paged_part *part; /* [sequences], as the rest */
    lm_paged_draw *draw;
    int64_t prompt_rows, token_steps; /* computed so far; steps with new tokens */
    bool warned;
    lm_serve_meter meter;
} run;

static lm_code set_owner(run *r, int64_t request, lm_completion *text, int64_t more, lm_err *e)
{
    if (lm_grow(&r->of, &r->cap_of, (size_t)request + 1, sizeof *r->of, "requests", e))
        return e->code;
    r->of[request] = (owner){ text, more };
    return LM_OK;
}

static int64_t most_new(const lm_completion *c)
{
    return c->max_new < 1 ? 1 : c->max_new;
}

/* ---- prompts ---- */

/* As many samples of the prompt as there is room for become one request of the scheduler. */
static lm_code begin_samples(run *r, lm_err *e)
{
    lm_completion *c = NULL, *before;
    int64_t request = 0, n = 0;
    for (; r->q.left && lm_complete_queue_may_begin(&r->q); n++) {
        before = c;
        if (lm_complete_queue_begin(&r->q, &c, e))
            return e->code;
        c->before = before;
    }
    if (!n)
        return LM_OK;
    r->st->prompts += n;
    r->st->prompt_tokens += (int64_t)c->ids.n;
    return lm_sched_add(r->sched, c->ids.v, (int64_t)c->ids.n, most_new(c), (int32_t)c->model,
                        &request, e)
               ? e->code
               : set_owner(r, request, c, n - 1, e);
}

static lm_code fill(run *r, lm_err *e)
{
    while (lm_complete_queue_may_begin(&r->q) && lm_complete_queue_has_more(&r->q)) {
        if (!r->q.left && lm_complete_queue_read(&r->q, e))
            return e->code;
        if (r->q.left && begin_samples(r, e))
            return e->code;
    }
    return LM_OK;
}

/* ---- tokens ---- */

/* Whether part i needs a token for the k-th sample of its request, the last of those left; its draw. */
static bool ask(run *r, const lm_sched_part *p, int64_t i, int64_t k)
{
    bool on = p->last && k == r->of[p->request].more;
    r->draw[i] = (lm_paged_draw){ .on = on };
    if (!on)
        return false;
    const lm_completion *c = r->of[p->request].text;
    r->draw[i].u = lm_completion_draw(&r->q.rules, c);
    r->draw[i].seen = c->ids.v;
    r->draw[i].n_seen = (int64_t)c->ids.n;
    return true;
}

/* The token of the k-th sample of a request; a fork of the request continues the samples behind the first. */
static lm_code take_token(run *r, int64_t request, int64_t k, int32_t id, const double *logprob,
                          lm_err *e)
{
    lm_completion *c = r->of[request].text;
    int64_t to = request;
    double start = lm_now();
    if (k && (lm_sched_fork(r->sched, request, most_new(c), &to, e) || set_owner(r, to, c, 0, e)))
        return e->code;
    if (k)
        r->of[request] = (owner){ c->before, k - 1 };
    r->kv.pages_seconds += lm_now() - start;
    if (lm_complete_queue_take(&r->q, c, id, logprob, e))
        return e->code;
    r->st->new_tokens += !c->failed;
    start = lm_now();
    lm_sched_token(r->sched, to, (uint32_t)id, c->finish != NULL);
    r->kv.pages_seconds += lm_now() - start;
    return LM_OK;
}

/* Choose the tokens of the parts that end what is known of their sequences; the first text of a request comes last,
 * because the request may end with its token. */
static lm_code take_tokens(run *r, const lm_sched_step *s, lm_err *e)
{
    const int32_t *ids = NULL;
    const double *logprob = NULL;
    int64_t most = 0;
    for (int64_t i = 0; i < s->n; i++)
        if (s->part[i].last && r->of[s->part[i].request].more > most)
            most = r->of[s->part[i].request].more;
    for (int64_t k = most; k >= 0; k--) {
        bool any = false;
        for (int64_t i = 0; i < s->n; i++)
            any |= ask(r, &s->part[i], i, k);
        if (!any)
            continue;
        if (lm_paged_choose(r->g, &r->how->sample, r->draw, &ids,
                            r->how->logprobs ? &logprob : NULL, e))
            return e->code;
        for (int64_t i = 0; i < s->n; i++)
            if (r->draw[i].on &&
                take_token(r, s->part[i].request, k, ids[i], logprob ? &logprob[i] : NULL, e))
                return e->code;
    }
    return LM_OK;
}

/* ---- steps ---- */

/* The seconds of a step count for prompts by their share of its rows. */
static void count_time(run *r, const lm_sched_step *s, double seconds)
{
    int64_t of_prompts = 0;
    for (int64_t i = 0; i < s->n; i++)
        of_prompts += s->part[i].kind == LM_ROWS_PROMPT ? s->part[i].n : 0;
    double share = s->rows ? (double)of_prompts / (double)s->rows : 0;
    r->st->prompt_seconds += share * seconds;
    r->st->decode_seconds += (1 - share) * seconds;
    r->prompt_rows += of_prompts;
    r->token_steps += of_prompts < s->rows;
}

static void count_pages(run *r)
{
    const lm_pool *p = lm_sched_pool(r->sched);
    size_t bytes = 0;
    for (int i = 0; i < LM_TIERS; i++)
        bytes += (size_t)lm_pool_used(p, (lm_tier)i) *
                 (i == LM_TIER_DEVICE ? r->kv.page_bytes : lm_tiers_below(r->tiers));
    if (bytes > r->kv.peak_bytes)
        r->kv.peak_bytes = bytes;
}

static lm_code make_step(run *r, const lm_sched_step *s, lm_err *e)
{
    double start = lm_now();
    for (int64_t i = 0; i < s->n; i++) {
        const lm_sched_part *p = &s->part[i];
        r->part[i] = (lm_paged_part){ .ids = p->ids,
                                      .n = p->n,
                                      .used = p->used,
                                      .kind = p->kind,
                                      .table = p->table,
                                      .slot = p->slot,
                                      .model = r->of[p->request].text->model };
    }
    for (int64_t i = 0; i < s->copies; i++)
        if (lm_paged_copy_tail(r->g, s->copy[i].from, s->copy[i].to, e))
            return e->code;
    if (lm_tiers_begin(r->tiers, s->move, s->moves, s->urgent, e) ||
        (s->n && lm_paged_step(r->g, r->part, s->n, NULL, e)) ||
        lm_tiers_work(r->tiers, s->n > 0, e) || (s->n && take_tokens(r, s, e)))
        return e->code;
    count_time(r, s, lm_now() - start);
    return LM_OK;
}

/* Wait for the moves of the last step; what they lost is computed again. */
static lm_code end_moves(run *r, lm_err *e)
{
    const int32_t *lost;
    int64_t n;
    if (lm_tiers_end(r->tiers, &lost, &n, e))
        return e->code;
    lm_err why = lm_tiers_closed(r->tiers);
    if (why.code && !r->warned) {
        r->warned = true;
        lm_pool_close(lm_sched_pool(r->sched), LM_TIER_DISK);
        if (r->serve->warn)
            r->serve->warn(r->serve->ctx, &why);
    }
    for (int64_t i = 0; i < n; i++)
        lm_sched_lost(r->sched, lost[i]);
    return LM_OK;
}

static void estimate(const run *r)
{
    lm_tiers_stats t = lm_tiers_count(r->tiers);
    if (r->serve->measure)
        lm_sched_estimate(
            r->sched, r->prompt_rows ? r->st->prompt_seconds / (double)r->prompt_rows : 0,
            r->token_steps ? r->st->decode_seconds / (double)r->token_steps : 0, t.rate);
}

/* No moves are under way. */
static lm_code record(run *r, bool last, lm_err *e)
{
    if (!r->serve->metrics)
        return LM_OK;
    r->kv.sched = lm_sched_count(r->sched);
    r->kv.tiers = lm_tiers_count(r->tiers);
    return lm_serve_meter_step(&r->meter, r->serve->metrics, r->st, &r->kv, lm_sched_pool(r->sched),
                               last, e);
}

/* ---- the loop ---- */

/* The next step; *any = false: there is none. */
static lm_code next_step(run *r, lm_sched_step *s, bool *any, lm_err *e)
{
    if (end_moves(r, e) || record(r, false, e))
        return e->code;
    double start = lm_now();
    estimate(r);
    *any = lm_sched_next(r->sched, s);
    count_pages(r);
    r->kv.pages_seconds += lm_now() - start;
    return LM_OK;
}

static lm_code loop(run *r, lm_err *e)
{
    lm_sched_step s;
    bool any = false;
    while (!lm_stopping()) {
        if (fill(r, e) || lm_complete_queue_hand_back(&r->q, e))
            return e->code;
        double start = lm_now();
        if (next_step(r, &s, &any, e) || (any && make_step(r, &s, e)))
            return e->code;
        r->kv.seconds += lm_now() - start;
        if (any)
            continue;
        if (r->q.n)
            return lm_fail(e, LM_EBUG, "serve", NULL, "a text waits for a step that never comes");
        if (!lm_complete_queue_has_more(&r->q))
            break;
    }
    return LM_OK;
}

static lm_code open_run(run *r, lm_err *e)
{
    const bool coded = lm_paged_coded(r->g), tails = lm_paged_tail_bytes(r->g) > 0,
               chunks = coded || tails, whole = !chunks || LM_KV_CHUNK % r->o->page == 0;
    lm_sched_opts opts = { .page = r->o->page,
                           .rows = r->o->rows - r->o->sequences,
                           .sequences = r->o->sequences,
                           .slots = tails ? r->o->slots : 0,
                           .context = r->o->context,
                           .chunk = chunks ? LM_KV_CHUNK : 1,
                           .lag = tails ? lm_paged_lag(r->g) : 0,
                           .state = tails,
                           .share = whole && (!tails || r->o->snapshots),
                           .snapshots = tails && whole ? r->o->snapshots : 0,
                           .page_bytes = lm_paged_page_bytes(r->g) };
    const int64_t pages[LM_TIERS] = { r->o->pages, r->serve->tiers.host, r->serve->tiers.disk };
    size_t n = (size_t)r->o->sequences;
    r->kv.page_bytes = opts.page_bytes;
    if (opts.rows < 1)
        return lm_fail(e, LM_EUSAGE, "rows", NULL, "%lld a step for %lld sequences",
                       (long long)r->o->rows, (long long)r->o->sequences);
    if (lm_alloc_n(&r->part, n, sizeof *r->part, "parts of a step", e) ||
        lm_alloc_n(&r->draw, n, sizeof *r->draw, "parts of a step", e) ||
        lm_tiers_new(r->g, &r->serve->tiers, &r->tiers, e))
        return e->code;
    opts.beside = lm_tiers_beside(r->tiers);
    return lm_sched_new(&opts, pages, &r->sched, e);
}

static lm_code end_run(run *r, lm_serve_stats *kv, lm_err *e)
{
    const int32_t *lost;
    int64_t n;
    if (lm_tiers_end(r->tiers, &lost, &n, e) || record(r, true, e)) /* a stop leaves moves */
        return e->code;
    r->kv.sched = lm_sched_count(r->sched);
    r->kv.tiers = lm_tiers_count(r->tiers);
    if (kv)
        *kv = r->kv;
    return LM_OK;
}

lm_code lm_serve_run(lm_paged *g, const lm_serve_opts *o, const lm_tokenizer *tok,
                     const lm_complete_opts *how, const lm_complete_hooks *h, lm_complete_stats *st,
                     lm_serve_stats *kv, lm_err *e)
{
    run r = { .g = g, .o = lm_paged_options(g), .serve = o, .how = how, .st = st };
    lm_code rc = lm_complete_queue_init(&r.q, tok, how, h, r.o->context, r.o->sequences, e);
    if (!rc)
        rc = open_run(&r, e);
    if (!rc)
        rc = loop(&r, e);
    if (!rc)
        rc = end_run(&r, kv, e);
    lm_complete_queue_fini(&r.q);
    lm_sched_free(r.sched);
    lm_tiers_free(r.tiers);
    lm_free(r.of);
    lm_free(r.part);
    lm_free(r.draw);
    return rc;
}
