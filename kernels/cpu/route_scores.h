/* SPDX-License-Identifier: Apache-2.0 */
/* route_scores.h -- exponentials and sigmoids of a row of logits, and the largest numbers of one, for choices and losses
 * (route_simd.c, route_aux_simd.c, route_load_simd.c). */
#ifndef LM_KERNELS_CPU_ROUTE_SCORES_H
#define LM_KERNELS_CPU_ROUTE_SCORES_H

#include <math.h>

#include "kernels/cpu/simd.h"

static inline int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static inline int64_t most(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* Tokens that a thread takes at a time. */
static inline int64_t grain_tokens(int64_t experts)
{
    return most(1, 4096 / experts);
}

/* The largest logit; *finite: all are. */
static inline float top_of(const float *z, int64_t experts, bool *finite)
{
    vf top = vf_set(-INFINITY), zero = vf_zero();
    VF_FOR(i, n, experts, {
        vf v = vf_get_any(LM_DTYPE_F32, z, i, n);
        zero = vf_fma(v, vf_zero(), zero); /* NaN unless finite */
        top = vf_max(top, vf_keep_n(v, n, vf_set(-INFINITY)));
    });
    *finite = vf_sum(zero) == 0;
    return vf_top(top);
}

/* y = exp(z - top), and the sum of it; y may be NULL. */
static inline float exp_row(const float *z, float top, int64_t experts, float *y)
{
    vf sum = vf_zero();
    VF_FOR(i, n, experts, {
        vf v = vf_exp(vf_get_any(LM_DTYPE_F32, z, i, n) - vf_set(top));
        sum += vf_keep_n(v, n, vf_zero());
        if (y)
            vf_put_any(LM_DTYPE_F32, y, i, v, n);
    });
    return vf_sum(sum);
}

static inline float sigmoid_row(const float *z, int64_t experts, float *y)
{
    vf sum = vf_zero();
    VF_FOR(i, n, experts, {
        vf v = vf_sigmoid(vf_get_any(LM_DTYPE_F32, z, i, n));
        sum += vf_keep_n(v, n, vf_zero());
        vf_put_any(LM_DTYPE_F32, y, i, v, n);
    });
    return vf_sum(sum);
}

/* Floats of n numbers in whole vectors. */
static inline int64_t room_of(int64_t n)
{
    return (n + VF_LANES - 1) / VF_LANES * VF_LANES;
}

static inline unsigned equal_lanes(vf a, vf b)
{
#ifdef __AVX512F__
    return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ);
#else
    return (unsigned)_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_EQ_OQ));
#endif
}

/* The largest of n numbers, of the lowest index; it is replaced by -Inf.  v ends with a whole
 * vector. */
static inline int64_t pick(float *v, int64_t n)
{
    vf top = vf_set(-INFINITY);
    for (int64_t i = 0; i < n; i += VF_LANES)
        top = vf_max(top, vf_load(v + i));
    top = vf_set(vf_top(top));
    for (int64_t i = 0; i < n; i += VF_LANES) {
        unsigned equal = equal_lanes(vf_load(v + i), top);
        if (!equal)
            continue;
        int64_t best = i + __builtin_ctz(equal);
        best = best < n ? best : 0; /* a bias is not finite: any expert will do */
        v[best] = -INFINITY;
        return best;
    }
    return 0;
}

static inline void end_row(float *v, int64_t n)
{
    for (int64_t i = n; i < room_of(n); i++)
        v[i] = -INFINITY;
}

/* The next part of scratch that is divided among members of *j: `count` elements of the member's;
 * `at` is a size_t. */
#define ROUTE_PART(j, member, base, at, count)                 \
    do {                                                       \
        (j)->member = (base) ? (void *)((base) + (at)) : NULL; \
        (at) += (size_t)(count) * sizeof *(j)->member;         \
        (at) = ((at) + 63) / 64 * 64;                          \
    } while (0)

#endif
