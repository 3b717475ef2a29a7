/* SPDX-License-Identifier: Apache-2.0 */
/* code_rows_blocks.h -- rows of GGUF's blocks as numbers for code_rows_simd.c: with AVX-512 32 numbers at a
 * time, F32 or BF16; for AVX2 loops of fixed length over small arrays, which the compiler makes vectors of.
 * Layouts: numeric/format.h. */
#ifndef LM_KERNELS_CPU_CODE_ROWS_BLOCKS_H
#define LM_KERNELS_CPU_CODE_ROWS_BLOCKS_H

#include "kernels/cpu/simd.h"

enum { BLOCK = 32, SUPER = 256 };

typedef void (*row_fn)(const uint8_t *p, int64_t n, void *y);

/* How rows of a format are decoded. */
typedef struct {
    int gguf;         /* its number in GGUF */
    row_fn f32, bf16; /* NULL: by way of F32 */
} row_coder;

LM_INLINE float half_at(const uint8_t *p)
{
    uint16_t h;
    memcpy(&h, p, 2);
    return _cvtsh_ss(h);
}

#ifdef __AVX512F__
/* ---- 32 numbers at a time ---- */

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

LM_INLINE __m128i bytes16(const uint8_t *p)
{
    return _mm_loadu_si128((const __m128i *)p);
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

LM_INLINE __m128i low4(__m128i q)
{
    return _mm_and_si128(q, _mm_set1_epi8(15));
}
LM_INLINE __m128i high4(__m128i q)
{
    return low4(_mm_srli_epi16(q, 4));
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

LM_INLINE uint32_t word_at(const uint8_t *p)
{
    uint32_t w;
    memcpy(&w, p, 4);
    return w;
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
    const __m128i values =
        _mm_setr_epi8(-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113);
    return signed16(_mm_shuffle_epi8(values, q));
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
            int low = p[4 + j / 2] >> j % 2 * 4 & 15, high = p[2 + j / 4] >> j % 4 * 2 & 3;
            vf dl = vf_set(d * (float)((low | high << 4) - 32));
            __m128i q = bytes16(p + 8 + j * 16);
            put32(t, y, i + j * BLOCK, dl * uneven16(low4(q)), dl * uneven16(high4(q)));
        }
    }
}

/* Pair j of the bits of each byte. */
LM_INLINE __m128i pair(__m128i q, int j)
{
    return _mm_and_si128(_mm_srl_epi16(q, _mm_cvtsi32_si128(2 * j)), _mm_set1_epi8(3));
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

/* Bit j of each byte as 4. */
LM_INLINE __m128i third(__m128i bits, int j)
{
    return _mm_and_si128(_mm_slli_epi16(_mm_srl_epi16(bits, _mm_cvtsi32_si128(j)), 2),
                         _mm_set1_epi8(4));
}

/* Scale j of 16, six bits each in 12 bytes. */
LM_INLINE int three_scale(const uint8_t *p, int j)
{
    return ((p[j % 8] >> j / 8 * 4 & 15) | (p[8 + j % 4] >> j / 4 * 2 & 3) << 4) - 32;
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

static const row_coder known[] = {
    { 2, q4_0_f32, q4_0_bf16 },  { 3, q4_1_f32, q4_1_bf16 },      { 6, q5_0_f32, q5_0_bf16 },
    { 7, q5_1_f32, q5_1_bf16 },  { 8, q8_0_f32, q8_0_bf16 },      { 10, q2_k_f32, q2_k_bf16 },
    { 11, q3_k_f32, q3_k_bf16 }, { 12, q4_k_f32, q4_k_bf16 },     { 13, q5_k_f32, q5_k_bf16 },
    { 14, q6_k_f32, q6_k_bf16 }, { 20, iq4_nl_f32, iq4_nl_bf16 }, { 23, iq4_xs_f32, iq4_xs_bf16 },
};
#else
static void q8_0(const uint8_t *p, int64_t n, void *out)
{
    float *y = out;
    for (int64_t i = 0; i < n; i += BLOCK, p += 34) {
        const int8_t *q = (const int8_t *)p + 2;
        float d = half_at(p);
        for (int j = 0; j < BLOCK; j++)
            y[i + j] = (float)q[j] * d;
    }
}

LM_INLINE void nibbles(const uint8_t *p, uint8_t *low, uint8_t *high, int n)
{
    for (int l = 0; l < n; l++) {
        low[l] = p[l] & 15;
        high[l] = p[l] >> 4;
    }
}

/* y = (q - zero) d + m, low halves of the bytes first. */
LM_INLINE void expand(const uint8_t *q, float d, float m, int zero, float *y)
{
    for (int l = 0; l < 16; l++) {
        y[l] = (float)((q[l] & 15) - zero) * d + m;
        y[l + 16] = (float)((q[l] >> 4) - zero) * d + m;
    }
}

static void q4_0(const uint8_t *p, int64_t n, void *out)
{
    float *y = out;
    for (int64_t i = 0; i < n; i += BLOCK, p += 18)
        expand(p + 2, half_at(p), 0.0f, 8, y + i);
}

static void q4_1(const uint8_t *p, int64_t n, void *out)
{
    float *y = out;
    for (int64_t i = 0; i < n; i += BLOCK, p += 20)
        expand(p + 4, half_at(p), half_at(p + 2), 0, y + i);
}

/* Eight scales and offsets of 6 bits in 12 bytes. */
LM_INLINE void six_bits(const uint8_t *p, uint8_t *sc, uint8_t *mn)
{
    for (int j = 0; j < 4; j++) {
        sc[j] = p[j] & 63;
        mn[j] = p[4 + j] & 63;
        sc[4 + j] = (uint8_t)((p[8 + j] & 15) | p[j] >> 6 << 4);
        mn[4 + j] = (uint8_t)(p[8 + j] >> 4 | p[4 + j] >> 6 << 4);
    }
}

LM_INLINE void affine(const uint8_t *head, const uint8_t *q, float *y)
{
    uint8_t sc[8], mn[8];
    six_bits(head + 4, sc, mn);
    for (int j = 0; j < 8; j++) {
        float d = half_at(head) * (float)sc[j], m = half_at(head + 2) * (float)mn[j];
        for (int i = j * 32; i < (j + 1) * 32; i++)
            y[i] = d * (float)q[i] - m;
    }
}

static void q4_k(const uint8_t *p, int64_t n, void *out)
{
    float *y = out;
    uint8_t q[SUPER];
    for (int64_t i = 0; i < n; i += SUPER, p += 144) {
        for (int g = 0; g < 4; g++)
            nibbles(p + 16 + 32 * g, q + 64 * g, q + 64 * g + 32, 32);
        affine(p, q, y + i);
    }
}

static void q5_k(const uint8_t *p, int64_t n, void *out)
{
    float *y = out;
    uint8_t q[SUPER];
    for (int64_t i = 0; i < n; i += SUPER, p += 176) {
        for (int g = 0; g < 4; g++)
            nibbles(p + 48 + 32 * g, q + 64 * g, q + 64 * g + 32, 32);
        for (int j = 0; j < 8; j++)
            for (int l = 0; l < 32; l++)
                q[32 * j + l] |= (uint8_t)((p[16 + l] >> j & 1) << 4);
        affine(p, q, y + i);
    }
}

/* 16 numbers of each quarter of 128: s [quarter] the products of the scales of two neighbours. */
LM_INLINE void sixes(const uint8_t *low, const uint8_t *high, const float *s, float *y)
{
    for (int l = 0; l < 16; l++) {
        y[l] = s[0] * (float)(((low[l] & 15) | (high[l] & 3) << 4) - 32);
        y[l + 32] = s[2] * (float)(((low[l + 32] & 15) | (high[l] >> 2 & 3) << 4) - 32);
        y[l + 64] = s[4] * (float)((low[l] >> 4 | (high[l] >> 4 & 3) << 4) - 32);
        y[l + 96] = s[6] * (float)((low[l + 32] >> 4 | high[l] >> 6 << 4) - 32);
    }
}

static void q6_k(const uint8_t *p, int64_t n, void *out)
{
    float *y = out;
    for (int64_t i = 0; i < n; i += SUPER, p += 210) {
        const int8_t *sc = (const int8_t *)p + 192;
        float d = half_at(p + 208), s[16];
        for (int j = 0; j < 16; j++)
            s[j] = d * (float)sc[j];
        for (int g = 0; g < 4; g++) /* halves of 32 in halves of 256 */
            sixes(p + 64 * (g / 2) + 16 * (g % 2), p + 128 + 32 * (g / 2) + 16 * (g % 2),
                  s + 8 * (g / 2) + g % 2, y + i + 128 * (g / 2) + 16 * (g % 2));
    }
}

static const row_coder known[] = {
    { 2, q4_0, NULL },  { 3, q4_1, NULL },  { 8, q8_0, NULL },
    { 12, q4_k, NULL }, { 13, q5_k, NULL }, { 14, q6_k, NULL },
};
#endif

#endif
