/* SPDX-License-Identifier: Apache-2.0 */
/* store.h -- what a cache returns for what was stored, and the error of attention that this makes:
 * the plain definition, for calibrations, reports and tests. */
#ifndef LM_KV_STORE_H
#define LM_KV_STORE_H

#include "kv/method.h"
#include "kv/spec.h"

/* x *= H in place: the orthonormal Hadamard matrix, in blocks of the largest power of two that
 * divides D. */
void lm_kv_rotate(int64_t D, float *x);

/* The n tokens of x [n, K*D] into y, as a form returns them when a sequence has n tokens: those
 * that are coded, encoded and decoded by pages of `page` tokens; the others unchanged.  Fails:
 * LM_ELIMIT. */
lm_code lm_kv_store(const lm_kv_side *s, int64_t page, int64_t kv_heads, int64_t head_dim,
                    const float *x, int64_t n, float *y, lm_err *e);

/* Attention of one layer, causal: row i of q [n, H*D] sees the rows up to i of k, v [n, K*D], with
 * a window only the last ones. */
typedef struct {
    int64_t heads, kv_heads, head_dim, window;
    double scale;
    double soft_cap; /* of scores s: cap tanh(s / cap); 0: none */
} lm_kv_attention;

/* The sum of squares of the differences of the output o [n, H*D] when keys k and values v are
 * replaced by k2 and v2; *norm: the sum of squares of o.  In double.  Fails: LM_ELIMIT. */
lm_code lm_kv_attention_error(const lm_kv_attention *a, int64_t n, const float *q, const float *k,
                              const float *v, const float *k2, const float *v2, double *error,
                              double *norm, lm_err *e);

/* The masses that policies select by (policy.h): mass [K,n], the sum of the probabilities that
 * queries from .. n - 1 of all query heads of a key/value head give to each token.  h2o: from = 0;
 * snapkv: from = n - window, but at least 0.  Fails: LM_ELIMIT. */
lm_code lm_kv_masses(const lm_kv_attention *a, int64_t n, int64_t from, const float *q,
                     const float *k, float *mass, lm_err *e);

/* The errors that `auto` chooses by (data.h): of each candidate, "int8;int4", the sum of squares by
 * which the output of attention changes when only keys, or only values, are stored with it.
 * queries: of `queries` tokens evenly over the n ones, times n / queries; 0: of all.  error [2][m]:
 * keys, values; *m: how many candidates, at most LM_KV_MAX_CANDIDATES.  What a candidate cannot
 * store has the error of an output of 0.  In float, unlike the definitions above (sensitivity.c).
 * Fails: LM_EUSAGE for texts that are not one method each, LM_ELIMIT. */
enum { LM_KV_MAX_CANDIDATES = 32 };
lm_code lm_kv_sensitivity(const char *candidates, const lm_kv_site *at, const lm_kv_attention *a,
                          int64_t n, int64_t queries, const float *q, const float *k,
                          const float *v, float error[2][LM_KV_MAX_CANDIDATES], int *m, lm_err *e);

#endif
