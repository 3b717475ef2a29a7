/* SPDX-License-Identifier: Apache-2.0 */
/* factor.h -- orthonormal bases of matrices, in double, rounded once: on the host by LAPACK (numeric/lapack.h, which
 * the caller has loaded), on a device by reflections and rotations of its own.  Signs are fixed, so that the bases of
 * two steps can be compared and results are the same, but for rounding, wherever they are computed.
 *
 * qr      in  x [N,C] F32, N >= C        out q [N,C] F32: x = q r, q's columns orthonormal, r upper triangular
 *                                            with a diagonal that is not negative
 * eigh    in  x [N,N] F32, symmetric     out q [N,N] F32: eigenvectors as columns, those of the largest
 *             (its lower triangle is read)   eigenvalues first
 * eigh_next   in  x [N,N] F32, symmetric, q [N,N] F32: nearly its eigenvectors
 *             out next [N,N] F32, order [N,N] F32    one round of orthogonal iteration: the columns of x q in falling
 *             order of q' x q's diagonal, made orthonormal as by qr.  order: 1 at [i,j] where column i of q went
 *             to j, else 0
 * svd     in  x [N,C] F32,               out u F32: the first attr.rank singular vectors: left ones as the
 *             due [1] F32 (optional)         columns of [N,rank], right ones as the rows of [rank,C].  From
 *                                            the eigenvectors of x x' or x' x
 *                                        first F32 (optional): the first of them, [N] or [C]
 *             due 0: nothing is computed, and the results are 0.
 *             Of eigh and svd the largest number of each vector is positive.
 *
 * Numbers that are not finite make a result of NaN.  Vectors of equal eigenvalues are any basis of their space. */
#ifndef LM_KERNELS_FACTOR_H
#define LM_KERNELS_FACTOR_H

#include "kernels/kernel.h"

typedef struct {
    int64_t rank;
    bool right;
} lm_svd_attr;

#endif
