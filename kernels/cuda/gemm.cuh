/* SPDX-License-Identifier: Apache-2.0 */
/* gemm.cuh -- one matrix product, by the stream's level: the plain tiles of gemm_plain.cu, or
 * cuBLASLt (blaslt.h).  Used by linear and the head. */
#ifndef LM_KERNELS_CUDA_GEMM_CUH
#define LM_KERNELS_CUDA_GEMM_CUH

#include "kernels/cuda/device.cuh"

extern "C" {
#include "kernels/linear.h"
#include "numeric/code_rows.h"
}

/* C [m,n] (row pitch ldc) = op(A) op(B) (+ C) (+ bias over columns), all row-major.  ta: A is
 * stored [k,m]; tb: B is stored [n,k].  A and B have type ab (F32, BF16, F16), C has cd (F32, or
 * ab); sums in F32. */
struct gemm_call {
    int64_t m, n, k;
    lm_dtype ab, cd;
    bool ta, tb, accumulate;
    const void *a, *b;
    int64_t lda, ldb, ldc;
    void *c;
    const float *bias; /* [n], or null */
    void *work;        /* gemm_work bytes, 256-byte aligned */
    /* A batch of products of one shape (0: one product): elements from the matrix of one to that of
     * the next; 0 where all share A or B.  All share the bias. */
    int64_t batch, stride_a, stride_b, stride_c;
    /* The function of the sums before they are stored in C, which then has type ab and is not added
     * to; GELU or none.  Forward: C = f(sum + bias), and z, when given, gets sum + bias.  Backward
     * (slope): C = sum * f'(z), without a bias. z has C's pitch and the type ab.  A is then not
     * transposed, and there is no batch. */
    lm_activation act;
    bool slope;
    void *z;
    /* [m] or null: sums of op(A) over k (a bias gradient); replaced or added to as C is.  For a
     * weight gradient: ta, not tb, C of F32, no batch. */
    float *a_sum;
    /* The weight behind B in codes, of formats in code_kind.h, which is read as ab; b is then not read.  A is not transposed,
     * and there is no batch, function or addition.  Null: b. */
    const lm_code_rows *b_codes;
};

/* Of the pointers, only the presence of a_sum matters. */
size_t gemm_work(const gemm_call *g, const lm_stream *s);
void gemm_run(const gemm_call *g, lm_stream *s);

/* The same for b_codes (gemm_codes.cu). */
size_t gemm_codes_work(const gemm_call *g, const lm_stream *s);
void gemm_codes_run(const gemm_call *g, lm_stream *s);

#endif
