/* SPDX-License-Identifier: Apache-2.0 */
/* complete.c -- the loop around a generator. */
#include "model/complete.h"

#include "base/clock.h"
#include "base/mem.h"
#include "model/complete_queue.h"

typedef struct {
    lm_generator *g;
    const lm_complete_opts *o;
    lm_complete_stats *st;
    lm_complete_queue q;
    lm_completion **slot; /* NULL: free */
    int32_t *next;
    double *u;     /* the draw of each slot */
    int64_t *most; /* with drafts N: how many of each slot, */
    double *draws; /* and the draws of their tokens: [B,N], [B,N], [B,N+1] */
} run;

/* Append the token `id` to c, whose slot is free if it is the last one. */
static lm_code take_token(run *r, lm_completion *c, int32_t id, const double *logprob, lm_err *e)
{
    if (lm_complete_queue_take(&r->q, c, id, logprob, e))
        return e->code;
    r->st->new_tokens += !c->failed;
    r->next[c->slot] = c->finish ? -1 : id;
    if (c->finish)
        r->slot[c->slot] = NULL;
    return LM_OK;
}

/* ---- prompts and their samples ---- */

static int64_t free_slot(const run *r)
{
    int64_t s = 0;
    while (s < lm_generator_batch(r->g) && r->slot[s])
        s++;
    return s < lm_generator_batch(r->g) ? s : -1;
}

static lm_code run_prompt(const run *r, int64_t slot, lm_err *e)
{
    const lm_ids *ids = &r->q.asked.ids;
    const lm_complete_hooks *h = r->q.h;
    return h->begin ? h->begin(h->ctx, r->g, slot, ids->v, (int64_t)ids->n, e)
                    : lm_generator_prompt(r->g, slot, ids->v, (int64_t)ids->n, NULL, e);
}

static bool may_begin(const run *r)
{
    return lm_complete_queue_may_begin(&r->q) && free_slot(r) >= 0;
}

/* Run the prompt in one slot, and begin as many of its samples as there are free slots, including
 * this one.  Every first token is drawn from the same logits. */
static lm_code begin_samples(run *r, lm_err *e)
{
    double start = lm_now();
    int64_t at = free_slot(r);
    if (run_prompt(r, at, e))
        return e->code;
    r->st->prompt_tokens += (int64_t)r->q.asked.ids.n;
    for (bool first = true; r->q.left && may_begin(r); first = false) {
        lm_completion *c = NULL;
        const int32_t *ids;
        const double *logprob = NULL;
        int64_t slot = first ? at : free_slot(r);
        if (lm_complete_queue_begin(&r->q, &c, e) || lm_generator_copy(r->g, at, slot, e))
            return e->code;
        c->slot = slot;
        r->u[at] = lm_completion_draw(&r->q.rules, c);
        if (lm_generator_choose(r->g, &r->o->sample, r->u, &ids, r->o->logprobs ? &logprob : NULL,
                                e))
            return e->code;
        r->slot[slot] = c;
        r->st->prompts++;
        if (take_token(r, c, ids[at], logprob ? &logprob[at] : NULL, e))
            return e->code;
    }
    r->st->prompt_seconds += lm_now() - start;
    return LM_OK;
}

static lm_code fill_slots(run *r, lm_err *e)
{
    while (may_begin(r) && lm_complete_queue_has_more(&r->q)) {
        if (!r->q.left && lm_complete_queue_read(&r->q, e))
            return e->code;
        if (r->q.left && begin_samples(r, e))
            return e->code;
    }
    return LM_OK;
}

/* Move the last texts to gaps before them, because a step has rows up to the last used slot. */
static lm_code close_gaps(run *r, lm_err *e)
{
    int64_t last = lm_generator_batch(r->g) - 1;
    for (int64_t gap = 0; gap < last; gap++) {
        if (r->slot[gap])
            continue;
        while (last > gap && !r->slot[last])
            last--;
        if (last == gap)
            break;
        if (lm_generator_copy(r->g, last, gap, e))
            return e->code;
        r->slot[gap] = r->slot[last];
        r->slot[gap]->slot = gap;
        r->next[gap] = r->next[last];
        r->slot[last] = NULL;
        r->next[last] = -1;
    }
    return LM_OK;
}

/* ---- the loop ---- */

static lm_code step(run *r, lm_err *e)
{
    const int32_t *ids;
    const double *logprob = NULL;
    double start = lm_now();
    if (close_gaps(r, e))
        return e->code;
    for (int64_t s = 0; s < lm_generator_batch(r->g); s++)
        if (r->slot[s])
            r->u[s] = lm_completion_draw(&r->q.rules, r->slot[s]);
    if (lm_generator_next(r->g, r->next, &r->o->sample, r->u, &ids,
                          r->o->logprobs ? &logprob : NULL, e))
        return e->code;
    for (int64_t s = 0; s < lm_generator_batch(r->g); s++)
        if (r->slot[s] && take_token(r, r->slot[s], ids[s], logprob ? &logprob[s] : NULL, e))
            return e->code;
    r->st->decode_seconds += lm_now() - start;
    return LM_OK;
}

/* ---- steps with drafts ---- */

/* The drafts and draws of a slot: no more than may follow. */
static void ask_drafts(run *r, int64_t slot, double *draft, double *accept, double *last)
{
    const lm_completion *c = r->slot[slot];
    const lm_text_rules *rules = &r->q.rules;
    const int64_t N = lm_generator_drafts(r->g), made = (int64_t)(c->ids.n - c->n_prompt);
    const int64_t room = lm_generator_context(r->g) - lm_generator_used(r->g, slot) - 1;
    const int64_t left = c->max_new - made - 1;
    int64_t most = N < room ? N : room;
    most = most < left ? most : left;
    r->most[slot] = most > 0 ? most : 0;
    for (int64_t j = 0; j <= r->most[slot]; j++) {
        last[j] = lm_completion_draw_for(rules, c, "sample", j);
        if (j == r->most[slot])
            break;
        draft[j] = lm_completion_draw_for(rules, c, "draft", j);
        accept[j] = lm_completion_draw_for(rules, c, "accept", j);
    }
}

/* The tokens of a slot, up to the last of its text. */
static lm_code take_drafts(run *r, int64_t slot, const lm_draft_answer *a, lm_err *e)
{
    const int64_t N = lm_generator_drafts(r->g), n = a->count[slot];
    lm_completion *c = r->slot[slot];
    r->st->steps++;
    r->st->drafted += a->drafted[slot];
    c->drafted += a->drafted[slot];
    for (int64_t j = 0; j < n && r->slot[slot] == c; j++) {
        const int64_t at = slot * (N + 1) + j;
        if (take_token(r, c, a->ids[at], a->logprob ? &a->logprob[at] : NULL, e))
            return e->code;
        if (j + 1 < n && r->slot[slot] == c) { /* without the drafts behind the end of a text */
            r->st->accepted++;
            c->accepted++;
        }
    }
    return LM_OK;
}

static lm_code draft_step(run *r, lm_err *e)
{
    const int64_t B = lm_generator_batch(r->g), N = lm_generator_drafts(r->g);
    double *accept = r->draws + B * N, *last = accept + B * N, start = lm_now();
    const lm_draft_ask ask = { r->next, r->most, r->draws, accept, last, r->o->logprobs };
    lm_draft_answer a;
    if (close_gaps(r, e))
        return e->code;
    for (int64_t s = 0; s < B; s++)
        if (r->slot[s])
            ask_drafts(r, s, r->draws + s * N, accept + s * N, last + s * (N + 1));
    if (lm_generator_speculate(r->g, &ask, &r->o->sample, &a, e))
        return e->code;
    for (int64_t s = 0; s < B; s++)
        if (r->slot[s] && take_drafts(r, s, &a, e))
            return e->code;
    r->st->decode_seconds += lm_now() - start;
    return LM_OK;
}

static bool any_busy(const run *r)
{
    for (int64_t s = 0; s < lm_generator_batch(r->g); s++)
        if (r->slot[s])
            return true;
    return false;
}

static lm_code loop(run *r, lm_err *e)
{
    while (!lm_stop_here()) {
        if (fill_slots(r, e) || lm_complete_queue_hand_back(&r->q, e))
            return e->code;
        if (any_busy(r)) {
            if (lm_generator_drafts(r->g) ? draft_step(r, e) : step(r, e))
                return e->code;
        } else if (!lm_complete_queue_has_more(&r->q) && !r->q.n) {
            break;
        }
    }
    return LM_OK;
}

lm_code lm_complete_run(lm_generator *g, const lm_tokenizer *tok, const lm_complete_opts *o,
                        const lm_complete_hooks *h, lm_complete_stats *st, lm_err *e)
{
    int64_t batch = lm_generator_batch(g);
    run r = { .g = g, .o = o, .st = st };
    lm_code rc = lm_complete_queue_init(&r.q, tok, o, h, lm_generator_context(g), batch, e);
    if (!rc)
        rc = lm_alloc_n(&r.slot, (size_t)batch, sizeof *r.slot, "slots", e);
    if (!rc)
        rc = lm_alloc_n(&r.next, (size_t)batch, sizeof *r.next, "slots", e);
    if (!rc)
        rc = lm_alloc_n(&r.u, (size_t)batch, sizeof *r.u, "slots", e);
    if (!rc)
        rc = lm_alloc_n(&r.most, (size_t)batch, sizeof *r.most, "slots", e);
    if (!rc)
        rc = lm_alloc_n(&r.draws, (size_t)(batch * (3 * lm_generator_drafts(g) + 1)),
                        sizeof *r.draws, "slots", e);
    for (int64_t s = 0; !rc && s < batch; s++)
        r.next[s] = -1;
    if (!rc)
        rc = loop(&r, e);
    lm_complete_queue_fini(&r.q);
    lm_free(r.slot);
    lm_free(r.next);
    lm_free(r.u);
    lm_free(r.most);
    lm_free(r.draws);
    return rc;
}
