/* SPDX-License-Identifier: Apache-2.0 */
/* complete_queue.c -- completions in the order of their prompts, in places that are used again. */
#include "model/complete_queue.h"

#include <string.h>

#include "base/clock.h"
#include "base/mem.h"

enum {
    AHEAD = 8
}; /* completions in flight for each that grows: so many short texts may finish before a long one */

lm_code lm_complete_queue_init(lm_complete_queue *q, const lm_tokenizer *tok,
                               const lm_complete_opts *o, const lm_complete_hooks *h,
                               int64_t context, int64_t width, lm_err *e)
{
    *q = (lm_complete_queue){ .o = o, .h = h, .size = AHEAD * width };
    q->rules = lm_text_rules_of(tok, o, context);
    if (lm_alloc_n(&q->place, (size_t)q->size, sizeof *q->place, "completions", e) ||
        lm_alloc_n(&q->live, (size_t)q->size, sizeof *q->live, "completions", e))
        return e->code;
    for (int64_t i = 0; i < q->size; i++)
        q->live[i] = &q->place[i];
    return LM_OK;
}

void lm_complete_queue_fini(lm_complete_queue *q)
{
    for (int64_t i = 0; q->place && i < q->size; i++)
        lm_completion_fini(&q->place[i]);
    lm_completion_fini(&q->asked);
    lm_free(q->place);
    lm_free(q->live);
}

lm_code lm_complete_queue_read(lm_complete_queue *q, lm_err *e)
{
    lm_completion *c = &q->asked;
    bool got = true;
    lm_completion_clear(c);
    c->read_at = lm_now();
    c->index = q->o->first + q->prompts;
    if (q->h->next(q->h->ctx, c, &got, e))
        return e->code;
    q->ended = !got;
    if (!got)
        return LM_OK;
    q->prompts++;
    if (!c->failed) {
        q->left = q->o->samples;
        q->sample = 0;
        return LM_OK;
    }
    lm_completion *place = q->live[q->n++];
    lm_completion_clear(place);
    place->index = c->index;
    place->sample = 0;
    place->failed = true;
    place->finish = "error";
    return lm_buf_add(&place->prompt, c->prompt.data ? c->prompt.data : "", c->prompt.len, e);
}

lm_code lm_complete_queue_begin(lm_complete_queue *q, lm_completion **out, lm_err *e)
{
    const lm_completion *a = &q->asked;
    lm_completion *c = q->live[q->n];
    lm_completion_clear(c);
    c->index = a->index;
    c->sample = q->sample;
    c->max_new = a->max_new;
    c->model = a->model;
    c->read_at = a->read_at;
    if (lm_grow(&c->ids.v, &c->ids.cap, a->ids.n, sizeof *c->ids.v, "tokens", e) ||
        lm_buf_add(&c->prompt, a->prompt.data ? a->prompt.data : "", a->prompt.len, e))
        return e->code;
    memcpy(c->ids.v, a->ids.v, a->ids.n * sizeof *c->ids.v);
    c->ids.n = a->ids.n;
    if (lm_completion_reserve(&q->rules, c, e))
        return e->code;
    q->n++;
    q->sample++;
    q->left--;
    *out = c;
    return LM_OK;
}

lm_code lm_complete_queue_take(lm_complete_queue *q, lm_completion *c, int32_t id,
                               const double *logprob, lm_err *e)
{
    lm_err why = { 0 };
    lm_code rc = lm_completion_take(&q->rules, c, id, logprob, &why);
    if (rc == LM_ENUMERIC && q->h->failed) {
        c->failed = true;
        c->finish = "error";
        return q->h->failed(q->h->ctx, c, &why, e);
    }
    if (rc)
        *e = why;
    return rc;
}

static void exchange(const lm_complete_queue *q, int64_t a, int64_t b)
{
    lm_completion *c = q->live[a];
    q->live[a] = q->live[b];
    q->live[b] = c;
}

lm_code lm_complete_queue_hand_back(lm_complete_queue *q, lm_err *e)
{
    const bool any = q->o->any_order;
    int64_t i = 0, kept = 0;
    for (; i < q->n; i++) {
        lm_completion *c = q->live[i];
        if (!any && q->h->text && !c->failed && q->h->text(q->h->ctx, c, e))
            return e->code;
        if (!c->finish && !any)
            break;
        if (c->finish && q->h->done(q->h->ctx, c, e))
            return e->code;
        if (!c->finish)
            exchange(q, i, kept++);
    }
    for (; i < q->n; i++)
        exchange(q, i, kept++);
    q->n = kept;
    return LM_OK;
}
