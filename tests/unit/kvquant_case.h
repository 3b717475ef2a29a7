/* SPDX-License-Identifier: Apache-2.0 */
/* kvquant_case.h -- ranges and levels of KVQuant of arrays, in two parts where there is more than one token. */
#ifndef LM_TESTS_KVQUANT_CASE_H
#define LM_TESTS_KVQUANT_CASE_H

#include "kv/kvquant.h"

static inline lm_code levels_of(const lm_kvquant_opts *o, const float *x, const float *w, int64_t n,
                                int64_t C, const float *lower, const float *upper, float *table,
                                lm_err *e)
{
    lm_kvquant_levels *l;
    int64_t half = n / 3;
    lm_code rc = lm_kvquant_levels_new(o, C, &l, e);
    if (!rc)
        rc = lm_kvquant_levels_add(l, x, w, half, lower, upper, e);
    if (!rc)
        rc = lm_kvquant_levels_add(l, x + half * C, w ? w + half * C : NULL, n - half, lower, upper,
                                   e);
    if (!rc)
        rc = lm_kvquant_levels_end(l, table, e);
    lm_kvquant_levels_free(l);
    return rc;
}

/* Keys x [n,C] with weights w (NULL: all 1): lower, upper [C], table [2^bits]. */
static inline lm_code kvquant_keys(const lm_kvquant_opts *o, const float *x, const float *w,
                                   int64_t n, int64_t C, float *lower, float *upper, float *table,
                                   lm_err *e)
{
    lm_kvquant_ranges *r;
    int64_t half = n / 2;
    lm_code rc = lm_kvquant_ranges_new(o->outliers, n, C, &r, e);
    if (!rc)
        rc = lm_kvquant_ranges_add(r, x, half, e);
    if (!rc)
        rc = lm_kvquant_ranges_add(r, x + half * C, n - half, e);
    if (!rc)
        rc = lm_kvquant_ranges_end(r, lower, upper, e);
    lm_kvquant_ranges_free(r);
    return rc ? rc : levels_of(o, x, w, n, C, lower, upper, table, e);
}

/* Values: the table alone. */
static inline lm_code kvquant_values(const lm_kvquant_opts *o, const float *x, const float *w,
                                     int64_t n, int64_t C, float *table, lm_err *e)
{
    return levels_of(o, x, w, n, C, NULL, NULL, table, e);
}

#endif
