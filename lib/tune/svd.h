/* SPDX-License-Identifier: Apache-2.0 */
/* svd.h -- singular values of matrices in memory, and low-rank factors from the largest.
 * Private to lib/tune. */
#ifndef LM_TUNE_SVD_H
#define LM_TUNE_SVD_H

#include <stdint.h>

#include "base/err.h"

/* W [out,in] = U diag(value) V^T, n = the lesser side values, falling. */
typedef struct {
    int64_t n, out, in;
    double *value;
    double *left;  /* U by columns: [n][out] */
    double *right; /* V^T by columns: [in][n] */
    double *block;
} lm_tune_svd;

/* Fails: LM_EIO without LAPACK, LM_ELIMIT, LM_ENUMERIC. */
lm_code lm_tune_svd_of(const double *w, int64_t out, int64_t in, lm_tune_svd *s, lm_err *e);
/* Bytes that lm_tune_svd_of takes, result included, beside w. */
double lm_tune_svd_room(int64_t out, int64_t in);
void lm_tune_svd_fini(lm_tune_svd *s);
/* At least the largest `most` values: exactly where the lesser side is at most 512 or `most` is a
 * large part of it, else from a random projection drawn from `seed` with 4 rounds of iteration; n
 * is then the number of values that are there. */
lm_code lm_tune_svd_most(const double *w, int64_t out, int64_t in, int64_t most, uint64_t seed,
                         lm_tune_svd *s, lm_err *e);
/* The number of values that hold `share` of `all`, the sum of squares, at least 1 and at most
 * `most`; share 1: `most`. */
int64_t lm_tune_svd_rank(const lm_tune_svd *s, int64_t most, double share, double all);
/* left [out,rank] = U S^(1-share), right [rank,in] = S^share V^T; zeros behind the last value. */
void lm_tune_svd_factors(const lm_tune_svd *s, int64_t rank, double share, double *left,
                         double *right);
/* The columns of q [rows,k] orthonormal, by Gram and Schmidt twice; one that depends on those
 * before it is 0. */
void lm_tune_orthonormalise(double *q, int64_t rows, int64_t k);
/* The same of a matrix at once. */
lm_code lm_tune_largest(const double *w, int64_t out, int64_t in, int64_t r, double share,
                        double *left, double *right, lm_err *e);

#endif
