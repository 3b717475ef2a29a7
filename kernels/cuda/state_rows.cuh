/* SPDX-License-Identifier: Apache-2.0 */
/* state_rows.cuh -- the rows of a sequence in a call of an operator with states (kernels/delta.h,
 * kernels/linear_attention.h), on the device. */
#ifndef LM_KERNELS_CUDA_STATE_ROWS_CUH
#define LM_KERNELS_CUDA_STATE_ROWS_CUH

#include "kernels/cuda/device.cuh"

extern "C" {
#include "kernels/attention.h"
}

struct state_view {
    const int32_t *used, *fresh, *first, *kind, *slot;
    int64_t seq, n; /* rows of all */
};

struct state_rows {
    int64_t row, fresh, used, slot; /* the first row, and how many are real */
    bool token;                     /* one step of a recurrence */
};

__device__ inline state_rows state_rows_of(const state_view &v, int64_t b)
{
    state_rows x;
    x.row = v.first ? v.first[b] : b * v.seq;
    x.fresh = v.fresh[b];
    x.used = v.used[b];
    x.slot = v.slot ? v.slot[b] : b;
    x.token = v.first ? v.kind[b] == LM_ROWS_TOKEN : v.seq == 1;
    return x;
}

/* The five operands begin at input `at`; rows are those of input 0. */
inline state_view state_view_of(const lm_call *c, int at, int64_t seq)
{
    state_view v = {};
    v.used = in_ptr<int32_t>(c, at);
    v.fresh = in_ptr<int32_t>(c, at + 1);
    v.first = in_ptr<int32_t>(c, at + 2);
    v.kind = in_ptr<int32_t>(c, at + 3);
    v.slot = in_ptr<int32_t>(c, at + 4);
    v.seq = seq;
    v.n = c->in[0].dim[0];
    return v;
}

#endif
