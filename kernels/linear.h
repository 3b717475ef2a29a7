/* linear.h -- the linear layer y = x W^T + b and the two halves of its backward, kept apart so that
 * schedules can move the weight half (zero-bubble pipelines, frozen weights).
 *
 * linear     in  x [N,K] act, w [M,K] act, b [M] F32 (optional)
 *            out y [N,M] act or F32                          y = x w^T + b, sums in F32
 * linear_dx  in  dy [N,M] act, w [M,K] act
 *            out dx [N,K] act                                dx = dy w
 * linear_dw  in  dy [N,M] act, x [N,K] act
 *            out dw [M,K] F32 (acc), db [M] F32 (optional, acc)   dw (+)= dy^T x; db (+)= column sums of dy
 * No operand aliases another.  Tolerance against linear_ref in double: relative L2 1e-6 (F32), 4e-3 (BF16).
 *
 * gemm() below is what they are made of, exported for the head and for the bench. */
#ifndef LM_KERNELS_LINEAR_H
#define LM_KERNELS_LINEAR_H

#include "kernels/kernel.h"

typedef struct {
    lm_acc acc; /* linear_dw only */
} lm_linear_attr;

/* C [m,n] (row pitch ldc) = op(A) op(B) (+ C) (+ bias over columns).  ta: A is stored [k,m]; tb: B is stored
 * [n,k].  a and b have dtype ab (BF16 or F32); c has dtype cd (BF16 or F32). */
typedef struct {
    int64_t m, n, k;
    lm_dtype ab, cd;
    bool ta, tb, accumulate;
    const void *a, *b;
    int64_t lda, ldb, ldc;
    void *c;
    const float *bias; /* [n] or NULL */
    void *work;        /* lm_gemm_work bytes */
} lm_gemm;
size_t lm_gemm_work(const lm_gemm *g, lm_cpu_level level, int threads);
void lm_gemm_run(const lm_gemm *g, lm_cpu_level level, lm_par *par);

#endif
