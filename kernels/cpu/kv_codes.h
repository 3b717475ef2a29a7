/* SPDX-License-Identifier: Apache-2.0 */
/* kv_codes.h -- codes of FP8 and of tables for writes into coded caches, on vectors (kv_write_simd.c).
 *
 * Quotients are those of the definition, in double, rounded to F32.  Where this rounding, or a degenerate scale, could
 * choose another code, the definition is asked (lm_kv_code_of), so the bits are the same. */
#ifndef LM_KERNELS_CPU_KV_CODES_H
#define LM_KERNELS_CPU_KV_CODES_H

#include <math.h>
#include <string.h>

#include "kernels/cpu/simd.h"
#include "numeric/kv_format.h"

typedef uint32_t vu __attribute__((vector_size(sizeof(vf))));

LM_INLINE bool any_of(vu mask)
{
#ifdef __AVX512F__
    return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#else
    return !_mm256_testz_si256((__m256i)mask, (__m256i)mask);
#endif
}

/* Half a vector of quotients. */
LM_INLINE vd half_quotients(vd x, const double *s, const double *m)
{
#ifdef __AVX512F__
    return (x - _mm512_loadu_pd(m)) / _mm512_loadu_pd(s);
#else
    return (x - _mm256_loadu_pd(m)) / _mm256_loadu_pd(s);
#endif
}

LM_INLINE vf join_halves(vd a, vd b)
{
#ifdef __AVX512F__
    __m512d low = _mm512_castps_pd(_mm512_castps256_ps512(_mm512_cvtpd_ps(a)));
    return _mm512_castpd_ps(_mm512_insertf64x4(low, _mm256_castps_pd(_mm512_cvtpd_ps(b)), 1));
#else
    return _mm256_set_m128(_mm256_cvtpd_ps(b), _mm256_cvtpd_ps(a));
#endif
}

/* True if a and b differ somewhere. */
LM_INLINE bool differ(vd a, vd b)
{
#ifdef __AVX512F__
    return _mm512_cmp_pd_mask(a, b, _CMP_NEQ_UQ) != 0;
#else
    return _mm256_movemask_pd(_mm256_cmp_pd(a, b, _CMP_NEQ_UQ)) != 0;
#endif
}

/* The largest number of a type, and what its codes are made of. */
typedef struct {
    float most, least; /* least: of numbers with all bits of the mantissa */
    float unit;        /* 1 / the smallest number */
    int shift;         /* bits of an F32 that a code has not */
    uint32_t bias;     /* what the code of the same exponent lies below that of F32 */
} fp8_form;

LM_INLINE fp8_form fp8_form_of(lm_dtype t)
{
    if (t == LM_DTYPE_F8E5M2)
        return (fp8_form){ 57344, 0x1p-14f, 0x1p16f, 21, (127 - 15) << 2 };
    return (fp8_form){ 448, 0x1p-6f, 0x1p9f, 20, (127 - 7) << 3 };
}

/* Codes of FP8; `unsure` is set in lanes that the definition has to decide: in the middle of two codes, unless y is
 * exact. */
LM_INLINE vu fp8_codes(const fp8_form *p, vf y, bool exact, vu *unsure)
{
    vf least = vf_set(p->least), f = vf_min(vf_max(y, vf_set(-p->most)), vf_set(p->most));
    vu bits = (vu)f, all = (vu)y & 0x7fffffff, mag = bits & 0x7fffffff;
    vu whole = ((mag + ((1u << (p->shift - 1)) - 1) + (mag >> p->shift & 1)) >> p->shift) - p->bias;
    vu tiny = (vu)(vf_abs(f) * vf_set(p->unit) + vf_set(0x1p23f)) - 0x4b000000;
    vu small = (vu)(mag < (vu)least);
    *unsure = (vu)(all >= 0x7f800000);
    if (!exact)
        *unsure |= (vu)((mag & 0x1fff) == 0) & (vu)(mag != 0);
    return (tiny & small) | (whole & ~small) | (bits >> 31 << 7);
}

/* Codes of a table with middles between its n levels. */
LM_INLINE vu table_codes(const float *middle, int n, float near, vf y, vu *unsure)
{
    vu code = { 0 };
    vf nearest = vf_set(INFINITY);
    for (int i = 0; i + 1 < n; i++) {
        vf off = y - vf_set(middle[i]);
        code -= (vu)(off > vf_zero());
        nearest = vf_min(vf_abs(off), nearest);
    }
    *unsure = ~((vu)(nearest > vf_set(near)) & (vu)(vf_abs(y) < vf_set(1e6f)));
    return code;
}

/* The middles of a table; returns the distance from one of them below which a quotient has to be exact. */
static float middles_of(const lm_kv_format *f, float middle[LM_KV_MAX_TABLE])
{
    float most = fmaxf(-f->table[0], f->table[f->n_table - 1]);
    for (int i = 0; i + 1 < f->n_table; i++)
        middle[i] = (float)(((double)f->table[i] + (double)f->table[i + 1]) / 2);
    return 1e-6f * fmaxf(most, 1e-30f);
}

/* The codes of a row by scales and minima of channels; behind its end zeros up to a multiple of 16. */
LM_INLINE void codes_of_levels(bool fp8, const lm_kv_format *f, int64_t D, const float *x,
                               const double *s, const double *m, uint32_t *code)
{
    float middle[LM_KV_MAX_TABLE], near = fp8 ? 0 : middles_of(f, middle);
    fp8_form form = fp8_form_of(f->float8);
    enum { HALF = VF_LANES / 2 };
    for (int64_t d = 0; d < D; d += VF_LANES) {
        vf v = vf_load(x + d);
        vd a = half_quotients(vf_low_f64(v), s + d, m + d);
        vd b = half_quotients(vf_high_f64(v), s + d + HALF, m + d + HALF);
        vf y = join_halves(a, b);
        bool exact = fp8 && !differ(vf_low_f64(y), a) && !differ(vf_high_f64(y), b);
        vu unsure, c;
        c = fp8 ? fp8_codes(&form, y, exact, &unsure)
                : table_codes(middle, f->n_table, near, y, &unsure);
        memcpy(code + d, &c, sizeof c);
        if (!any_of(unsure))
            continue;
        for (int64_t i = d; i < d + VF_LANES && i < D; i++)
            code[i] = lm_kv_code_of(f, (lm_kv_scale){ s[i], m[i] }, (double)x[i]);
    }
    for (int64_t d = D; d % 16; d++)
        code[d] = 0;
}

#endif
