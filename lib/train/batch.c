/* batch.c -- micro-batches. */
#include "train/batch.h"

#include <string.h>

#include "base/mem.h"

lm_code lm_batch_new(lm_batch *b, int64_t batch, int64_t seq, lm_err *e)
{
    size_t n = (size_t)(batch * seq);
    *b = (lm_batch){ .batch = batch, .seq = seq };
    if (lm_alloc_n(&b->tokens, n, sizeof(int32_t), "a batch", e) ||
        lm_alloc_n(&b->targets, n, sizeof(int32_t), "a batch", e) ||
        lm_alloc_n(&b->pos, n, sizeof(int32_t), "a batch", e) ||
        lm_alloc_n(&b->lo, n, sizeof(int32_t), "a batch", e)) {
        lm_batch_fini(b);
        return e->code;
    }
    return LM_OK;
}

void lm_batch_fini(lm_batch *b)
{
    lm_free(b->tokens);
    lm_free(b->targets);
    lm_free(b->pos);
    lm_free(b->lo);
    memset(b, 0, sizeof *b);
}

lm_code lm_batch_fill(lm_batch *b, lm_feed *f, int64_t index, int64_t end, lm_err *e)
{
    b->valid = 0;
    for (int64_t i = 0; i < b->batch; i++) {
        int64_t at = i * b->seq, valid = 0;
        if (index + i < end) {
            if (lm_feed_window(f, index + i, b->tokens + at, b->targets + at, b->pos + at,
                               b->lo + at, &valid, e))
                return e->code;
            b->valid += valid;
            continue;
        }
        for (int64_t t = 0; t < b->seq; t++) {
            b->tokens[at + t] = 0;
            b->targets[at + t] = -1;
            b->pos[at + t] = (int32_t)t;
            b->lo[at + t] = 0;
        }
    }
    return LM_OK;
}

void lm_batch_bind(const lm_batch *b, const lm_model *m, lm_exec *x, float *scale)
{
    lm_exec_bind(x, m->tokens, b->tokens);
    lm_exec_bind(x, m->targets, b->targets);
    lm_exec_bind(x, m->pos, b->pos);
    lm_exec_bind(x, m->scale, scale);
    if (m->lo != LM_NONE)
        lm_exec_bind(x, m->lo, b->lo);
}
