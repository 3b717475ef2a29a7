/* SPDX-License-Identifier: Apache-2.0 */
/* matmul.h -- products and inverses of matrices, or of batches of them, that are values of a graph: weights of
 * adapters rather than rows of tokens (those: kernels/linear.h, which runs in the low type).
 *
 * matmul   in  a [M,K] or [B,M,K] ([K,M] with attr.turn_a), b [K,N] or [B,K,N] ([N,K] with attr.turn_b)
 *          out c [M,N], or [B,M,N] when a or b is a batch: c = op(a) op(b).  A matrix, or a batch of
 *              one, is used for all of the other's batch.
 * inverse  in  x [N,N] or [B,N,N]      out y of its shape: x y = 1, by Gauss's elimination with partial pivoting in double,
 *              rounded once.  A singular matrix, or one with a number that is not finite, has a result of NaN.
 *
 * The precision pass leaves both in F32.  Sums of matmul in F32 (reference: in double), in order of k: the same bits for any
 * number of threads.  Tolerance: relative L2 2e-6 (F32), 4e-3 (BF16); inverse: times its condition. */
#ifndef LM_KERNELS_MATMUL_H
#define LM_KERNELS_MATMUL_H

#include "kernels/kernel.h"

typedef struct {
    bool turn_a, turn_b;
} lm_matmul_attr;

/* Sizes of a product: batch matrices of c; elements from the matrix of a (b) to its next, 0: one for all. */
typedef struct {
    int64_t batch, m, n, k, stride_a, stride_b;
} lm_matmul_sizes;

static inline lm_matmul_sizes lm_matmul_sizes_of(const lm_matmul_attr *attr, const lm_tensor *a,
                                                 const lm_tensor *b)
{
    int64_t batch_a = a->ndim == 3 ? a->dim[0] : 1, batch_b = b->ndim == 3 ? b->dim[0] : 1;
    int64_t rows = a->dim[a->ndim - 2], cols = a->dim[a->ndim - 1];
    int64_t rows_b = b->dim[b->ndim - 2], cols_b = b->dim[b->ndim - 1];
    lm_matmul_sizes s;
    s.batch = batch_a > batch_b ? batch_a : batch_b;
    s.m = attr->turn_a ? cols : rows;
    s.n = attr->turn_b ? rows_b : cols_b;
    s.k = attr->turn_a ? rows : cols;
    s.stride_a = batch_a > 1 ? rows * cols : 0;
    s.stride_b = batch_b > 1 ? rows_b * cols_b : 0;
    return s;
}

#endif
