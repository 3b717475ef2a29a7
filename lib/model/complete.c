/* SPDX-License-Identifier: Apache-2.0 */
/* complete.c -- the loop around a generator. */
#include "model/complete.h"

#include <string.h>

#include "base/clock.h"
#include "base/mem.h"
#include "base/stop.h"
#include "model/complete_text.h"

enum {
    AHEAD = 8
}; /* completions in flight for each slot: so many short texts may finish before a long one */

typedef struct {
    lm_generator *g;
    const lm_complete_opts *o;
    const lm_complete_hooks *h;
    lm_text_rules rules;
    lm_complete_stats *st;
    lm_completion *ring; /* number i lives in ring[i % size] */
    int64_t size, head, tail;
    int64_t prompts;      /* number taken so far */
    lm_completion asked;  /* ids, prompt and max_new of the prompt with samples left */
    int64_t sample, left; /* its next sample; samples not begun yet */
    lm_completion **slot; /* NULL: free */
    int32_t *next;
    double *u; /* the draw of each slot */
    bool ended;
} run;

/* Append the token `id` to c, whose slot is free if it is the last one. */
static lm_code take_token(run *r, lm_completion *c, int32_t id, const double *logprob, lm_err *e)
{
    if (lm_completion_take(&r->rules, c, id, logprob, e))
        return e->code;
    r->st->new_tokens++;
    r->next[c->slot] = c->finish ? -1 : id;
    if (c->finish)
        r->slot[c->slot] = NULL;
    return LM_OK;
}

/* ---- prompts and their samples ---- */

/* Read the next prompt to r->asked; a failed one goes to the ring at once. */
static lm_code take_prompt(run *r, lm_err *e)
{
    lm_completion *c = &r->asked;
    bool got = true;
    lm_completion_clear(c);
    if (r->h->next(r->h->ctx, c, &got, e))
        return e->code;
    r->ended = !got;
    if (!got)
        return LM_OK;
    c->index = r->prompts++;
    if (!c->failed) {
        r->left = r->o->samples;
        r->sample = 0;
        return LM_OK;
    }
    lm_completion *place = &r->ring[r->tail++ % r->size];
    lm_completion_clear(place);
    place->index = c->index;
    place->failed = true;
    place->finish = "error";
    return lm_buf_add(&place->prompt, c->prompt.data ? c->prompt.data : "", c->prompt.len, e);
}

/* Add a sample of r->asked to the ring, with memory for its answer. */
static lm_code begin_sample(run *r, int64_t slot, lm_completion **out, lm_err *e)
{
    const lm_completion *a = &r->asked;
    lm_completion *c = &r->ring[r->tail % r->size];
    lm_completion_clear(c);
    c->index = a->index;
    c->sample = r->sample;
    c->max_new = a->max_new;
    c->slot = slot;
    if (lm_grow(&c->ids.v, &c->ids.cap, a->ids.n, sizeof *c->ids.v, "tokens", e) ||
        lm_buf_add(&c->prompt, a->prompt.data ? a->prompt.data : "", a->prompt.len, e))
        return e->code;
    memcpy(c->ids.v, a->ids.v, a->ids.n * sizeof *c->ids.v);
    c->ids.n = a->ids.n;
    if (lm_completion_reserve(&r->rules, c, e))
        return e->code;
    r->tail++;
    r->sample++;
    r->left--;
    *out = c;
    return LM_OK;
}

static int64_t free_slot(const run *r)
{
    int64_t s = 0;
    while (s < lm_generator_batch(r->g) && r->slot[s])
        s++;
    return s < lm_generator_batch(r->g) ? s : -1;
}

static bool may_begin(const run *r)
{
    return r->tail - r->head < r->size && free_slot(r) >= 0 && !lm_stopping();
}

/* Run the prompt in one slot, and begin as many of its samples as there are free slots, including
 * this one.  Every first token is drawn from the same logits. */
static lm_code begin_samples(run *r, lm_err *e)
{
    double start = lm_now();
    int64_t at = free_slot(r);
    if (lm_generator_prompt(r->g, at, r->asked.ids.v, (int64_t)r->asked.ids.n, NULL, e))
        return e->code;
    r->st->prompt_tokens += (int64_t)r->asked.ids.n;
    for (bool first = true; r->left && may_begin(r); first = false) {
        lm_completion *c = NULL;
        const int32_t *ids;
        const double *logprob = NULL;
        int64_t slot = first ? at : free_slot(r);
        if (begin_sample(r, slot, &c, e) || lm_generator_copy(r->g, at, slot, e))
            return e->code;
        r->u[at] = lm_completion_draw(&r->rules, c);
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
    while (may_begin(r) && (r->left || !r->ended)) {
        if (!r->left && take_prompt(r, e))
            return e->code;
        if (r->left && begin_samples(r, e))
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

static lm_code hand_back(run *r, lm_err *e)
{
    for (; r->head < r->tail; r->head++) {
        lm_completion *c = &r->ring[r->head % r->size];
        if (r->h->text && !c->failed && r->h->text(r->h->ctx, c, e))
            return e->code;
        if (!c->finish)
            return LM_OK;
        if (r->h->done(r->h->ctx, c, e))
            return e->code;
    }
    return LM_OK;
}

static lm_code step(run *r, lm_err *e)
{
    const int32_t *ids;
    const double *logprob = NULL;
    double start = lm_now();
    if (close_gaps(r, e))
        return e->code;
    for (int64_t s = 0; s < lm_generator_batch(r->g); s++)
        if (r->slot[s])
            r->u[s] = lm_completion_draw(&r->rules, r->slot[s]);
    if (lm_generator_next(r->g, r->next, &r->o->sample, r->u, &ids,
                          r->o->logprobs ? &logprob : NULL, e))
        return e->code;
    for (int64_t s = 0; s < lm_generator_batch(r->g); s++)
        if (r->slot[s] && take_token(r, r->slot[s], ids[s], logprob ? &logprob[s] : NULL, e))
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
    while (!lm_stopping()) {
        if (fill_slots(r, e) || hand_back(r, e))
            return e->code;
        if (any_busy(r)) {
            if (step(r, e))
                return e->code;
        } else if (r->ended && !r->left && r->head == r->tail) {
            break;
        }
    }
    return LM_OK;
}

lm_code lm_complete_run(lm_generator *g, const lm_tokenizer *tok, const lm_complete_opts *o,
                        const lm_complete_hooks *h, lm_complete_stats *st, lm_err *e)
{
    int64_t batch = lm_generator_batch(g);
    run r = { .g = g, .o = o, .h = h, .st = st, .size = AHEAD * batch };
    r.rules = lm_text_rules_of(tok, o, lm_generator_context(g));
    lm_code rc = lm_alloc_n(&r.ring, (size_t)r.size, sizeof *r.ring, "completions", e);
    if (!rc)
        rc = lm_alloc_n(&r.slot, (size_t)batch, sizeof *r.slot, "slots", e);
    if (!rc)
        rc = lm_alloc_n(&r.next, (size_t)batch, sizeof *r.next, "slots", e);
    if (!rc)
        rc = lm_alloc_n(&r.u, (size_t)batch, sizeof *r.u, "slots", e);
    for (int64_t s = 0; !rc && s < batch; s++)
        r.next[s] = -1;
    if (!rc)
        rc = loop(&r, e);
    for (int64_t i = 0; r.ring && i < r.size; i++)
        lm_completion_fini(&r.ring[i]);
    lm_completion_fini(&r.asked);
    lm_free(r.ring);
    lm_free(r.slot);
    lm_free(r.next);
    lm_free(r.u);
    return rc;
}
