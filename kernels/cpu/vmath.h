/* SPDX-License-Identifier: Apache-2.0 */
/* vmath.h -- exp, log, tanh and sigmoid on 8 (AVX2 + FMA) and 16 (AVX-512) floats.
 *
 * lm_exp8/16: relative error below 1e-7.  Results under the normal range (x < -87.33) are 0, since
 * making a denormal costs some hundred cycles; overflow gives +inf, NaN stays NaN.
 *
 * lm_log8/16: relative error below 2e-7 away from 1, absolute below 1e-7 around it, for normal x;
 * log(0) = -inf, log(x < 0) = NaN, log(inf) = inf.
 *
 * lm_tanh8/16: relative error below 2e-7, odd, saturates at +-1.
 *
 * lm_sigmoid8/16: relative error below 2e-7; 0 at and below x = -88.8.
 *
 * fast_exp2: for probabilities that are rounded to BF16 (AVX-512 alone).
 *
 * Everything is inline; a file gets what its compiler flags allow.  The polynomials have the shape
 * and the coefficients of the Cephes library (Moshier). */
#ifndef LM_KERNELS_CPU_VMATH_H
#define LM_KERNELS_CPU_VMATH_H

#include <immintrin.h>

#ifdef __AVX2__
static inline __m256 lm_exp8(__m256 x)
{
    /* The order of operands makes min/max return x when it is NaN. */
    const __m256 least = _mm256_set1_ps(-87.33f);
    __m256 c = _mm256_min_ps(_mm256_set1_ps(89.0f), _mm256_max_ps(least, x));
    __m256 n = _mm256_round_ps(_mm256_mul_ps(c, _mm256_set1_ps(1.44269504088896341f)),
                               _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), c);
    r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
    __m256 p = _mm256_set1_ps(1.9875691500e-4f);
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.3981999507e-3f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(8.3334519073e-3f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(4.1665795894e-2f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.6666665459e-1f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(5.0000001201e-1f));
    p = _mm256_fmadd_ps(p, _mm256_mul_ps(r, r), r);
    p = _mm256_add_ps(p, _mm256_set1_ps(1.0f));
    /* 2^n in two factors, so that n = 128 and n = -149 are reached without leaving the exponent
     * field. */
    __m256i k = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(k, 1);
    __m256i bias = _mm256_set1_epi32(127);
    __m256i a = _mm256_slli_epi32(_mm256_add_epi32(half, bias), 23);
    __m256i b = _mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(k, half), bias), 23);
    p = _mm256_mul_ps(_mm256_mul_ps(p, _mm256_castsi256_ps(a)), _mm256_castsi256_ps(b));
    return _mm256_and_ps(p, _mm256_cmp_ps(x, least, _CMP_NLT_UQ));
}

static inline __m256 lm_log8(__m256 x)
{
    __m256i bits = _mm256_castps_si256(x);
    /* x = m * 2^k with m in [sqrt(1/2), sqrt(2)) */
    __m256i k = _mm256_sub_epi32(bits, _mm256_set1_epi32(0x3f3504f3));
    k = _mm256_srai_epi32(k, 23);
    __m256 m = _mm256_castsi256_ps(_mm256_sub_epi32(bits, _mm256_slli_epi32(k, 23)));
    __m256 e = _mm256_cvtepi32_ps(k), r = _mm256_sub_ps(m, _mm256_set1_ps(1.0f));
    __m256 p = _mm256_set1_ps(7.0376836292e-2f);
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(-1.1514610310e-1f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.1676998740e-1f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(-1.2420140846e-1f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.4249322787e-1f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(-1.6668057665e-1f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(2.0000714765e-1f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(-2.4999993993e-1f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(3.3333331174e-1f));
    __m256 z = _mm256_mul_ps(r, r);
    p = _mm256_mul_ps(_mm256_mul_ps(p, r), z);
    p = _mm256_fmadd_ps(e, _mm256_set1_ps(-2.12194440e-4f), p);
    p = _mm256_fnmadd_ps(z, _mm256_set1_ps(0.5f), p);
    p = _mm256_fmadd_ps(e, _mm256_set1_ps(0.693359375f), _mm256_add_ps(r, p));
    __m256 zero = _mm256_setzero_ps(), inf = _mm256_set1_ps(__builtin_inff());
    p = _mm256_blendv_ps(p, x, _mm256_cmp_ps(x, inf, _CMP_EQ_OQ));
    p = _mm256_blendv_ps(p, _mm256_set1_ps(-__builtin_inff()), _mm256_cmp_ps(x, zero, _CMP_EQ_OQ));
    return _mm256_blendv_ps(p, _mm256_set1_ps(__builtin_nanf("")),
                            _mm256_cmp_ps(x, zero, _CMP_NGE_UQ));
}

static inline __m256 lm_tanh8(__m256 x)
{
    __m256 sign = _mm256_and_ps(x, _mm256_set1_ps(-0.0f)), a = _mm256_xor_ps(x, sign);
    __m256 one = _mm256_set1_ps(1.0f), z = _mm256_mul_ps(x, x);
    __m256 big = _mm256_add_ps(lm_exp8(_mm256_add_ps(a, a)), one);
    big = _mm256_or_ps(_mm256_sub_ps(one, _mm256_div_ps(_mm256_set1_ps(2.0f), big)), sign);
    __m256 p = _mm256_set1_ps(-5.70498872745e-3f);
    p = _mm256_fmadd_ps(p, z, _mm256_set1_ps(2.06390887954e-2f));
    p = _mm256_fmadd_ps(p, z, _mm256_set1_ps(-5.37397155531e-2f));
    p = _mm256_fmadd_ps(p, z, _mm256_set1_ps(1.33314422036e-1f));
    p = _mm256_fmadd_ps(p, z, _mm256_set1_ps(-3.33332819422e-1f));
    p = _mm256_fmadd_ps(_mm256_mul_ps(p, z), x, x);
    return _mm256_blendv_ps(big, p, _mm256_cmp_ps(a, _mm256_set1_ps(0.625f), _CMP_LT_OQ));
}

static inline __m256 lm_sigmoid8(__m256 x)
{
    __m256 e = lm_exp8(_mm256_xor_ps(x, _mm256_set1_ps(-0.0f)));
    __m256 one = _mm256_set1_ps(1.0f);
    return _mm256_div_ps(one, _mm256_add_ps(one, e));
}
#endif

#ifdef __AVX512F__
static inline __m512 lm_exp16(__m512 x)
{
    const __m512 least = _mm512_set1_ps(-87.33f);
    __m512 c = _mm512_min_ps(_mm512_set1_ps(89.0f), _mm512_max_ps(least, x));
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(c, _mm512_set1_ps(1.44269504088896341f)),
                                    _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), c);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
    p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), r);
    p = _mm512_add_ps(p, _mm512_set1_ps(1.0f));
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, least, _CMP_NLT_UQ), p, n);
}

static inline __m512 lm_log16(__m512 x)
{
    __m512i bits = _mm512_castps_si512(x);
    __m512i k = _mm512_srai_epi32(_mm512_sub_epi32(bits, _mm512_set1_epi32(0x3f3504f3)), 23);
    __m512 m = _mm512_castsi512_ps(_mm512_sub_epi32(bits, _mm512_slli_epi32(k, 23)));
    __m512 e = _mm512_cvtepi32_ps(k), r = _mm512_sub_ps(m, _mm512_set1_ps(1.0f));
    __m512 p = _mm512_set1_ps(7.0376836292e-2f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(-1.1514610310e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.1676998740e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(-1.2420140846e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.4249322787e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(-1.6668057665e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.0000714765e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(-2.4999993993e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(3.3333331174e-1f));
    __m512 z = _mm512_mul_ps(r, r);
    p = _mm512_mul_ps(_mm512_mul_ps(p, r), z);
    p = _mm512_fmadd_ps(e, _mm512_set1_ps(-2.12194440e-4f), p);
    p = _mm512_fnmadd_ps(z, _mm512_set1_ps(0.5f), p);
    p = _mm512_fmadd_ps(e, _mm512_set1_ps(0.693359375f), _mm512_add_ps(r, p));
    __m512 zero = _mm512_setzero_ps(), inf = _mm512_set1_ps(__builtin_inff());
    p = _mm512_mask_mov_ps(p, _mm512_cmp_ps_mask(x, inf, _CMP_EQ_OQ), x);
    p = _mm512_mask_mov_ps(p, _mm512_cmp_ps_mask(x, zero, _CMP_EQ_OQ),
                           _mm512_set1_ps(-__builtin_inff()));
    return _mm512_mask_mov_ps(p, _mm512_cmp_ps_mask(x, zero, _CMP_NGE_UQ),
                              _mm512_set1_ps(__builtin_nanf("")));
}

static inline __m512 lm_tanh16(__m512 x)
{
    __m512i neg = _mm512_set1_epi32((int)0x80000000u), bits = _mm512_castps_si512(x);
    __m512i sign = _mm512_and_si512(bits, neg);
    __m512 a = _mm512_castsi512_ps(_mm512_xor_si512(bits, sign));
    __m512 one = _mm512_set1_ps(1.0f), z = _mm512_mul_ps(x, x);
    __m512 big = _mm512_add_ps(lm_exp16(_mm512_add_ps(a, a)), one);
    big = _mm512_sub_ps(one, _mm512_div_ps(_mm512_set1_ps(2.0f), big));
    big = _mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(big), sign));
    __m512 p = _mm512_set1_ps(-5.70498872745e-3f);
    p = _mm512_fmadd_ps(p, z, _mm512_set1_ps(2.06390887954e-2f));
    p = _mm512_fmadd_ps(p, z, _mm512_set1_ps(-5.37397155531e-2f));
    p = _mm512_fmadd_ps(p, z, _mm512_set1_ps(1.33314422036e-1f));
    p = _mm512_fmadd_ps(p, z, _mm512_set1_ps(-3.33332819422e-1f));
    p = _mm512_fmadd_ps(_mm512_mul_ps(p, z), x, x);
    return _mm512_mask_mov_ps(big, _mm512_cmp_ps_mask(a, _mm512_set1_ps(0.625f), _CMP_LT_OQ), p);
}

static inline __m512 lm_sigmoid16(__m512 x)
{
    __m512i neg = _mm512_set1_epi32((int)0x80000000u);
    __m512 e = lm_exp16(_mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(x), neg)));
    __m512 one = _mm512_set1_ps(1.0f);
    return _mm512_div_ps(one, _mm512_add_ps(one, e));
}

/* 2^t for t <= 127, relative error 2.7e-6: enough for a factor that is rounded to bf16, and below
 * the rounding noise of the sums.  Results below the normal range are 0: making a denormal costs
 * some hundred cycles.  NaN stays NaN.  The polynomial fits 2^f on [0,1). */
static inline __attribute__((always_inline)) __m512 fast_exp2(__m512 t)
{
    __m512 f = _mm512_reduce_ps(t, 1 /* t - floor(t) */);
    __m512 p = _mm512_set1_ps(1.353417e-2f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.201146e-2f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.4144275e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.9300384e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.00000259f));
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(t, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ), p,
                                  t);
}
#endif

#endif
