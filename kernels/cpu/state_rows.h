/* SPDX-License-Identifier: Apache-2.0 */
/* state_rows.h -- the rows of a sequence in a call of an operator with states (kernels/delta.h,
 * kernels/linear_attention.h). */
#ifndef LM_KERNELS_CPU_STATE_ROWS_H
#define LM_KERNELS_CPU_STATE_ROWS_H

#include "kernels/attention.h"

typedef struct {
    int64_t row, n, fresh; /* the first row, and how many there are, and are real */
    int64_t used, slot;
    bool token; /* one step of a recurrence */
} state_rows;

static inline const int32_t *state_ids(const lm_call *c, int i)
{
    return i < c->n_in ? c->in[i].data : NULL;
}

/* Of sequence b; used, fresh, first, kind and slot begin at input `at`, and rows are those of input 0.  b = batch: of ragged
 * rows those that belong to no sequence. */
static inline state_rows state_rows_of(const lm_call *c, int at, int64_t seq, int64_t b)
{
    const int32_t *first = state_ids(c, at + 2), *slot = state_ids(c, at + 4);
    int64_t batch = c->in[at].dim[0];
    state_rows x = { .row = first ? first[b] : b * seq, .n = seq };
    if (b == batch) {
        x.n = first ? c->in[0].dim[0] - x.row : 0;
        return x;
    }
    if (first)
        x.n = first[b + 1] - first[b];
    x.fresh = state_ids(c, at + 1)[b];
    x.used = state_ids(c, at)[b];
    x.slot = slot ? slot[b] : b;
    x.token = first ? state_ids(c, at + 3)[b] == LM_ROWS_TOKEN : seq == 1;
    return x;
}

#endif
