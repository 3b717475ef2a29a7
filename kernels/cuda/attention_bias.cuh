/* SPDX-License-Identifier: Apache-2.0 */
/* attention_bias.cuh -- biases by distance (kernels/attention.h) on a device. */
#ifndef LM_KERNELS_CUDA_ATTENTION_BIAS_CUH
#define LM_KERNELS_CUDA_ATTENTION_BIAS_CUH

#include "kernels/cuda/device.cuh"

extern "C" {
#include "kernels/attention.h"
}

/* table [H,columns]; null: none. */
struct bias_table {
    const float *table;
    int columns, zero;
};

/* Operand i of a call, which may be absent. */
inline bias_table bias_of(const lm_call *c, int i, const lm_attention_attr *a)
{
    bias_table b = {};
    b.table = in_ptr<const float>(c, i);
    if (b.table) {
        b.columns = (int)c->in[i].dim[1];
        b.zero = (int)a->bias_zero;
    }
    return b;
}

__device__ inline int bias_clamp(const bias_table &b, int column)
{
    return column < 0 ? 0 : column < b.columns ? column : b.columns - 1;
}

/* The bias of head h, 0 without a table. */
__device__ inline float bias_at(const bias_table &b, int64_t h, int64_t distance)
{
    return b.table ? b.table[h * b.columns + bias_clamp(b, (int)distance + b.zero)] : 0.0f;
}

#endif
