/* SPDX-License-Identifier: Apache-2.0 */
/* state_rows.c -- rows of sequences that have states: checks and examples. */
#include "op/state_rows.h"

#include "kernels/attention.h"
#include "op/example.h"

enum { USED, FRESH, FIRST, KIND, SLOT };

lm_code lm_state_rows_shape(const lm_call *c, const char *op, int at, int64_t seq,
                            const lm_tensor *state, lm_err *e)
{
    const lm_tensor *in = &c->in[at];
    bool ragged = !lm_absent(&in[FIRST]);
    int64_t batch = in[USED].dim[0];
    if (lm_expect(ragged == !lm_absent(&in[KIND]), op, e, "first and kind go together") ||
        lm_expect(ragged == (seq == 0), op, e, "first goes with T = 0") ||
        lm_expect(ragged || c->in[0].dim[0] == batch * seq, op, e,
                  "there are %lld rows, not %lld times %lld", (long long)c->in[0].dim[0],
                  (long long)batch, (long long)seq))
        return e->code;
    return lm_expect(!lm_absent(&in[SLOT]) || state->dim[0] == batch, op, e,
                     "states of %lld sequences, not of %lld", (long long)state->dim[0],
                     (long long)batch);
}

int64_t lm_state_rows_example(lm_rng r, int i, int64_t batch, int64_t *seq, lm_tensor *in)
{
    int64_t rows = batch * *seq;
    in[USED] = in[FRESH] = lm_shape1(LM_DTYPE_I32, batch);
    if (lm_example_draw(r, i, 20, 2)) {
        in[FIRST] = lm_shape1(LM_DTYPE_I32, batch + 1);
        in[KIND] = lm_shape1(LM_DTYPE_I32, batch);
        rows += batch;
        *seq = 0;
    }
    if (lm_example_draw(r, i, 21, 2))
        in[SLOT] = lm_shape1(LM_DTYPE_I32, batch);
    return rows;
}

void lm_state_rows_fill(lm_rng r, const lm_tensor *in, int64_t rows, int64_t batch, int64_t seq)
{
    int32_t *used = in[USED].data, *fresh = in[FRESH].data, *first = in[FIRST].data;
    int32_t *kind = in[KIND].data, *slot = in[SLOT].data;
    int64_t at = 0;
    for (int64_t b = 0; b < batch; b++) {
        int64_t most = seq;
        if (first) {
            kind[b] = (int32_t)lm_rng_below(r, 100 + (uint64_t)b, 2);
            most = kind[b] == LM_ROWS_TOKEN ? 1 : (rows - batch) / batch;
            most = (int64_t)lm_rng_below(r, 200 + (uint64_t)b, (uint64_t)most + 1);
            first[b] = (int32_t)at;
            at += most;
        }
        fresh[b] = (int32_t)(most - (int64_t)lm_rng_below(r, (uint64_t)b * 2, 4) / 3 * most / 2);
        used[b] = (int32_t)lm_rng_below(r, (uint64_t)b * 2 + 1, 6); /* 0 often */
        if (slot) /* all but one, in another order */
            slot[b] = (int32_t)(batch - b);
    }
    if (first)
        first[batch] = (int32_t)at;
}
