/* SPDX-License-Identifier: Apache-2.0 */
/* kvquant.h -- the statistics of KVQuant (arXiv:2401.18079): ranges without outliers, and levels by sensitivity.
 *
 * With t = 1 - outliers / 2, the range of a channel of keys lies between the percentiles 1 - t and t of the
 * calibration's tokens (linear interpolation); that of a token of values between the least and the most of the numbers
 * strictly within these percentiles of all its heads.  Numbers are laid over [-1, 1] by their range, those
 * outside are outliers, and the 2^bits levels of a layer are the weighted k-means of all others.
 *
 * Differences to the published code: exact k-means over 4,096 cells instead of 50 rounds from random starts; with the
 * correction of moments, codes are those of the nearest corrected level. */
#ifndef LM_KV_KVQUANT_H
#define LM_KV_KVQUANT_H

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"

typedef struct {
    int bits;        /* 1 to 5 */
    double outliers; /* share of numbers, 0 to below 1 */
    bool
        moments; /* "Q-Norm": levels are moved so that decoded numbers have the mean and deviation of the numbers */
} lm_kvquant_opts;

/* Keys before the rotary embedding, x [n,C] of n tokens: lower, upper [C], table [2^bits].  w [n,C]: weights (squared
 * gradients), NULL: all 1.  Fails: LM_ENUMERIC for numbers that are not finite, or weights that are all 0. */
lm_code lm_kvquant_keys(const lm_kvquant_opts *o, const float *x, const float *w, int64_t n,
                        int64_t C, float *lower, float *upper, float *table, lm_err *e);
/* Values, x [n,C]: the table alone. */
lm_code lm_kvquant_values(const lm_kvquant_opts *o, const float *x, const float *w, int64_t n,
                          int64_t C, float *table, lm_err *e);

#endif
