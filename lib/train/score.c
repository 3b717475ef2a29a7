/* SPDX-License-Identifier: Apache-2.0 */
/* score.c -- windows of sequences packed into batches. */
#include "train/score.h"

#include <inttypes.h>
#include <string.h>

#include "base/mem.h"
#include "base/stop.h"

/* Rows [row, row + n) of the batch belong to one window, virtual tokens included; the targets of rows from `row` + skip
 * on are added to `to`. */
typedef struct {
    lm_score *to;
    int64_t row, n, skip;
} piece;

struct lm_scorer {
    lm_evaluator *v;
    int64_t stride, seq, rows;
    int64_t virtuals; /* tokens that begin each window, */
    bool first;       /* and predict the first id of a sequence */
    int64_t room;     /* seq without them */
    const uint32_t *id_bytes;
    const lm_mlm *mlm; /* NULL: causal */
    int64_t windows;   /* so far, with mlm */
    uint32_t *ids;     /* a window read from a dataset, T+1 */
    uint8_t *mask;     /* its loss marks */
    int64_t used;      /* used rows of the batch */
    piece *pieces;
    size_t n_pieces, cap_pieces;
};

static lm_code make(lm_evaluator *v, int64_t stride, const uint32_t *id_bytes, lm_scorer **out,
                    lm_err *e)
{
    lm_scorer *s = NULL;
    *out = NULL;
    if (lm_alloc_n(&s, 1, sizeof *s, "a scorer", e))
        return e->code;
    *s = (lm_scorer){ .v = v,
                      .stride = stride,
                      .seq = v->batch.seq,
                      .room = v->batch.seq,
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

lm_code lm_scorer_new(lm_evaluator *v, int64_t stride, const uint32_t *id_bytes, lm_scorer **out,
                      lm_err *e)
{
    *out = NULL;
    if (lm_config_check_causal(&v->model->config, "model", "use a causal language model", e))
        return e->code;
    return make(v, stride, id_bytes, out, e);
}

lm_code lm_scorer_masked(lm_evaluator *v, const lm_mlm *m, const uint32_t *id_bytes,
                         lm_scorer **out, lm_err *e)
{
    if (make(v, v->batch.seq, id_bytes, out, e))
        return e->code;
    (*out)->mlm = m;
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

lm_code lm_scorer_virtual(lm_scorer *s, int64_t n, bool first, lm_err *e)
{
    if (n < 0 || n > s->seq - s->stride)
        return lm_fail(e, LM_EUSAGE, "virtual tokens", "use longer windows, or a smaller stride",
                       "%" PRId64 " and a stride of %" PRId64 " are more than the windows' %" PRId64
                       " tokens",
                       n, s->stride, s->seq);
    s->virtuals = n;
    s->first = first && n;
    s->room = s->seq - n;
    return LM_OK;
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
        b->hi[s->used] = (int32_t)(s->used % s->seq) + 1;
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

/* Append a row of the window whose first row is `start`. */
static void add_row(lm_scorer *s, int64_t start, uint32_t id, int32_t target)
{
    lm_batch *b = &s->v->batch;
    b->tokens[s->used] = (int32_t)id;
    b->targets[s->used] = target;
    b->pos[s->used] = (int32_t)(s->used - start);
    b->lo[s->used] = (int32_t)(start % s->seq);
    s->used++;
}

/* The ids of a window, of which those are scored that the mask names (NULL: all). */
typedef struct {
    const uint32_t *ids;
    const uint8_t *mask;
    /* n rows, and the id that the last one predicts; the first `skip` rows are not scored */
    int64_t n, skip;
    bool first; /* ids[0] is scored, too */
} window;

/* Its rows for masked language modelling. */
static void add_masked(lm_scorer *s, const window *w)
{
    lm_batch *b = &s->v->batch;
    int64_t start = s->used;
    for (int64_t i = 0; i < w->n; i++) {
        add_row(s, start, w->ids[i], -1);
        b->hi[start + i] = (int32_t)(start % s->seq + w->n);
    }
    lm_mlm_apply(s->mlm, 0, s->windows++, w->n, w->mask, b->tokens + start, b->targets + start);
}

static lm_code add_window(lm_scorer *s, const window *w, lm_score *to, lm_err *e)
{
    int64_t vocab = s->v->model->config.vocab, rows = s->virtuals + w->n;
    int64_t left = s->seq - s->used % s->seq, skip = s->virtuals + w->skip;
    for (int64_t i = 0; i < w->n + !s->mlm; i++)
        if (w->ids[i] >= vocab)
            return lm_fail(
                e, LM_EFORMAT, "tokens", "use the tokenizer that the model was trained with",
                "id %" PRIu32 " is not below the model's vocabulary of %" PRId64, w->ids[i], vocab);
    if (rows > left)
        pad_until(s, s->used + left);
    if (s->used == s->rows && lm_scorer_flush(s, e))
        return e->code;
    if (lm_grow(&s->pieces, &s->cap_pieces, s->n_pieces + 1, sizeof *s->pieces, "windows", e))
        return e->code;
    s->pieces[s->n_pieces++] = (piece){ to, s->used, rows, w->first ? s->virtuals - 1 : skip };
    int64_t start = s->used;
    for (int64_t i = 0; i < s->virtuals; i++) {
        bool scored = w->first && i == s->virtuals - 1 && (!w->mask || w->mask[0]);
        add_row(s, start, (uint32_t)(vocab + i), scored ? (int32_t)w->ids[0] : -1);
    }
    if (s->mlm)
        add_masked(s, w);
    for (int64_t i = 0; !s->mlm && i < w->n; i++) {
        bool scored = i >= w->skip && (!w->mask || w->mask[i + 1]);
        add_row(s, start, w->ids[i], scored ? (int32_t)w->ids[i + 1] : -1);
    }
    return s->used == s->rows ? lm_scorer_flush(s, e) : LM_OK;
}

/* Window k of a sequence of n ids: rows [begin, begin + n), of which the first `skip` have been scored.  False past the
 * last. */
static bool window_at(const lm_scorer *s, int64_t n, int64_t k, int64_t *begin, window *w)
{
    *begin = k * s->stride;
    if (s->mlm) {
        w->n = n - *begin < s->room ? n - *begin : s->room;
        return w->n > 0;
    }
    w->first = s->first && !k;
    w->skip = k ? s->room - s->stride : 0;
    if (*begin + w->skip >= n - !w->first)
        return false;
    w->n = n - 1 - *begin < s->room ? n - 1 - *begin : s->room;
    return true;
}

lm_code lm_scorer_add(lm_scorer *s, const uint32_t *ids, int64_t n, int64_t from, lm_score *to,
                      lm_err *e)
{
    int64_t begin;
    window w = { 0 };
    for (int64_t k = 0; window_at(s, n, k, &begin, &w) && !lm_stop_here(); k++) {
        w.ids = ids + begin;
        w.first = w.first && !from;
        if (begin + w.skip + 1 < from) /* row r scores id begin + r + 1 */
            w.skip = from - 1 - begin;
        if ((w.first || w.skip < w.n) && add_window(s, &w, to, e))
            return e->code;
    }
    return LM_OK;
}

lm_code lm_scorer_add_tokens(lm_scorer *s, const lm_tokens *t, int64_t at, int64_t n, lm_score *to,
                             lm_err *e)
{
    int64_t begin;
    window w = { .ids = s->ids, .mask = s->mask };
    for (int64_t k = 0; window_at(s, n, k, &begin, &w) && !lm_stop_here(); k++)
        if (lm_tokens_read(t, at + begin, w.n + !s->mlm, s->v->model->config.vocab, s->ids, e) ||
            lm_tokens_read_mask(t, at + begin, w.n + !s->mlm, s->mask, e) ||
            add_window(s, &w, to, e))
            return e->code;
    return LM_OK;
}
