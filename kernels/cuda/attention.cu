/* SPDX-License-Identifier: Apache-2.0 */
/* attention.cu -- the table of attention's kernels, and its forward on the plain path. */
#include "kernels/cuda/attention_forward.cuh"

template void attention_forward<float, false>(const lm_call *);
template void attention_forward<bf16, false>(const lm_call *);
template void attention_forward<f16, false>(const lm_call *);
extern template void attention_forward<bf16, true>(const lm_call *); /* attention_tensor.cu */
extern template void attention_forward<f16, true>(const lm_call *);

static const int64_t most_dim = 256; /* of LM_ATTN_FOR_DIM */

static bool too_wide(const lm_attention_attr *a)
{
    return a->head_dim > most_dim || lm_attention_value_dim(a) > most_dim;
}

static size_t forward_work(const lm_call *c, int)
{
    return too_wide((const lm_attention_attr *)c->attr) ? SIZE_MAX : 0;
}

/* delta, first and end of attention_backward.cuh */
static size_t backward_work(const lm_call *c, int)
{
    const lm_attention_attr *a = (const lm_attention_attr *)c->attr;
    int64_t tiles = (a->seq + ATTN_FEWEST_COLS - 1) / ATTN_FEWEST_COLS;
    if (too_wide(a))
        return SIZE_MAX;
    return (size_t)(a->batch * a->heads * a->seq) * sizeof(float) +
           (size_t)(2 * a->batch * tiles) * sizeof(int);
}

/* Both directions, for one type and path. */
#define ROWS(type, dtype, level, tensor)                                              \
    { "attention", dtype, level, attention_forward<type, tensor>, forward_work },     \
    {                                                                                 \
        "attention_dx", dtype, level, attention_backward<type, tensor>, backward_work \
    }

extern "C" const lm_kernel lm_attention_cuda_kernels[] = {
    ROWS(float, LM_DTYPE_F32, LM_CUDA_PLAIN, false),
    ROWS(bf16, LM_DTYPE_BF16, LM_CUDA_PLAIN, false),
    ROWS(f16, LM_DTYPE_F16, LM_CUDA_PLAIN, false),
    ROWS(bf16, LM_DTYPE_BF16, LM_CUDA_TENSOR, true),
    ROWS(f16, LM_DTYPE_F16, LM_CUDA_TENSOR, true),
    LM_CUDA_END
};
