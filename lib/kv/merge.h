/* SPDX-License-Identifier: Apache-2.0 */
/* merge.h -- merging of neighbours with similar keys, as pure functions of one key/value head.
 *
 * After KVMerger (arXiv:2407.08454).  As there, sets are runs of neighbours whose keys have a
 * cosine of at least `threshold`; a run becomes one token at the position of its pivot, the token
 * of the largest mass; keys and values are sums with the same weights, those of a Gaussian kernel
 * around the pivot's key, normalised to 1; and the last `window` tokens, and the share `heavy` of
 * the others with the largest masses, stay alone.
 * Chosen here:
 *   keep    neighbours are joined in falling order of their cosine only until `keep` n tokens are left; with keep near 0
 *           all are joined that the threshold allows, which are the sets above
 *   kernel  its width s is the mean distance of the other keys of the run to the pivot's.  Implementations differ in it:
 *           the root of the mean square is another choice
 *   rule=kernel  weights g_i / sum g, g_i = exp(-|k_i - k_p|^2 / (2 s^2)), p the pivot
 *   rule=pivot   instead, the mean of the pivot and of the halves of each other token and the pivot (LOOK-M,
 *                arXiv:2406.18139) */
#ifndef LM_KV_MERGE_H
#define LM_KV_MERGE_H

#include "kv/policy.h"

typedef struct {
    double similarity;
    int32_t at; /* tokens at and at + 1 */
} lm_kv_joint;

/* The runs of n tokens with keys [n,D], rows `pitch` numbers apart, and masses [n]: run[i] is the
 * first token of the run of token i.  joint [n], keep [n] and work [2 n] are room.  Returns how
 * many runs there are. */
int64_t lm_kv_merge_runs(const lm_kv_policy *p, int64_t n, int64_t D, const float *key,
                         int64_t pitch, const float *mass, int32_t *run, lm_kv_joint *joint,
                         bool *keep, double *work);
/* The weights [n] of a run of n tokens; returns its pivot. */
int64_t lm_kv_merge_weights(const lm_kv_policy *p, int64_t n, int64_t D, const float *key,
                            int64_t pitch, const float *mass, double *weight);
/* y [D] = the weighted sum of x [n,D]; y may be a row of x. */
void lm_kv_merge_rows(int64_t n, int64_t D, const float *x, int64_t pitch, const double *weight,
                      float *y);

#endif
