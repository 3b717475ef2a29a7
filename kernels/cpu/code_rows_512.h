/* SPDX-License-Identifier: Apache-2.0 */
/* code_rows_512.h -- rows of codes as numbers with AVX-512, 32 at a time, F32 or BF16. */
#ifndef LM_KERNELS_CPU_CODE_ROWS_512_H
#define LM_KERNELS_CPU_CODE_ROWS_512_H

#include "kernels/cpu/code_rows_blocks.h"

/* Numbers at.. of y, F32 or BF16. */
LM_INLINE void put32(lm_dtype t, void *y, int64_t at, vf a, vf b)
{
    if (t == LM_DTYPE_F32) {
        vf_store((float *)y + at, a);
        vf_store((float *)y + at + 16, b);
        return;
    }
    uint16_t *to = (uint16_t *)y + at;
#ifdef __AVX512BF16__ /* which makes 0 of numbers below the normal range */
    if (!(_mm512_fpclass_ps_mask(a, 0x20) | _mm512_fpclass_ps_mask(b, 0x20))) {
        _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(b, a));
        return;
    }
#endif
    _mm256_storeu_si256((__m256i *)to, _mm512_cvtepi32_epi16(vf_bf16_bits(a)));
    _mm256_storeu_si256((__m256i *)(to + 16), _mm512_cvtepi32_epi16(vf_bf16_bits(b)));
}

/* 16 bytes as numbers. */
LM_INLINE vf unsigned16(__m128i q)
{
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(q));
}
LM_INLINE vf signed16(__m128i q)
{
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(q));
}

LM_INLINE void q8_0(lm_dtype t, const uint8_t *p, int64_t n, void *y)
{
    for (int64_t i = 0; i < n; i += BLOCK, p += 34) {
        vf d = vf_set(half_at(p));
        put32(t, y, i, signed16(bytes16(p + 2)) * d, signed16(bytes16(p + 18)) * d);
    }
}

LM_INLINE void q4_0(lm_dtype t, const uint8_t *p, int64_t n, void *y)
{
    for (int64_t i = 0; i < n; i += BLOCK, p += 18) {
        vf d = vf_set(half_at(p)), eight = vf_set(8), zero = vf_zero();
        __m128i q = bytes16(p + 2);
        put32(t, y, i, (unsigned16(low4(q)) - eight) * d + zero,
              (unsigned16(high4(q)) - eight) * d + zero);
    }
}

LM_INLINE void q4_1(lm_dtype t, const uint8_t *p, int64_t n, void *y)
{
    for (int64_t i = 0; i < n; i += BLOCK, p += 20) {
        vf d = vf_set(half_at(p)), m = vf_set(half_at(p + 2));
        __m128i q = bytes16(p + 4);
        put32(t, y, i, unsigned16(low4(q)) * d + m, unsigned16(high4(q)) * d + m);
    }
}

/* Eight scales and offsets of 6 bits in 12 bytes, times those of all. */
LM_INLINE void affine_scales(const uint8_t *head, float *d, float *m)
{
    const uint8_t *p = head + 4;
    float all = half_at(head), least = half_at(head + 2);
    for (int j = 0; j < 4; j++) {
        d[j] = all * (float)(p[j] & 63);
        m[j] = least * (float)(p[4 + j] & 63);
        d[4 + j] = all * (float)((p[8 + j] & 15) | p[j] >> 6 << 4);
        m[4 + j] = least * (float)(p[8 + j] >> 4 | p[4 + j] >> 6 << 4);
    }
}

/* 32 numbers of a group: d q - m. */
LM_INLINE void affine32(lm_dtype t, void *y, int64_t at, __m128i a, __m128i b, float d, float m)
{
    put32(t, y, at, vf_set(d) * unsigned16(a) - vf_set(m), vf_set(d) * unsigned16(b) - vf_set(m));
}

LM_INLINE void q4_k(lm_dtype t, const uint8_t *p, int64_t n, void *y)
{
    float d[8], m[8];
    for (int64_t i = 0; i < n; i += SUPER, p += 144) {
        affine_scales(p, d, m);
        for (int g = 0; g < 4; g++) {
            __m128i a = bytes16(p + 16 + 32 * g), b = bytes16(p + 32 + 32 * g);
            affine32(t, y, i + 64 * g, low4(a), low4(b), d[2 * g], m[2 * g]);
            affine32(t, y, i + 64 * g + 32, high4(a), high4(b), d[2 * g + 1], m[2 * g + 1]);
        }
    }
}

/* Bit j of each byte as 16. */
LM_INLINE __m128i fifth(__m128i bits, int j)
{
    return _mm_and_si128(_mm_slli_epi16(_mm_srl_epi16(bits, _mm_cvtsi32_si128(j)), 4),
                         _mm_set1_epi8(16));
}

LM_INLINE void q5_k(lm_dtype t, const uint8_t *p, int64_t n, void *y)
{
    float d[8], m[8];
    for (int64_t i = 0; i < n; i += SUPER, p += 176) {
        __m128i u = bytes16(p + 16), v = bytes16(p + 32);
        affine_scales(p, d, m);
        for (int g = 0; g < 4; g++) {
            __m128i a = bytes16(p + 48 + 32 * g), b = bytes16(p + 64 + 32 * g);
            affine32(t, y, i + 64 * g, _mm_or_si128(low4(a), fifth(u, 2 * g)),
                     _mm_or_si128(low4(b), fifth(v, 2 * g)), d[2 * g], m[2 * g]);
            affine32(t, y, i + 64 * g + 32, _mm_or_si128(high4(a), fifth(u, 2 * g + 1)),
                     _mm_or_si128(high4(b), fifth(v, 2 * g + 1)), d[2 * g + 1], m[2 * g + 1]);
        }
    }
}

/* Bits 2j and 2j + 1 of each byte as 16 and 32. */
LM_INLINE __m128i sixth(__m128i bits, int j)
{
    return _mm_and_si128(_mm_slli_epi16(_mm_srl_epi16(bits, _mm_cvtsi32_si128(2 * j)), 4),
                         _mm_set1_epi8(48));
}

LM_INLINE void q6_k(lm_dtype t, const uint8_t *p, int64_t n, void *y)
{
    const vf zero = vf_set(32);
    for (int64_t i = 0; i < n; i += SUPER, p += 210) {
        const int8_t *sc = (const int8_t *)p + 192;
        float d = half_at(p + 208);
        for (int g = 0; g < 8; g++) { /* 32 numbers: quarter g % 4 of a half */
            const uint8_t *low = p + 64 * (g / 4) + 32 * (g % 2), *high = p + 128 + 32 * (g / 4);
            __m128i a = bytes16(low), b = bytes16(low + 16);
            a = _mm_or_si128(g % 4 < 2 ? low4(a) : high4(a), sixth(bytes16(high), g % 4));
            b = _mm_or_si128(g % 4 < 2 ? low4(b) : high4(b), sixth(bytes16(high + 16), g % 4));
            vf s0 = vf_set(d * (float)sc[2 * g]), s1 = vf_set(d * (float)sc[2 * g + 1]);
            put32(t, y, i + 32 * g, s0 * (unsigned16(a) - zero), s1 * (unsigned16(b) - zero));
        }
    }
}

/* The bits of the mask as fifth bits of 16 codes. */
LM_INLINE __m128i with_fifth(__m128i q, uint32_t bits)
{
    return _mm_or_si128(q, _mm_maskz_set1_epi8((__mmask16)bits, 16));
}

LM_INLINE void q5_0(lm_dtype t, const uint8_t *p, int64_t n, void *y)
{
    for (int64_t i = 0; i < n; i += BLOCK, p += 22) {
        vf d = vf_set(half_at(p)), middle = vf_set(16), zero = vf_zero();
        __m128i q = bytes16(p + 6);
        uint32_t bits = word_at(p + 2);
        put32(t, y, i, (unsigned16(with_fifth(low4(q), bits)) - middle) * d + zero,
              (unsigned16(with_fifth(high4(q), bits >> 16)) - middle) * d + zero);
    }
}

LM_INLINE void q5_1(lm_dtype t, const uint8_t *p, int64_t n, void *y)
{
    for (int64_t i = 0; i < n; i += BLOCK, p += 24) {
        vf d = vf_set(half_at(p)), m = vf_set(half_at(p + 2));
        __m128i q = bytes16(p + 8);
        uint32_t bits = word_at(p + 4);
        put32(t, y, i, unsigned16(with_fifth(low4(q), bits)) * d + m,
              unsigned16(with_fifth(high4(q), bits >> 16)) * d + m);
    }
}

/* 16 codes of uneven values. */
LM_INLINE vf uneven16(__m128i q)
{
    return signed16(uneven(q));
}

LM_INLINE void iq4_nl(lm_dtype t, const uint8_t *p, int64_t n, void *y)
{
    for (int64_t i = 0; i < n; i += BLOCK, p += 18) {
        vf d = vf_set(half_at(p));
        __m128i q = bytes16(p + 2);
        put32(t, y, i, d * uneven16(low4(q)), d * uneven16(high4(q)));
    }
}

LM_INLINE void iq4_xs(lm_dtype t, const uint8_t *p, int64_t n, void *y)
{
    for (int64_t i = 0; i < n; i += SUPER, p += 136) {
        float d = half_at(p);
        for (int j = 0; j < 8; j++) {
            vf dl = vf_set(d * (float)iq4_scale(p, j));
            __m128i q = bytes16(p + 8 + j * 16);
            put32(t, y, i + j * BLOCK, dl * uneven16(low4(q)), dl * uneven16(high4(q)));
        }
    }
}

LM_INLINE void q2_k(lm_dtype t, const uint8_t *p, int64_t n, void *y)
{
    for (int64_t i = 0; i < n; i += SUPER, p += 84) {
        float d = half_at(p + 80), least = half_at(p + 82);
        for (int g = 0; g < 8; g++) {
            const uint8_t *q = p + 16 + 32 * (g / 4), *s = p + 2 * g;
            vf a = vf_set(d * (float)(s[0] & 15)) * unsigned16(pair(bytes16(q), g % 4));
            vf b = vf_set(d * (float)(s[1] & 15)) * unsigned16(pair(bytes16(q + 16), g % 4));
            put32(t, y, i + 32 * g, a - vf_set(least * (float)(s[0] >> 4)),
                  b - vf_set(least * (float)(s[1] >> 4)));
        }
    }
}

LM_INLINE void q3_k(lm_dtype t, const uint8_t *p, int64_t n, void *y)
{
    const vf four = vf_set(4);
    for (int64_t i = 0; i < n; i += SUPER, p += 110) {
        __m128i u = bytes16(p), v = bytes16(p + 16);
        float d = half_at(p + 108);
        for (int g = 0; g < 8; g++) {
            const uint8_t *q = p + 32 + 32 * (g / 4);
            vf s0 = vf_set(d * (float)three_scale(p + 96, 2 * g));
            vf s1 = vf_set(d * (float)three_scale(p + 96, 2 * g + 1));
            __m128i a = _mm_or_si128(pair(bytes16(q), g % 4), third(u, g));
            __m128i b = _mm_or_si128(pair(bytes16(q + 16), g % 4), third(v, g));
            put32(t, y, i + 32 * g, s0 * (unsigned16(a) - four), s1 * (unsigned16(b) - four));
        }
    }
}

/* ---- E2M1, signs, pairs of bits (numeric/ggml_read.c) ---- */

/* 16 codes of E2M1, times `by`: the values are twice those of the format, which by corrects. */
LM_INLINE vf e2m1_16(__m128i q, vf by)
{
    const __m512 twice =
        _mm512_setr_ps(0, 1, 2, 3, 4, 6, 8, 12, -0.0f, -1, -2, -3, -4, -6, -8, -12);
    return _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(q), twice) * by;
}

LM_INLINE void mxfp4(lm_dtype t, const uint8_t *p, int64_t n, void *y)
{
    for (int64_t i = 0; i < n; i += BLOCK, p += 17) {
        vf half = vf_set(half_power(p[0]));
        __m128i q = bytes16(p + 1);
        put32(t, y, i, e2m1_16(low4(q), half), e2m1_16(high4(q), half));
    }
}

/* The 16 numbers of group g of 4. */
LM_INLINE vf nvfp4_group(const uint8_t *p, const float *scales, int g)
{
    __m128i q = _mm_loadl_epi64((const __m128i *)(p + 4 + 8 * g));
    return e2m1_16(_mm_unpacklo_epi64(low4(q), high4(q)), vf_set(scales[p[g]]));
}

LM_INLINE void nvfp4(lm_dtype t, const uint8_t *p, int64_t n, void *y)
{
    const float *scales = nvfp4_scales();
    for (int64_t i = 0; i < n; i += 64, p += 36)
        for (int g = 0; g < 4; g += 2)
            put32(t, y, i + 16 * g, nvfp4_group(p, scales, g), nvfp4_group(p, scales, g + 1));
}

LM_INLINE void q1_0(lm_dtype t, const uint8_t *p, int64_t n, void *y)
{
    for (int64_t i = 0; i < n; i += 128, p += 18) {
        float d = half_at(p);
        vf plus = vf_set(d), minus = vf_set(-d);
        for (int j = 0; j < 128; j += 32) {
            uint32_t bits = word_at(p + 2 + j / 8);
            put32(t, y, i + j, _mm512_mask_blend_ps((__mmask16)bits, minus, plus),
                  _mm512_mask_blend_ps((__mmask16)(bits >> 16), minus, plus));
        }
    }
}

/* 16 numbers of 4 bytes, -1 to 2 each. */
LM_INLINE vf ternary16(const uint8_t *p)
{
    const __m512i shift =
        _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    __m512i q = _mm512_srlv_epi32(_mm512_set1_epi32((int)word_at(p)), shift);
    q = _mm512_and_si512(q, _mm512_set1_epi32(3));
    return _mm512_cvtepi32_ps(_mm512_sub_epi32(q, _mm512_set1_epi32(1)));
}

LM_INLINE void q2_0(lm_dtype t, const uint8_t *p, int64_t n, void *y)
{
    for (int64_t i = 0; i < n; i += 64, p += 18) {
        vf d = vf_set(half_at(p));
        for (int j = 0; j < 64; j += 32)
            put32(t, y, i + j, d * ternary16(p + 2 + j / 4), d * ternary16(p + 6 + j / 4));
    }
}

/* ---- plain elements ---- */

LM_INLINE void put1(lm_dtype t, void *y, int64_t at, float x)
{
    if (t == LM_DTYPE_F32)
        ((float *)y)[at] = x;
    else
        ((uint16_t *)y)[at] = lm_f32_to_bf16(x);
}

LM_INLINE __m256i words16(const uint8_t *p)
{
    return _mm256_loadu_si256((const __m256i *)p);
}

LM_INLINE void f16(lm_dtype t, const uint8_t *p, int64_t n, void *y)
{
    int64_t i = 0;
    for (; i + 32 <= n; i += 32)
        put32(t, y, i, _mm512_cvtph_ps(words16(p + 2 * i)),
              _mm512_cvtph_ps(words16(p + 2 * i + 32)));
    for (; i < n; i++)
        put1(t, y, i, half_at(p + 2 * i));
}

LM_INLINE vf bf16_16(const uint8_t *p)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words16(p)), 16));
}

LM_INLINE void bf16(lm_dtype t, const uint8_t *p, int64_t n, void *y)
{
    int64_t i = 0;
    for (; i + 32 <= n; i += 32)
        put32(t, y, i, bf16_16(p + 2 * i), bf16_16(p + 2 * i + 32));
    for (; i < n; i++)
        put1(t, y, i, lm_bf16_to_f32((uint16_t)(p[2 * i] | p[2 * i + 1] << 8)));
}

#define ROWS_OF(name)                                             \
    static void name##_f32(const uint8_t *p, int64_t n, void *y)  \
    {                                                             \
        name(LM_DTYPE_F32, p, n, y);                              \
    }                                                             \
    static void name##_bf16(const uint8_t *p, int64_t n, void *y) \
    {                                                             \
        name(LM_DTYPE_BF16, p, n, y);                             \
    }
ROWS_OF(q8_0)
ROWS_OF(q4_0)
ROWS_OF(q4_1)
ROWS_OF(q4_k)
ROWS_OF(q5_k)
ROWS_OF(q6_k)
ROWS_OF(q5_0)
ROWS_OF(q5_1)
ROWS_OF(iq4_nl)
ROWS_OF(iq4_xs)
ROWS_OF(q2_k)
ROWS_OF(q3_k)
ROWS_OF(mxfp4)
ROWS_OF(nvfp4)
ROWS_OF(q1_0)
ROWS_OF(q2_0)
ROWS_OF(f16)
ROWS_OF(bf16)

static const row_coder known[] = {
    { 2, q4_0_f32, q4_0_bf16 },    { 3, q4_1_f32, q4_1_bf16 },      { 6, q5_0_f32, q5_0_bf16 },
    { 7, q5_1_f32, q5_1_bf16 },    { 8, q8_0_f32, q8_0_bf16 },      { 10, q2_k_f32, q2_k_bf16 },
    { 11, q3_k_f32, q3_k_bf16 },   { 12, q4_k_f32, q4_k_bf16 },     { 13, q5_k_f32, q5_k_bf16 },
    { 14, q6_k_f32, q6_k_bf16 },   { 20, iq4_nl_f32, iq4_nl_bf16 }, { 23, iq4_xs_f32, iq4_xs_bf16 },
    { 39, mxfp4_f32, mxfp4_bf16 }, { 40, nvfp4_f32, nvfp4_bf16 },   { 41, q1_0_f32, q1_0_bf16 },
    { 42, q2_0_f32, q2_0_bf16 },   { 1, f16_f32, f16_bf16 },        { 30, bf16_f32, bf16_bf16 },
};

#endif
