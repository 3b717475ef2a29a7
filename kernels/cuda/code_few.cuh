/* SPDX-License-Identifier: Apache-2.0 */
/* code_few.cuh -- products of few rows (tokens being decoded) with a weight in codes, which are read once: of a linear layer,
 * or of the experts that the rows belong to. */
#ifndef LM_KERNELS_CUDA_CODE_FEW_CUH
#define LM_KERNELS_CUDA_CODE_FEW_CUH

#include "kernels/cuda/code_rows.cuh"

/* y [m,n] = x [m,k] w^T (+ bias), sums in F32.  With offsets (kernels/grouped.h) row i of x meets the `n` rows of w from
 * n times its group on, or none: then y is 0. */
struct code_few {
    const lm_code_rows *w;
    lm_dtype act;
    int64_t m, n, k;
    const void *x;
    int64_t ldx, ldy;
    void *y;
    bool wide_y;            /* y is F32, not act */
    const float *bias;      /* [n] or null */
    const int32_t *offsets; /* [groups+1] or null: then m is at most 8 */
    int64_t groups;
};

/* The same for x of type T (code_few_kernel.cuh). */
template <class T> void code_few_as(const code_few *f, const lm_stream *s);
void code_few_run(const code_few *f, const lm_stream *s);

#endif
