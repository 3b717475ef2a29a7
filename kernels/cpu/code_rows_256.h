/* SPDX-License-Identifier: Apache-2.0 */
/* code_rows_256.h -- rows of codes as F32 with AVX2: vectors of 8, and loops of fixed length over small
 * arrays, which the compiler makes vectors of. */
#ifndef LM_KERNELS_CPU_CODE_ROWS_256_H
#define LM_KERNELS_CPU_CODE_ROWS_256_H

#include "kernels/cpu/code_rows_blocks.h"

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

/* ---- 16 numbers at a time ---- */

/* 16 signed bytes as numbers, times `by`. */
LM_INLINE void times16(__m128i q, float by, __m256 y[2])
{
    __m256 a = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(q));
    __m256 b = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(q, 8)));
    y[0] = _mm256_mul_ps(a, _mm256_set1_ps(by));
    y[1] = _mm256_mul_ps(b, _mm256_set1_ps(by));
}

LM_INLINE void put_times16(float *y, __m128i q, float by)
{
    __m256 v[2];
    times16(q, by, v);
    _mm256_storeu_ps(y, v[0]);
    _mm256_storeu_ps(y + 8, v[1]);
}

LM_INLINE void put_affine16(float *y, __m128i q, float by, float plus)
{
    __m256 v[2];
    times16(q, by, v);
    _mm256_storeu_ps(y, _mm256_add_ps(v[0], _mm256_set1_ps(plus)));
    _mm256_storeu_ps(y + 8, _mm256_add_ps(v[1], _mm256_set1_ps(plus)));
}

/* The lower 16 of `bits` as fifth bits of 16 codes. */
LM_INLINE __m128i with_fifth(__m128i q, uint32_t bits)
{
    const __m128i byte = _mm_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    const __m128i bit = _mm_set1_epi64x((int64_t)0x8040201008040201u);
    __m128i set = _mm_shuffle_epi8(_mm_cvtsi32_si128((int)bits), byte);
    set = _mm_cmpeq_epi8(_mm_and_si128(set, bit), bit);
    return _mm_or_si128(q, _mm_and_si128(set, _mm_set1_epi8(16)));
}

static void q5_0(const uint8_t *p, int64_t n, void *out)
{
    const __m128i middle = _mm_set1_epi8(16);
    float *y = out;
    for (int64_t i = 0; i < n; i += BLOCK, p += 22) {
        uint32_t bits = word_at(p + 2);
        __m128i q = bytes16(p + 6), low = with_fifth(low4(q), bits);
        put_affine16(y + i, _mm_sub_epi8(low, middle), half_at(p), 0);
        q = with_fifth(high4(q), bits >> 16);
        put_affine16(y + i + 16, _mm_sub_epi8(q, middle), half_at(p), 0);
    }
}

static void q5_1(const uint8_t *p, int64_t n, void *out)
{
    float *y = out;
    for (int64_t i = 0; i < n; i += BLOCK, p += 24) {
        uint32_t bits = word_at(p + 4);
        __m128i q = bytes16(p + 8);
        put_affine16(y + i, with_fifth(low4(q), bits), half_at(p), half_at(p + 2));
        put_affine16(y + i + 16, with_fifth(high4(q), bits >> 16), half_at(p), half_at(p + 2));
    }
}

static void iq4_nl(const uint8_t *p, int64_t n, void *out)
{
    float *y = out;
    for (int64_t i = 0; i < n; i += BLOCK, p += 18) {
        __m128i q = bytes16(p + 2);
        put_times16(y + i, uneven(low4(q)), half_at(p));
        put_times16(y + i + 16, uneven(high4(q)), half_at(p));
    }
}

static void iq4_xs(const uint8_t *p, int64_t n, void *out)
{
    float *y = out;
    for (int64_t i = 0; i < n; i += SUPER, p += 136)
        for (int j = 0; j < 8; j++) {
            float by = half_at(p) * (float)iq4_scale(p, j);
            __m128i q = bytes16(p + 8 + j * 16);
            put_times16(y + i + j * BLOCK, uneven(low4(q)), by);
            put_times16(y + i + j * BLOCK + 16, uneven(high4(q)), by);
        }
}

static void q2_k(const uint8_t *p, int64_t n, void *out)
{
    float *y = out;
    for (int64_t i = 0; i < n; i += SUPER, p += 84) {
        float d = half_at(p + 80), least = half_at(p + 82);
        for (int g = 0; g < 16; g++) {
            __m128i q = pair(bytes16(p + 16 + 32 * (g / 8) + 16 * (g % 2)), g / 2 % 4);
            put_affine16(y + i + 16 * g, q, d * (float)(p[g] & 15), -(least * (float)(p[g] >> 4)));
        }
    }
}

static void q3_k(const uint8_t *p, int64_t n, void *out)
{
    const __m128i four = _mm_set1_epi8(4);
    float *y = out;
    for (int64_t i = 0; i < n; i += SUPER, p += 110)
        for (int g = 0; g < 16; g++) {
            __m128i q = pair(bytes16(p + 32 + 32 * (g / 8) + 16 * (g % 2)), g / 2 % 4);
            q = _mm_or_si128(q, third(bytes16(p + 16 * (g % 2)), g / 2));
            put_times16(y + i + 16 * g, _mm_sub_epi8(q, four),
                        half_at(p + 108) * (float)three_scale(p + 96, g));
        }
}

/* ---- E2M1, signs, pairs of bits (numeric/ggml_read.c): 8 numbers at a time ---- */

/* 8 codes of E2M1, times `by`: the values are twice those of the format, which by corrects. */
LM_INLINE void e2m1_8(__m128i q, __m256 by, float *y)
{
    const __m256 twice = _mm256_setr_ps(0, 1, 2, 3, 4, 6, 8, 12);
    __m256i code = _mm256_cvtepu8_epi32(q);
    __m256i sign = _mm256_slli_epi32(_mm256_and_si256(code, _mm256_set1_epi32(8)), 28);
    __m256 size = _mm256_permutevar8x32_ps(twice, code);
    _mm256_storeu_ps(y, _mm256_mul_ps(_mm256_xor_ps(size, _mm256_castsi256_ps(sign)), by));
}

/* Low halves of 8 bytes to y, high halves to z. */
LM_INLINE void e2m1_bytes(const uint8_t *p, float by, float *y, float *z)
{
    __m128i q = _mm_loadl_epi64((const __m128i *)p), mask = _mm_set1_epi8(15);
    e2m1_8(_mm_and_si128(q, mask), _mm256_set1_ps(by), y);
    e2m1_8(_mm_and_si128(_mm_srli_epi16(q, 4), mask), _mm256_set1_ps(by), z);
}

static void mxfp4(const uint8_t *p, int64_t n, void *out)
{
    float *y = out;
    for (int64_t i = 0; i < n; i += BLOCK, p += 17)
        for (int j = 0; j < 16; j += 8)
            e2m1_bytes(p + 1 + j, half_power(p[0]), y + i + j, y + i + j + 16);
}

static void nvfp4(const uint8_t *p, int64_t n, void *out)
{
    const float *scales = nvfp4_scales();
    float *y = out;
    for (int64_t i = 0; i < n; i += 64, p += 36)
        for (int g = 0; g < 4; g++)
            e2m1_bytes(p + 4 + 8 * g, scales[p[g]], y + i + 16 * g, y + i + 16 * g + 8);
}

static void q1_0(const uint8_t *p, int64_t n, void *out)
{
    const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    float *y = out;
    for (int64_t i = 0; i < n; i += 128, p += 18) {
        float d = half_at(p);
        __m256 plus = _mm256_set1_ps(d), minus = _mm256_set1_ps(-d);
        for (int j = 0; j < 16; j++) {
            __m256i set = _mm256_and_si256(_mm256_set1_epi32(p[2 + j]), bit);
            set = _mm256_cmpeq_epi32(set, bit);
            _mm256_storeu_ps(y + i + 8 * j,
                             _mm256_blendv_ps(minus, plus, _mm256_castsi256_ps(set)));
        }
    }
}

static void q2_0(const uint8_t *p, int64_t n, void *out)
{
    const __m256i shift = _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14);
    float *y = out;
    for (int64_t i = 0; i < n; i += 64, p += 18) {
        __m256 d = _mm256_set1_ps(half_at(p));
        for (int j = 0; j < 8; j++) {
            int bits = p[2 + 2 * j] | p[3 + 2 * j] << 8;
            __m256i q = _mm256_srlv_epi32(_mm256_set1_epi32(bits), shift);
            q = _mm256_sub_epi32(_mm256_and_si256(q, _mm256_set1_epi32(3)), _mm256_set1_epi32(1));
            _mm256_storeu_ps(y + i + 8 * j, _mm256_mul_ps(d, _mm256_cvtepi32_ps(q)));
        }
    }
}

/* ---- plain elements ---- */

static void f16(const uint8_t *p, int64_t n, void *out)
{
    float *y = out;
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(y + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 2 * i))));
    for (; i < n; i++)
        y[i] = half_at(p + 2 * i);
}

static void bf16(const uint8_t *p, int64_t n, void *out)
{
    uint32_t *y = out;
    for (int64_t i = 0; i < n; i++)
        y[i] = (uint32_t)(p[2 * i] | p[2 * i + 1] << 8) << 16;
}

#define FORMAT(kind, name) { .gguf = kind, .f32 = name },
static const row_coder known[] = { ROW_FORMATS(FORMAT) };

#endif
