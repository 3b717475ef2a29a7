/* SPDX-License-Identifier: Apache-2.0 */
/* score.c -- windows of sequences packed into batches. */
#include "train/score.h"

#include <inttypes.h>
#include <string.h>

#include "base/mem.h"

/* Rows [row, row + n) of the batch belong to one window; the targets of rows from `row` + skip on
 * are added to `to`. */
typedef struct {
    lm_score *to;
    int64_t row, n, skip;
} piece;

struct lm_scorer {
    lm_evaluator *v;
    int64_t stride, seq, rows;
    const uint32_t *id_bytes;
    uint32_t *ids; /* a window read from a dataset, T+1 */
    uint8_t *mask; /* its loss marks */
    int64_t used;  /* used rows of the batch */
    piece *pieces;
    size_t n_pieces, cap_pieces;
};

lm_code lm_scorer_new(lm_evaluator *v, int64_t stride, const uint32_t *id_bytes, lm_scorer **out,
                      lm_err *e)
{
    lm_scorer *s = NULL;
    *out = NULL;
    if (lm_alloc_n(&s, 1, sizeof *s, "a scorer", e))
        return e->code;
    *s = (lm_scorer){ .v = v,
                      .stride = stride,
                      .seq = v->batch.seq,
                      .rows = v->batch.seq * v->batch.batch,
                      .id_bytes = id_bytes };
    if (lm_alloc_n(&s->ids, (size_t)s->seq + 1, sizeof *s->ids, "a window", e) ||
        lm_alloc_n(&s->mask, (size_t)s->seq + 1, 1, "a window", e)) {
        lm_scorer_free(s);
        return e->code;
    }
    *out = s;
    return LM_OK;
}

void lm_scorer_free(lm_scorer *s)
{
    if (!s)
        return;
    lm_free(s->ids);
    lm_free(s->mask);
    lm_free(s->pieces);
    lm_free(s);
}

/* Rows without work: one document of padding that reaches to the end of its sequence. */
static void pad_until(lm_scorer *s, int64_t end)
{
    lm_batch *b = &s->v->batch;
    for (int64_t start = s->used; s->used < end; s->used++) {
        b->tokens[s->used] = 0;
        b->targets[s->used] = -1;
        b->pos[s->used] = (int32_t)(s->used - start);
        b->lo[s->used] = (int32_t)(start % s->seq);
        if ((s->used + 1) % s->seq == 0)
            start = s->used + 1;
    }
}

lm_code lm_scorer_flush(lm_scorer *s, lm_err *e)
{
    lm_eval_sum sum = { 0 };
    const float *loss = NULL;
    const int32_t *targets = s->v->batch.targets;
    if (!s->used)
        return LM_OK;
    pad_until(s, s->rows);
    if (lm_evaluator_run(s->v, &sum, &loss, e))
        return e->code;
    for (size_t i = 0; i < s->n_pieces; i++) {
        const piece *p = &s->pieces[i];
        for (int64_t r = p->row + p->skip; r < p->row + p->n; r++) {
            if (targets[r] < 0) /* by a loss mark */
                continue;
            p->to->nll += loss[r];
            p->to->tokens++;
            if (s->id_bytes)
                p->to->bytes += s->id_bytes[targets[r]];
        }
    }
    s->used = 0;
    s->n_pieces = 0;
    return LM_OK;
}

/* One window: ids[0..n] into n rows, of which those are scored whose id the mask names (NULL: all). */
static lm_code add_window(lm_scorer *s, const uint32_t *ids, const uint8_t *mask, int64_t n,
                          int64_t skip, lm_score *to, lm_err *e)
{
    lm_batch *b = &s->v->batch;
    int64_t vocab = s->v->model->config.vocab;
    int64_t left = s->seq - s->used % s->seq;
    for (int64_t i = 0; i <= n; i++)
        if (ids[i] >= vocab)
            return lm_fail(
                e, LM_EFORMAT, "tokens", "use the tokenizer that the model was trained with",
                "id %" PRIu32 " is not below the model's vocabulary of %" PRId64, ids[i], vocab);
    if (n > left)
        pad_until(s, s->used + left);
    if (s->used == s->rows && lm_scorer_flush(s, e))
        return e->code;
    if (lm_grow(&s->pieces, &s->cap_pieces, s->n_pieces + 1, sizeof *s->pieces, "windows", e))
        return e->code;
    s->pieces[s->n_pieces++] = (piece){ to, s->used, n, skip };
    int32_t lo = (int32_t)(s->used % s->seq);
    for (int64_t i = 0; i < n; i++, s->used++) {
        b->tokens[s->used] = (int32_t)ids[i];
        b->targets[s->used] = i < skip || (mask && !mask[i + 1]) ? -1 : (int32_t)ids[i + 1];
        b->pos[s->used] = (int32_t)i;
        b->lo[s->used] = lo;
    }
    return s->used == s->rows ? lm_scorer_flush(s, e) : LM_OK;
}

/* Window k of a sequence of n ids: rows [*begin, *begin + *rows), of which the first *skip have
 * been scored.  False past the last. */
static bool window_at(const lm_scorer *s, int64_t n, int64_t k, int64_t *begin, int64_t *rows,
                      int64_t *skip)
{
    *begin = k * s->stride;
    *skip = k ? s->seq - s->stride : 0;
    if (*begin + *skip >= n - 1)
        return false;
    *rows = n - 1 - *begin < s->seq ? n - 1 - *begin : s->seq;
    return true;
}

lm_code lm_scorer_add(lm_scorer *s, const uint32_t *ids, int64_t n, int64_t from, lm_score *to,
                      lm_err *e)
{
    int64_t begin, rows, skip;
    for (int64_t k = 0; window_at(s, n, k, &begin, &rows, &skip); k++) {
        if (begin + skip + 1 < from) /* row r scores id begin + r + 1 */
            skip = from - 1 - begin;
        if (skip < rows && add_window(s, ids + begin, NULL, rows, skip, to, e))
            return e->code;
    }
    return LM_OK;
}

lm_code lm_scorer_add_tokens(lm_scorer *s, const lm_tokens *t, int64_t at, int64_t n, lm_score *to,
                             lm_err *e)
{
    int64_t begin, rows, skip;
    for (int64_t k = 0; window_at(s, n, k, &begin, &rows, &skip); k++)
        if (lm_tokens_read(t, at + begin, rows + 1, s->v->model->config.vocab, s->ids, e) ||
            lm_tokens_read_mask(t, at + begin, rows + 1, s->mask, e) ||
            add_window(s, s->ids, s->mask, rows, skip, to, e))
            return e->code;
    return LM_OK;
}
