/* SPDX-License-Identifier: Apache-2.0 */
/* kvquant.h -- the statistics of KVQuant (arXiv:2401.18079): ranges without outliers, and levels by
 * sensitivity.
 *
 * With t = 1 - outliers / 2, the range of a channel of keys lies between the percentiles 1 - t and
 * t of the calibration's tokens (linear interpolation); that of a token of values between the least
 * and the most of the numbers strictly within these percentiles of all its heads.  Numbers are laid
 * over [-1, 1] by their range, those outside are outliers, and the 2^bits levels of a layer are the
 * weighted k-means of all others.
 *
 * Differences to the published code: exact k-means over 4,096 cells instead of 50 rounds from
 * random starts; with the correction of moments, which counts by these cells, codes are those of
 * the nearest corrected level. */
#ifndef LM_KV_KVQUANT_H
#define LM_KV_KVQUANT_H

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"

typedef struct {
    int bits;        /* 1 to 5 */
    double outliers; /* share of numbers, 0 to below 1 */
    /* "Q-Norm": levels are moved so that decoded numbers have the mean and deviation of the numbers */
    bool moments;
} lm_kvquant_opts;

/* Ranges of the channels of keys before the rotary embedding, from tokens in any number of parts.
 * Only the numbers that percentiles can be are kept: about the share of outliers. */
typedef struct lm_kvquant_ranges lm_kvquant_ranges;

/* For n tokens of C channels; the caller frees *out with lm_kvquant_ranges_free. */
lm_code lm_kvquant_ranges_new(double outliers, int64_t n, int64_t C, lm_kvquant_ranges **out,
                              lm_err *e);
void lm_kvquant_ranges_free(lm_kvquant_ranges *r);
/* Bytes of such an object. */
double lm_kvquant_ranges_bytes(double outliers, int64_t n, int64_t C);
/* Add tokens x [n,C].  Fails: LM_ENUMERIC for numbers that are not finite, LM_EUSAGE for more
 * tokens than n of lm_kvquant_ranges_new. */
lm_code lm_kvquant_ranges_add(lm_kvquant_ranges *r, const float *x, int64_t n, lm_err *e);
/* lower, upper [C], when all tokens were added; r is empty then.  Fails: LM_EUSAGE when tokens are
 * missing. */
lm_code lm_kvquant_ranges_end(lm_kvquant_ranges *r, float *lower, float *upper, lm_err *e);

/* Levels of keys or values, from tokens in any number of parts; nothing of these is kept but
 * sums. */
typedef struct lm_kvquant_levels lm_kvquant_levels;

lm_code lm_kvquant_levels_new(const lm_kvquant_opts *o, int64_t C, lm_kvquant_levels **out,
                              lm_err *e);
void lm_kvquant_levels_free(lm_kvquant_levels *l);
/* Add tokens x [n,C] with weights w [n,C] (squared gradients; NULL: all 1): keys with their ranges,
 * values with NULL.  Fails: LM_ENUMERIC for numbers or weights that are not finite, or negative
 * weights. */
lm_code lm_kvquant_levels_add(lm_kvquant_levels *l, const float *x, const float *w, int64_t n,
                              const float *lower, const float *upper, lm_err *e);
/* table [2^bits].  Fails: LM_ENUMERIC when no number inside a range has a weight. */
lm_code lm_kvquant_levels_end(const lm_kvquant_levels *l, float *table, lm_err *e);

#endif
