/* SPDX-License-Identifier: Apache-2.0 */
/* blaslt.h -- matrix products by cuBLASLt, whose library is opened at the first use.
 *
 * cuBLASLt's heuristics are queried once for a shape (sizes, types, pitches, alignments); the
 * result is kept.  One host thread at a time, and one stream: products share one workspace. */
#ifndef LM_KERNELS_CUDA_BLASLT_H
#define LM_KERNELS_CUDA_BLASLT_H

#include "base/err.h"
#include "kernels/fp8.h"
#include "kernels/kernel.h"

struct CUstream_st; /* cudaStream_t points to one */

typedef struct lm_cuda_lt lm_cuda_lt;

/* C [m,n] = op(A) op(B) (+ C) (+ bias over columns), all row-major, sums in F32: as gemm_call of
 * gemm.cuh, but that bias has the type of C.  tf32: F32 factors are rounded to TF32.
 *
 * FP8 factors (kernels/fp8.h) have scales; A not transposed, B transposed, no batch, bias of BF16.
 *
 * gelu, slope, z, a_sum: as in gemm_call, but GELU is the tanh form only, a_sum is written and not
 * added to, and no batch has any of them.  A product with them may be refused although one without
 * is supported. */
typedef struct {
    int64_t m, n, k;
    lm_dtype a_type, b_type, cd; /* of A and B: the same, but for FP8 */
    bool ta, tb, accumulate, tf32;
    const void *a, *b;
    int64_t lda, ldb, ldc;
    void *c;
    const void *bias;                            /* [n], or NULL */
    int64_t batch, stride_a, stride_b, stride_c; /* as in gemm_call */
    const float *a_scale, *b_scale;              /* FP8 only */
    lm_fp8_scaling a_scaling, b_scaling;
    bool formless; /* cuBLASLt has no form for such scales on this card: the call is only counted */
    bool gelu, slope;
    void *z;
    float *a_sum;
} lm_lt_gemm;

/* Counts of requests: each shape is queried and counted once.  A shape without epilogue is
 * supported or not; one with an epilogue may be refused, and is then requested again without. */
typedef struct {
    int64_t shapes;          /* for which heuristics were queried */
    int64_t hits;            /* products whose shape was known */
    int64_t unserved_shapes; /* for which cuBLASLt has no algorithm */
    int64_t unserved;        /* products of these shapes, which another kernel computed */
    int64_t refused_shapes, refused;
} lm_lt_counts;

/* On the device that is current.  workspace: bytes of device memory, for example for split sums.
 * deterministic: no sums of undefined order.  Fails: LM_EIO when the library is missing or fails;
 * LM_ELIMIT for the workspace. */
lm_code lm_cuda_lt_new(size_t workspace, bool deterministic, lm_cuda_lt **out, lm_err *e);
void lm_cuda_lt_free(lm_cuda_lt *lt); /* after all its work is complete; NULL is fine */

/* Enqueue a product on the stream.  False: cuBLASLt does not serve it (a pitch it has no kernel
 * for, an epilogue that it lacks), and nothing was done; counted. */
bool lm_cuda_lt_gemm(lm_cuda_lt *lt, const lm_lt_gemm *g, struct CUstream_st *stream);

/* Of the stream's products so far: all zero on the plain path.  Exported for tests. */
void lm_cuda_lt_counts(const lm_stream *s, lm_lt_counts *out);
/* cuBLASLt's version as major * 10000 + minor * 100 + patch. */
size_t lm_cuda_lt_version(const lm_cuda_lt *lt);

#endif
