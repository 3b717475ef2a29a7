/* SPDX-License-Identifier: Apache-2.0 */
/* serve.c -- the loop around a scheduler and a paged model. */
#include "model/serve.h"

#include "base/clock.h"
#include "base/mem.h"
#include "model/complete_queue.h"

typedef struct {
    lm_paged *g;
    const lm_paged_opts *o;
    const lm_complete_opts *how;
    lm_complete_stats *st;
    lm_sched *sched;
    lm_complete_queue q;
    lm_completion **of; /* of each request of the scheduler */
    size_t cap_of;
    lm_paged_part *part; /* [sequences], as the rest */
    lm_paged_draw *draw;
} run;

/* ---- prompts ---- */

/* The completion of a request. */
static lm_code set_owner(run *r, int64_t request, lm_completion *c, lm_err *e)
{
    if (lm_grow(&r->of, &r->cap_of, (size_t)request + 1, sizeof *r->of, "requests", e))
        return e->code;
    r->of[request] = c;
    return LM_OK;
}

/* A sample of the prompt becomes a request of the scheduler. */
static lm_code begin_sample(run *r, lm_err *e)
{
    lm_completion *c = NULL;
    int64_t request = 0;
    if (lm_complete_queue_begin(&r->q, &c, e) ||
        lm_sched_add(r->sched, c->ids.v, (int64_t)c->ids.n, c->max_new < 1 ? 1 : c->max_new,
                     &request, e) ||
        set_owner(r, request, c, e))
        return e->code;
    r->st->prompts++;
    r->st->prompt_tokens += (int64_t)c->ids.n;
    return LM_OK;
}

static lm_code fill(run *r, lm_err *e)
{
    while (lm_complete_queue_may_begin(&r->q) && lm_complete_queue_has_more(&r->q)) {
        if (!r->q.left && lm_complete_queue_read(&r->q, e))
            return e->code;
        if (r->q.left && begin_sample(r, e))
            return e->code;
    }
    return LM_OK;
}

/* ---- steps ---- */

/* Only copies of pages within the device: there are no other tiers. */
static lm_code make_moves(const run *r, const lm_sched_step *s, lm_err *e)
{
    for (int64_t i = 0; i < s->moves; i++) {
        const lm_kv_move *m = &s->move[i];
        if (m->from != LM_TIER_DEVICE || m->to != LM_TIER_DEVICE)
            return lm_fail(e, LM_EBUG, "serve", NULL, "a page leaves the device");
        if (lm_paged_copy(r->g, m->source, m->target, e))
            return e->code;
    }
    return LM_OK;
}

/* Choose the tokens of the parts that end what is known of their sequences. */
static lm_code take_tokens(run *r, const lm_sched_step *s, lm_err *e)
{
    const int32_t *ids = NULL;
    const double *logprob = NULL;
    bool any = false;
    for (int64_t i = 0; i < s->n; i++) {
        const lm_completion *c = r->of[s->part[i].request];
        r->draw[i] = (lm_paged_draw){ .on = s->part[i].last };
        if (!s->part[i].last)
            continue;
        any = true;
        r->draw[i].u = lm_completion_draw(&r->q.rules, c);
        r->draw[i].seen = c->ids.v;
        r->draw[i].n_seen = (int64_t)c->ids.n;
    }
    if (!any)
        return LM_OK;
    if (lm_paged_choose(r->g, &r->how->sample, r->draw, &ids, r->how->logprobs ? &logprob : NULL,
                        e))
        return e->code;
    for (int64_t i = 0; i < s->n; i++) {
        int64_t request = s->part[i].request;
        lm_completion *c = r->of[request];
        if (!s->part[i].last)
            continue;
        if (lm_completion_take(&r->q.rules, c, ids[i], logprob ? &logprob[i] : NULL, e))
            return e->code;
        r->st->new_tokens++;
        lm_sched_token(r->sched, request, (uint32_t)ids[i], c->finish != NULL);
    }
    return LM_OK;
}

/* The seconds of a step count for prompts by their share of its rows. */
static void count_time(run *r, const lm_sched_step *s, double seconds)
{
    int64_t of_prompts = 0;
    for (int64_t i = 0; i < s->n; i++)
        of_prompts += s->part[i].kind == LM_ROWS_PROMPT ? s->part[i].n : 0;
    double share = s->rows ? (double)of_prompts / (double)s->rows : 0;
    r->st->prompt_seconds += share * seconds;
    r->st->decode_seconds += (1 - share) * seconds;
}

static lm_code make_step(run *r, const lm_sched_step *s, lm_err *e)
{
    double start = lm_now();
    if (make_moves(r, s, e))
        return e->code;
    if (!s->n)
        return LM_OK;
    for (int64_t i = 0; i < s->n; i++) {
        const lm_sched_part *p = &s->part[i];
        r->part[i] = (lm_paged_part){
            .ids = p->ids, .n = p->n, .used = p->used, .kind = p->kind, .table = p->table
        };
    }
    if (lm_paged_step(r->g, r->part, s->n, NULL, e) || take_tokens(r, s, e))
        return e->code;
    count_time(r, s, lm_now() - start);
    return LM_OK;
}

/* ---- the loop ---- */

static lm_code loop(run *r, lm_err *e)
{
    lm_sched_step s;
    while (!lm_stopping()) {
        if (fill(r, e) || lm_complete_queue_hand_back(&r->q, e))
            return e->code;
        if (lm_sched_next(r->sched, &s)) {
            if (make_step(r, &s, e))
                return e->code;
        } else if (r->q.head < r->q.tail) {
            return lm_fail(e, LM_EBUG, "serve", NULL, "a text waits for a step that never comes");
        } else if (!lm_complete_queue_has_more(&r->q)) {
            break;
        }
    }
    return LM_OK;
}

static lm_code open_run(run *r, lm_err *e)
{
    const lm_sched_opts opts = { .page = r->o->page,
                                 .rows = r->o->rows - r->o->sequences,
                                 .sequences = r->o->sequences,
                                 .context = r->o->context,
                                 .chunk = 1,
                                 .share = true,
                                 .page_bytes = lm_paged_page_bytes(r->g) };
    const int64_t pages[LM_TIERS] = { r->o->pages };
    size_t n = (size_t)r->o->sequences;
    if (opts.rows < 1)
        return lm_fail(e, LM_EUSAGE, "rows", NULL, "%lld a step for %lld sequences",
                       (long long)r->o->rows, (long long)r->o->sequences);
    if (lm_alloc_n(&r->part, n, sizeof *r->part, "parts of a step", e) ||
        lm_alloc_n(&r->draw, n, sizeof *r->draw, "parts of a step", e))
        return e->code;
    return lm_sched_new(&opts, pages, &r->sched, e);
}

lm_code lm_serve_run(lm_paged *g, const lm_paged_opts *o, const lm_tokenizer *tok,
                     const lm_complete_opts *how, const lm_complete_hooks *h, lm_complete_stats *st,
                     lm_sched_stats *sched, lm_err *e)
{
    run r = { .g = g, .o = o, .how = how, .st = st };
    lm_code rc = lm_complete_queue_init(&r.q, tok, how, h, o->context, o->sequences, e);
    if (!rc)
        rc = open_run(&r, e);
    if (!rc)
        rc = loop(&r, e);
    if (!rc && sched)
        *sched = lm_sched_count(r.sched);
    lm_complete_queue_fini(&r.q);
    lm_sched_free(r.sched);
    lm_free(r.of);
    lm_free(r.part);
    lm_free(r.draw);
    return rc;
}
