/* SPDX-License-Identifier: Apache-2.0 */
/* attention_few.h -- scores of a few query rows with keys as they lie in memory: products are kept in vectors, and the sums
 * of several keys are made together. */
#ifndef LM_KERNELS_CPU_ATTENTION_FEW_H
#define LM_KERNELS_CPU_ATTENTION_FEW_H

#include "kernels/cpu/attention_simd.h"

enum { SHARE = VF_LANES / 4 /* query rows that read a key together */ };

LM_INLINE vf row_part(lm_dtype t, const void *x, int64_t at, int64_t d, int64_t D)
{
    return d + VF_LANES <= D ? vf_get(t, x, at + d) : vf_get_n(t, x, at + d, D - d);
}

#ifdef __AVX512F__
/* The place of sum i among the operands of vf_sums. */
static const int place[VF_LANES] = { 0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15 };

/* s[i] = vf_sum(v[place[i]]), added in vf_sum's order. */
LM_INLINE void vf_sums(const vf v[VF_LANES], float s[VF_LANES])
{
    vf t[8], u[4], w[2];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
        t[i] =
            _mm512_shuffle_f32x4(v[i], v[i + 8], 0x44) + _mm512_shuffle_f32x4(v[i], v[i + 8], 0xee);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
        u[i] =
            _mm512_shuffle_f32x4(t[i], t[i + 4], 0x88) + _mm512_shuffle_f32x4(t[i], t[i + 4], 0xdd);
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++)
        w[i] = _mm512_shuffle_ps(u[i], u[i + 2], 0x44) + _mm512_shuffle_ps(u[i], u[i + 2], 0xee);
    vf_store(s, _mm512_shuffle_ps(w[0], w[1], 0x88) + _mm512_shuffle_ps(w[0], w[1], 0xdd));
}
#else
static const int place[VF_LANES] = { 0, 1, 2, 3, 4, 5, 6, 7 };

LM_INLINE void vf_sums(const vf v[VF_LANES], float s[VF_LANES])
{
    for (int i = 0; i < VF_LANES; i++)
        s[i] = vf_sum(v[i]);
}
#endif

/* Query rows q[R][ld] (padded, scaled) times the key from element `at` of k on, before the sum over the lanes: x[r]. */
LM_INLINE void times_key(lm_dtype t, int R, const float *q, int64_t ld, const void *k, int64_t at,
                         int64_t D, vf x[SHARE])
{
    vf y[SHARE];
    int64_t d = 0;
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
        x[r] = y[r] = vf_zero();
    for (; d + PAD <= D; d += PAD) {
        vf a = vf_get(t, k, at + d), b = vf_get(t, k, at + d + VF_LANES);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            x[r] = vf_fma(vf_load(q + r * ld + d), a, x[r]);
            y[r] = vf_fma(vf_load(q + r * ld + d + VF_LANES), b, y[r]);
        }
    }
    for (; d < D; d += VF_LANES) {
        vf a = row_part(t, k, at, d, D);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++)
            x[r] = vf_fma(vf_load(q + r * ld + d), a, x[r]);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
        x[r] += y[r];
}

#endif
