/* SPDX-License-Identifier: Apache-2.0 */
/* span_score.c -- windows of a text, with spans cut out, in batches. */
#include "train/span_score.h"

#include <inttypes.h>

#include "base/mem.h"
#include "base/stop.h"

struct lm_span_scorer {
    lm_evaluator *v;
    const lm_span *span;
    uint32_t *ids;         /* the window that is being filled, */
    int64_t n;             /* and how many it has */
    int64_t windows, rows; /* windows so far; those in the batch */
};

lm_code lm_span_scorer_new(lm_evaluator *v, const lm_span *span, lm_span_scorer **out, lm_err *e)
{
    lm_span_scorer *s = NULL;
    *out = NULL;
    if (lm_alloc_n(&s, 1, sizeof *s, "a scorer", e))
        return e->code;
    *s = (lm_span_scorer){ .v = v, .span = span };
    if (lm_alloc_n(&s->ids, (size_t)span->window, sizeof *s->ids, "a window", e)) {
        lm_span_scorer_free(s);
        return e->code;
    }
    *out = s;
    return LM_OK;
}

void lm_span_scorer_free(lm_span_scorer *s)
{
    if (!s)
        return;
    lm_free(s->ids);
    lm_free(s);
}

lm_code lm_span_scorer_flush(lm_span_scorer *s, lm_score *to, lm_err *e)
{
    lm_batch *b = &s->v->batch;
    lm_eval_sum sum = { 0 };
    if (!s->rows)
        return LM_OK;
    for (int64_t i = s->rows * b->seq; i < b->batch * b->seq; i++) {
        b->tokens[i] = 0;
        b->targets[i] = -1;
    }
    for (int64_t i = s->rows * b->source_rows; i < b->batch * b->source_rows; i++)
        b->source[i] = 0;
    if (lm_evaluator_run(s->v, &sum, NULL, e))
        return e->code;
    to->nll += sum.nll;
    to->tokens += sum.tokens;
    s->rows = 0;
    return LM_OK;
}

static lm_code add_window(lm_span_scorer *s, lm_score *to, lm_err *e)
{
    lm_batch *b = &s->v->batch;
    const int64_t at = s->rows * b->seq;
    lm_span_cut(s->span, lm_rng_make(0, "span", (uint64_t)s->windows++), s->ids,
                b->source + s->rows * b->source_rows, b->tokens + at, b->targets + at);
    s->n = 0;
    return ++s->rows == b->batch ? lm_span_scorer_flush(s, to, e) : LM_OK;
}

lm_code lm_span_scorer_add(lm_span_scorer *s, const uint32_t *ids, int64_t n, lm_score *to,
                           lm_err *e)
{
    const int64_t vocab = s->v->model->config.vocab;
    for (int64_t i = 0; i < n; i++) {
        if (ids[i] >= vocab)
            return lm_fail(
                e, LM_EFORMAT, "tokens", "use the tokenizer that the model was trained with",
                "id %" PRIu32 " is not below the model's vocabulary of %" PRId64, ids[i], vocab);
        s->ids[s->n++] = ids[i];
        if (s->n == s->span->window && add_window(s, to, e))
            return e->code;
    }
    return LM_OK;
}

lm_code lm_span_scorer_add_tokens(lm_span_scorer *s, const lm_tokens *t, lm_score *to, lm_err *e)
{
    const int64_t count = lm_tokens_count(t), window = s->span->window;
    for (int64_t at = 0; at + window <= count && !lm_stop_here(); at += window)
        if (lm_tokens_read(t, at, window, s->v->model->config.vocab, s->ids, e) ||
            add_window(s, to, e))
            return e->code;
    return LM_OK;
}
