/* SPDX-License-Identifier: Apache-2.0 */
/* code_rows_512.h -- rows of codes as numbers with AVX-512, 32 at a time, F32 or BF16. */
#ifndef LM_KERNELS_CPU_CODE_ROWS_512_H
#define LM_KERNELS_CPU_CODE_ROWS_512_H

#include "kernels/cpu/code_rows_blocks.h"
#include "numeric/format_scaled.h"

/* Where numbers go, 32 at a time: to y, a row of type t, or, without y, as numbers of type t into the sums of
 * their products with m rows of x (vectors of partial sums in the order of gemm_simd.c).  t, y and m are constant
 * wherever the functions below are inlined. */
typedef struct {
    lm_dtype t;
    void *y;
    int m;          /* at most LM_CODE_SUMS_X */
    const float *x; /* rows without gaps */
    int64_t cols;
    vf sum[LM_CODE_SUMS_X];
} sink;

/* Rounded to BF16, to nearest even: 2^16 times a number's power of two is added and subtracted.  For 0, which becomes
 * positive, and numbers from 2^-126 to 2^110; NaN, if the number is not finite. */
LM_INLINE vf rounded(vf v)
{
    __m512i top = _mm512_set1_epi32((int)0xff800000); /* sign and exponent */
    vf power = _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(v), top));
    vf shift = vf_set(65536.0f);
    return _mm512_fnmadd_ps(power, shift, _mm512_fmadd_ps(power, shift, v));
}

/* v + 0, which makes zeros positive; sums may do without (lm_code_rows_sums). */
LM_INLINE vf plus_zero(const sink *s, vf v)
{
    return s->y ? (vf)(v + vf_zero()) : v;
}

/* Products of numbers at.. of a row, which are of type t already, with those of x. */
LM_INLINE void add32(sink *s, int64_t at, vf a, vf b)
{
#pragma GCC unroll 4
    for (int i = 0; i < s->m; i++) {
        const float *x = s->x + i * s->cols + at;
        s->sum[i] = _mm512_fmadd_ps(vf_load(x), a, s->sum[i]);
        s->sum[i] = _mm512_fmadd_ps(vf_load(x + 16), b, s->sum[i]);
    }
}

/* Numbers at.. of a row, to y. */
LM_INLINE void store32(const sink *s, int64_t at, vf a, vf b)
{
    if (s->t == LM_DTYPE_F32) {
        vf_store((float *)s->y + at, a);
        vf_store((float *)s->y + at + 16, b);
        return;
    }
    uint16_t *to = (uint16_t *)s->y + at;
#ifdef __AVX512BF16__ /* which makes 0 of numbers below the normal range */
    if (!(_mm512_fpclass_ps_mask(a, 0x20) | _mm512_fpclass_ps_mask(b, 0x20))) {
        _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(b, a));
        return;
    }
#endif
    _mm256_storeu_si256((__m256i *)to, _mm512_cvtepi32_epi16(vf_bf16_bits(a)));
    _mm256_storeu_si256((__m256i *)(to + 16), _mm512_cvtepi32_epi16(vf_bf16_bits(b)));
}

/* Numbers at.. of a row, which a scale in F16 keeps within the range of rounded(). */
LM_INLINE void put32(sink *s, int64_t at, vf a, vf b)
{
    if (s->y)
        store32(s, at, a, b);
    else if (s->t == LM_DTYPE_F32)
        add32(s, at, a, b);
    else
        add32(s, at, rounded(a), rounded(b));
}

/* Rounded to BF16 for every number, but that NaN must have its upper half's bits of one. */
LM_INLINE vf rounded_any(vf v)
{
    __m512i b = _mm512_castps_si512(v);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(b, 16), _mm512_set1_epi32(1));
    b = _mm512_add_epi32(b, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    return _mm512_castsi512_ps(_mm512_and_si512(b, _mm512_set1_epi32((int)0xffff0000)));
}

/* The same of numbers that BF16 holds exactly, or that are not finite. */
LM_INLINE void put32_exact(sink *s, int64_t at, vf a, vf b)
{
    if (s->y)
        store32(s, at, a, b);
    else
        add32(s, at, a, b);
}

/* Numbers of the 16 codes of 4 bits in a group, as they are added to sums. */
LM_INLINE vf sixteen(const sink *s, vf numbers)
{
    return s->y || s->t == LM_DTYPE_F32 ? numbers : rounded(numbers);
}

/* 16 codes (of whose numbers the lower 4 bits are read) by their numbers. */
LM_INLINE vf chosen(__m512i code, vf numbers)
{
    return _mm512_permutexvar_ps(code, numbers);
}

/* 32 numbers: the lower halves of 16 bytes, then the upper ones, by `numbers`. */
LM_INLINE void put_halves(sink *s, int64_t at, __m128i q, vf numbers)
{
    __m512i code = _mm512_cvtepu8_epi32(q);
    vf n = sixteen(s, numbers);
    put32_exact(s, at, chosen(code, n), chosen(_mm512_srli_epi32(code, 4), n));
}

/* 0, 1, .. 15. */
LM_INLINE vf all16(void)
{
    return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
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

/* The number of F16 at p, in all lanes. */
LM_INLINE vf half16(const uint8_t *p)
{
    int16_t h;
    memcpy(&h, p, sizeof h);
    return _mm512_cvtph_ps(_mm256_set1_epi16(h));
}

LM_INLINE void q8_0(sink *s, const uint8_t *p, int64_t n)
{
    for (int64_t i = 0; i < n; i += BLOCK, p += 34) {
        vf d = half16(p);
        put32(s, i, signed16(bytes16(p + 2)) * d, signed16(bytes16(p + 18)) * d);
    }
}

LM_INLINE void q4_0(sink *s, const uint8_t *p, int64_t n)
{
    for (int64_t i = 0; i < n; i += BLOCK, p += 18) {
        vf d = half16(p);
        put_halves(s, i, bytes16(p + 2), plus_zero(s, (all16() - vf_set(8)) * d));
    }
}

LM_INLINE void q4_1(sink *s, const uint8_t *p, int64_t n)
{
    for (int64_t i = 0; i < n; i += BLOCK, p += 20) {
        vf d = half16(p), m = half16(p + 2);
        put_halves(s, i, bytes16(p + 4), all16() * d + m);
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
LM_INLINE void affine32(sink *s, int64_t at, __m128i a, __m128i b, float d, float m)
{
    put32(s, at, vf_set(d) * unsigned16(a) - vf_set(m), vf_set(d) * unsigned16(b) - vf_set(m));
}

LM_INLINE void q4_k(sink *s, const uint8_t *p, int64_t n)
{
    float d[8], m[8];
    for (int64_t i = 0; i < n; i += SUPER, p += 144) {
        affine_scales(p, d, m);
        for (int g = 0; g < 4; g++) {
            __m512i a = _mm512_cvtepu8_epi32(bytes16(p + 16 + 32 * g));
            __m512i b = _mm512_cvtepu8_epi32(bytes16(p + 32 + 32 * g));
            vf low = sixteen(s, vf_set(d[2 * g]) * all16() - vf_set(m[2 * g]));
            vf high = sixteen(s, vf_set(d[2 * g + 1]) * all16() - vf_set(m[2 * g + 1]));
            put32_exact(s, i + 64 * g, chosen(a, low), chosen(b, low));
            put32_exact(s, i + 64 * g + 32, chosen(_mm512_srli_epi32(a, 4), high),
                        chosen(_mm512_srli_epi32(b, 4), high));
        }
    }
}

/* Bit j of each byte as 16. */
LM_INLINE __m128i fifth(__m128i bits, int j)
{
    return _mm_and_si128(_mm_slli_epi16(_mm_srl_epi16(bits, _mm_cvtsi32_si128(j)), 4),
                         _mm_set1_epi8(16));
}

LM_INLINE void q5_k(sink *s, const uint8_t *p, int64_t n)
{
    float d[8], m[8];
    for (int64_t i = 0; i < n; i += SUPER, p += 176) {
        __m128i u = bytes16(p + 16), v = bytes16(p + 32);
        affine_scales(p, d, m);
        for (int g = 0; g < 4; g++) {
            __m128i a = bytes16(p + 48 + 32 * g), b = bytes16(p + 64 + 32 * g);
            affine32(s, i + 64 * g, _mm_or_si128(low4(a), fifth(u, 2 * g)),
                     _mm_or_si128(low4(b), fifth(v, 2 * g)), d[2 * g], m[2 * g]);
            affine32(s, i + 64 * g + 32, _mm_or_si128(high4(a), fifth(u, 2 * g + 1)),
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

LM_INLINE void q6_k(sink *s, const uint8_t *p, int64_t n)
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
            put32(s, i + 32 * g, s0 * (unsigned16(a) - zero), s1 * (unsigned16(b) - zero));
        }
    }
}

/* The bits of the mask as fifth bits of 16 codes. */
LM_INLINE __m128i with_fifth(__m128i q, uint32_t bits)
{
    return _mm_or_si128(q, _mm_maskz_set1_epi8((__mmask16)bits, 16));
}

LM_INLINE void q5_0(sink *s, const uint8_t *p, int64_t n)
{
    for (int64_t i = 0; i < n; i += BLOCK, p += 22) {
        vf d = half16(p), middle = vf_set(16);
        __m128i q = bytes16(p + 6);
        uint32_t bits = word_at(p + 2);
        vf a = (unsigned16(with_fifth(low4(q), bits)) - middle) * d;
        vf b = (unsigned16(with_fifth(high4(q), bits >> 16)) - middle) * d;
        put32(s, i, plus_zero(s, a), plus_zero(s, b));
    }
}

LM_INLINE void q5_1(sink *s, const uint8_t *p, int64_t n)
{
    for (int64_t i = 0; i < n; i += BLOCK, p += 24) {
        vf d = half16(p), m = half16(p + 2);
        __m128i q = bytes16(p + 8);
        uint32_t bits = word_at(p + 4);
        put32(s, i, unsigned16(with_fifth(low4(q), bits)) * d + m,
              unsigned16(with_fifth(high4(q), bits >> 16)) * d + m);
    }
}

/* Values of IQ4's codes. */
LM_INLINE vf uneven16(void)
{
    return signed16(uneven_values());
}

LM_INLINE void iq4_nl(sink *s, const uint8_t *p, int64_t n)
{
    for (int64_t i = 0; i < n; i += BLOCK, p += 18) {
        put_halves(s, i, bytes16(p + 2), half16(p) * uneven16());
    }
}

LM_INLINE void iq4_xs(sink *s, const uint8_t *p, int64_t n)
{
    for (int64_t i = 0; i < n; i += SUPER, p += 136) {
        float d = half_at(p);
        for (int j = 0; j < 8; j++) {
            vf dl = vf_set(d * (float)iq4_scale(p, j));
            put_halves(s, i + j * BLOCK, bytes16(p + 8 + j * 16), dl * uneven16());
        }
    }
}

LM_INLINE void q2_k(sink *s, const uint8_t *p, int64_t n)
{
    for (int64_t i = 0; i < n; i += SUPER, p += 84) {
        float d = half_at(p + 80), least = half_at(p + 82);
        for (int g = 0; g < 8; g++) {
            const uint8_t *q = p + 16 + 32 * (g / 4), *by = p + 2 * g;
            vf a = vf_set(d * (float)(by[0] & 15)) * unsigned16(pair(bytes16(q), g % 4));
            vf b = vf_set(d * (float)(by[1] & 15)) * unsigned16(pair(bytes16(q + 16), g % 4));
            put32(s, i + 32 * g, a - vf_set(least * (float)(by[0] >> 4)),
                  b - vf_set(least * (float)(by[1] >> 4)));
        }
    }
}

LM_INLINE void q3_k(sink *s, const uint8_t *p, int64_t n)
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
            put32(s, i + 32 * g, s0 * (unsigned16(a) - four), s1 * (unsigned16(b) - four));
        }
    }
}

/* ---- E2M1, signs, pairs of bits (numeric/ggml_read.c) ---- */

/* The 16 numbers of E2M1, times `by`: the values are twice those of the format, which by corrects.  BF16 holds
 * them exactly under a power of two and under a number of E4M3. */
LM_INLINE vf e2m1_16(vf by)
{
    const __m512 twice =
        _mm512_setr_ps(0, 1, 2, 3, 4, 6, 8, 12, -0.0f, -1, -2, -3, -4, -6, -8, -12);
    return twice * by;
}

LM_INLINE void mxfp4(sink *s, const uint8_t *p, int64_t n)
{
    for (int64_t i = 0; i < n; i += BLOCK, p += 17) {
        vf numbers = e2m1_16(vf_set(half_power(p[0])));
        __m512i code = _mm512_cvtepu8_epi32(bytes16(p + 1));
        put32_exact(s, i, chosen(code, numbers), chosen(_mm512_srli_epi32(code, 4), numbers));
    }
}

/* The 16 numbers of group g of 4. */
LM_INLINE vf nvfp4_group(const uint8_t *p, const float *scales, int g)
{
    __m128i q = _mm_loadl_epi64((const __m128i *)(p + 4 + 8 * g));
    q = _mm_unpacklo_epi64(q, _mm_srli_epi16(q, 4));
    return chosen(_mm512_cvtepu8_epi32(q), e2m1_16(vf_set(scales[p[g]])));
}

LM_INLINE void nvfp4(sink *s, const uint8_t *p, int64_t n)
{
    const float *scales = nvfp4_scales();
    for (int64_t i = 0; i < n; i += 64, p += 36)
        for (int g = 0; g < 4; g += 2)
            put32_exact(s, i + 16 * g, nvfp4_group(p, scales, g), nvfp4_group(p, scales, g + 1));
}

LM_INLINE void q1_0(sink *s, const uint8_t *p, int64_t n)
{
    for (int64_t i = 0; i < n; i += 128, p += 18) {
        float d = half_at(p);
        vf plus = vf_set(d), minus = vf_set(-d);
        for (int j = 0; j < 128; j += 32) {
            uint32_t bits = word_at(p + 2 + j / 8);
            put32(s, i + j, _mm512_mask_blend_ps((__mmask16)bits, minus, plus),
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

LM_INLINE void q2_0(sink *s, const uint8_t *p, int64_t n)
{
    for (int64_t i = 0; i < n; i += 64, p += 18) {
        vf d = half16(p);
        for (int j = 0; j < 64; j += 32)
            put32(s, i + j, d * ternary16(p + 2 + j / 4), d * ternary16(p + 6 + j / 4));
    }
}

/* ---- plain elements ---- */

/* A number behind the last 32 of a row, to y. */
LM_INLINE void put1(const sink *s, int64_t at, float x)
{
    if (s->t == LM_DTYPE_F32)
        ((float *)s->y)[at] = x;
    else
        ((uint16_t *)s->y)[at] = lm_f32_to_bf16(x);
}

LM_INLINE __m256i words16(const uint8_t *p)
{
    return _mm256_loadu_si256((const __m256i *)p);
}

LM_INLINE void f16(sink *s, const uint8_t *p, int64_t n)
{
    int64_t i = 0;
    for (; i + 32 <= n; i += 32)
        put32(s, i, _mm512_cvtph_ps(words16(p + 2 * i)), _mm512_cvtph_ps(words16(p + 2 * i + 32)));
    for (; i < n; i++)
        put1(s, i, half_at(p + 2 * i));
}

LM_INLINE vf bf16_16(const uint8_t *p)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words16(p)), 16));
}

LM_INLINE void bf16(sink *s, const uint8_t *p, int64_t n)
{
    int64_t i = 0;
    for (; i + 32 <= n; i += 32)
        put32_exact(s, i, bf16_16(p + 2 * i), bf16_16(p + 2 * i + 32));
    for (; i < n; i++)
        put1(s, i, lm_bf16_to_f32((uint16_t)(p[2 * i] | p[2 * i + 1] << 8)));
}

/* ---- one byte a number ---- */

/* BF16 of each code without its sign: every number of both types is one of BF16's. */
static uint16_t narrow[2][128]; /* of E4M3, E5M2 */
static pthread_once_t narrow_made = PTHREAD_ONCE_INIT;

static void make_narrow(void)
{
    uint8_t all[128];
    for (int i = 0; i < 128; i++)
        all[i] = (uint8_t)i;
    lm_convert(LM_DTYPE_F8E4M3, all, LM_DTYPE_BF16, narrow[0], 128);
    lm_convert(LM_DTYPE_F8E5M2, all, LM_DTYPE_BF16, narrow[1], 128);
}

static const uint16_t *narrow_of(lm_dtype element)
{
    pthread_once(&narrow_made, make_narrow);
    return narrow[element == LM_DTYPE_F8E5M2];
}

/* The numbers of 32 codes in BF16, by two tables of 64 entries each, and the sign. */
LM_INLINE __m512i narrow32(const uint16_t *numbers, __m256i codes)
{
    __m512i c = _mm512_cvtepu8_epi16(codes);
    __m512i low =
        _mm512_permutex2var_epi16(_mm512_loadu_si512(numbers), c, _mm512_loadu_si512(numbers + 32));
    __m512i high = _mm512_permutex2var_epi16(_mm512_loadu_si512(numbers + 64), c,
                                             _mm512_loadu_si512(numbers + 96));
    __mmask32 upper = _mm512_test_epi16_mask(c, _mm512_set1_epi16(64));
    __m512i sign = _mm512_slli_epi16(_mm512_and_si512(c, _mm512_set1_epi16(128)), 8);
    return _mm512_or_si512(_mm512_mask_mov_epi16(low, upper, high), sign);
}

static void narrow_row(const uint16_t *numbers, const uint8_t *p, int64_t n, uint16_t *y)
{
    for (int64_t i = 0; i < n; i += 32) {
        __mmask32 live = n - i < 32 ? (1u << (n - i)) - 1 : ~0u;
        __m512i v = narrow32(numbers, _mm256_maskz_loadu_epi8(live, p + i));
        _mm512_mask_storeu_epi16(y + i, live, v);
    }
}

/* For sums alone: n is a multiple of 32. */
LM_INLINE void narrow_sums(sink *s, lm_dtype element, const uint8_t *p, int64_t n)
{
    const uint16_t *numbers = narrow_of(element);
    for (int64_t i = 0; i < n; i += 32) {
        __m512i v = narrow32(numbers, words16(p + i));
        vf a = vf_from_bf16_bits(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(v)));
        vf b = vf_from_bf16_bits(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(v, 1)));
        put32_exact(s, i, a, b);
    }
}

LM_INLINE void e4m3(sink *s, const uint8_t *p, int64_t n)
{
    narrow_sums(s, LM_DTYPE_F8E4M3, p, n);
}

LM_INLINE void e5m2(sink *s, const uint8_t *p, int64_t n)
{
    narrow_sums(s, LM_DTYPE_F8E5M2, p, n);
}

/* any: products may be numbers that put32 does not round. */
LM_INLINE void scaled_block(sink *s, const uint16_t *numbers, int64_t at, const uint8_t *p, vf by,
                            bool any)
{
#pragma GCC unroll 4
    for (int k = 0; k < LM_SCALED_BLOCK; k += 32) {
        __m512i v = narrow32(numbers, words16(p + k));
        vf a = vf_from_bf16_bits(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(v))) * by;
        vf b = vf_from_bf16_bits(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(v, 1))) * by;
        if (any)
            put32_exact(s, at + k, rounded_any(a), rounded_any(b));
        else
            put32(s, at + k, a, b);
    }
}

/* Blocks of E4M3 behind their scales (numeric/format_scaled.h), which may be any numbers. */
LM_INLINE void scaled(sink *s, const uint8_t *p, int64_t n)
{
    const uint16_t *numbers = narrow_of(LM_DTYPE_F8E4M3);
    for (int64_t i = 0; i < n; i += LM_SCALED_BLOCK, p += LM_SCALED_BYTES) {
        float d;
        memcpy(&d, p, sizeof d);
        bool usual = __builtin_fabsf(d) > 0x1p-100f && __builtin_fabsf(d) < 0x1p100f;
        vf by = vf_set(s->y || d == d ? d : __builtin_nanf(""));
        if (s->y || s->t == LM_DTYPE_F32 || usual)
            scaled_block(s, numbers, i, p + sizeof d, by, false);
        else
            scaled_block(s, numbers, i, p + sizeof d, by, true);
    }
}

/* ---- by format ---- */

#define SUMS_OF(name, type, rows)                                                       \
    static void name##_##type##_sums##rows(const uint8_t *p, int64_t n, const float *x, \
                                           float *sum)                                  \
    {                                                                                   \
        sink s = { .t = LM_DTYPE_##type, .m = rows, .x = x, .cols = n };                \
        for (int i = 0; i < rows; i++)                                                  \
            s.sum[i] = vf_zero();                                                       \
        name(&s, p, n);                                                                 \
        for (int i = 0; i < rows; i++)                                                  \
            sum[i] = _mm512_reduce_add_ps(s.sum[i]);                                    \
    }
#define ROW_OF(name, type)                                          \
    static void name##_##type(const uint8_t *p, int64_t n, void *y) \
    {                                                               \
        sink s = { .t = LM_DTYPE_##type, .y = y };                  \
        name(&s, p, n);                                             \
    }
#define ROWS_OF(kind, name) \
    ROW_OF(name, F32)       \
    ROW_OF(name, BF16)      \
    SUMS_OF(name, F32, 1)   \
    SUMS_OF(name, F32, 2)   \
    SUMS_OF(name, F32, 4)   \
    SUMS_OF(name, BF16, 1)  \
    SUMS_OF(name, BF16, 2)  \
    SUMS_OF(name, BF16, 4)
SUMS_OF(e4m3, BF16, 1)
SUMS_OF(e4m3, BF16, 2)
SUMS_OF(e4m3, BF16, 4)
SUMS_OF(e5m2, BF16, 1)
SUMS_OF(e5m2, BF16, 2)
SUMS_OF(e5m2, BF16, 4)
ROW_FORMATS(ROWS_OF)
ROWS_OF(, scaled)

#define FORMAT(kind, name)                                                \
    { .gguf = kind,                                                       \
      .f32 = name##_F32,                                                  \
      .bf16 = name##_BF16,                                                \
      .sums = { { name##_F32_sums1, name##_F32_sums2, name##_F32_sums4 }, \
                { name##_BF16_sums1, name##_BF16_sums2, name##_BF16_sums4 } } },
static const row_coder known[] = { ROW_FORMATS(FORMAT) };
static const row_coder scaled_rows = {
    .gguf = LM_NO_GGUF,
    .f32 = scaled_F32,
    .bf16 = scaled_BF16,
    .sums = { { scaled_F32_sums1, scaled_F32_sums2, scaled_F32_sums4 },
              { scaled_BF16_sums1, scaled_BF16_sums2, scaled_BF16_sums4 } }
};

/* The sums of a format for 1, 2 and LM_CODE_SUMS_X rows of x; NULL: none. */
static const sums_fn *sums_of(const lm_format *f, const row_coder *by, lm_dtype t)
{
    /* Numbers of eight bits are the same as F32 and as BF16. */
    static const sums_fn e4[] = { e4m3_BF16_sums1, e4m3_BF16_sums2, e4m3_BF16_sums4 };
    static const sums_fn e5[] = { e5m2_BF16_sums1, e5m2_BF16_sums2, e5m2_BF16_sums4 };
    if (by)
        return by->sums[t == LM_DTYPE_BF16];
    return f->element == LM_DTYPE_F8E4M3 ? e4 : f->element == LM_DTYPE_F8E5M2 ? e5 : NULL;
}

#endif
