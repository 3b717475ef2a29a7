/* SPDX-License-Identifier: Apache-2.0 */
/* code_rows_simd.c -- the formats that weights come in most, row by row, and the rounding to BF16.
 *
 * Each number is made by the operations of lib/numeric, in their order.  For AVX2 loops of fixed length over
 * small arrays are what the compiler makes vectors of. */
#include "kernels/cpu/code_rows.h"

#include <pthread.h>

#include "kernels/cpu/simd.h"

enum { BLOCK = 32, SUPER = 256 };

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
#define PAIR(name)              \
    {                           \
        name##_f32, name##_bf16 \
    }

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

#define PAIR(name) \
    {              \
        name, NULL \
    }
#endif

/* ---- one byte a number ---- */

static float table[2][256]; /* of E4M3, E5M2 */
static pthread_once_t made = PTHREAD_ONCE_INIT;

static void make_tables(void)
{
    uint8_t all[256];
    for (int i = 0; i < 256; i++)
        all[i] = (uint8_t)i;
    lm_convert(LM_DTYPE_F8E4M3, all, LM_DTYPE_F32, table[0], 256);
    lm_convert(LM_DTYPE_F8E5M2, all, LM_DTYPE_F32, table[1], 256);
}

/* Codes of one byte by a table of all numbers. */
static void by_table(const float numbers[256], const uint8_t *p, int64_t n, float *y)
{
    int64_t i = 0;
#ifdef __AVX512F__
    for (; i + 16 <= n; i += 16) {
        __m512i at = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(p + i)));
        _mm512_storeu_ps(y + i, _mm512_i32gather_ps(at, numbers, 4));
    }
#else
    for (; i + 8 <= n; i += 8) {
        __m256i at = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(p + i)));
        _mm256_storeu_ps(y + i, _mm256_i32gather_ps(numbers, at, 4));
    }
#endif
    for (; i < n; i++)
        y[i] = numbers[p[i]];
}

/* ---- by format ---- */

typedef void (*row_fn)(const uint8_t *p, int64_t n, void *y);
typedef struct {
    row_fn f32, bf16; /* NULL: by way of F32 */
} row_pair;

/* The row decoders of a format; none: its own. */
static row_pair rows_of(const lm_format *f)
{
    static const row_pair known[] = { PAIR(q4_0), PAIR(q4_1), PAIR(q8_0),
                                      PAIR(q4_k), PAIR(q5_k), PAIR(q6_k) };
    static const int number[] = { 2, 3, 8, 12, 13, 14 }; /* in GGUF */
    for (int i = 0; i < 6; i++)
        if (f->gguf == number[i])
            return known[i];
    return (row_pair){ NULL, NULL };
}

static void run_rows(row_fn row, const lm_format *f, const uint8_t *p, int64_t rows, int64_t cols,
                     void *y, size_t size)
{
    int64_t bytes = cols / f->plane[0].cols * (f->plane[0].bits / 8);
    for (int64_t r = 0; r < rows; r++)
        row(p + r * bytes, cols, (char *)y + (size_t)(r * cols) * size);
}

/* The numbers of the two maps of dynamic8 (lib/numeric/format_dynamic.h) under the scales 1 and -1. */
static float dynamic[2][256];
static pthread_once_t dynamic_made = PTHREAD_ONCE_INIT;

static void make_dynamic(void)
{
    const lm_format *f = NULL;
    lm_err e = { 0 };
    uint8_t all[256];
    for (int i = 0; i < 256; i++)
        all[i] = (uint8_t)i;
    lm_format_find("dynamic8", NULL, &f, &e);
    for (int map = 0; f && map < 2; map++) {
        float scale = map ? -1.0f : 1.0f;
        f->decode(f, (const void *const[]){ all, &scale }, 1, 256, dynamic[map], 256);
    }
}

/* Rows of blocks of 256 codes, each with its scale. */
static void dynamic8(const void *const *plane, int64_t rows, int64_t cols, float *y)
{
    const uint8_t *code = plane[0], *scale = plane[1];
    for (int64_t r = 0; r < rows; r++)
        for (int64_t j = 0; j < cols; j += SUPER, scale += sizeof(float)) {
            int64_t n = cols - j < SUPER ? cols - j : SUPER;
            float s, *to = y + r * cols + j;
            memcpy(&s, scale, sizeof s);
            by_table(dynamic[s < 0], code + r * cols + j, n, to);
            vf by = vf_abs(vf_set(s));
            VF_FOR(i, k, n, {
                vf_put_any(LM_DTYPE_F32, to, i, vf_get_any(LM_DTYPE_F32, to, i, k) * by, k);
            });
        }
}

static bool decode(const lm_format *f, const void *const *plane, int64_t rows, int64_t cols,
                   float *y)
{
    row_fn row = rows_of(f).f32;
    if (row) {
        run_rows(row, f, plane[0], rows, cols, y, sizeof(float));
        return true;
    }
    if (!strcmp(f->name, "dynamic8")) {
        pthread_once(&dynamic_made, make_dynamic);
        dynamic8(plane, rows, cols, y);
        return true;
    }
    if (f->element != LM_DTYPE_F8E4M3 && f->element != LM_DTYPE_F8E5M2)
        return false;
    pthread_once(&made, make_tables);
    by_table(table[f->element == LM_DTYPE_F8E5M2], plane[0], rows * cols, y);
    return true;
}

#ifdef __AVX512F__
/* BF16 of each code without its sign: every number of both types is one of BF16's. */
static uint16_t narrow[2][128];
static pthread_once_t narrow_made = PTHREAD_ONCE_INIT;

static void make_narrow(void)
{
    uint8_t all[128];
    for (int i = 0; i < 128; i++)
        all[i] = (uint8_t)i;
    lm_convert(LM_DTYPE_F8E4M3, all, LM_DTYPE_BF16, narrow[0], 128);
    lm_convert(LM_DTYPE_F8E5M2, all, LM_DTYPE_BF16, narrow[1], 128);
}

/* 32 codes at a time by two tables of 64 entries each, and the sign. */
static void eight_bits(const uint16_t *numbers, const uint8_t *p, int64_t n, uint16_t *y)
{
    __m512i t[4];
    for (int i = 0; i < 4; i++)
        t[i] = _mm512_loadu_si512(numbers + 32 * i);
    for (int64_t i = 0; i < n; i += 32) {
        __mmask32 live = n - i < 32 ? (1u << (n - i)) - 1 : ~0u;
        __m512i c = _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(live, p + i));
        __m512i low = _mm512_permutex2var_epi16(t[0], c, t[1]);
        __m512i high = _mm512_permutex2var_epi16(t[2], c, t[3]);
        __mmask32 upper = _mm512_test_epi16_mask(c, _mm512_set1_epi16(64));
        __m512i sign = _mm512_slli_epi16(_mm512_and_si512(c, _mm512_set1_epi16(128)), 8);
        __m512i v = _mm512_or_si512(_mm512_mask_mov_epi16(low, upper, high), sign);
        _mm512_mask_storeu_epi16(y + i, live, v);
    }
}
#endif

static bool decode_bf16(const lm_format *f, const void *const *plane, int64_t rows, int64_t cols,
                        uint16_t *y)
{
#ifdef __AVX512F__
    if (f->element == LM_DTYPE_F8E4M3 || f->element == LM_DTYPE_F8E5M2) {
        pthread_once(&narrow_made, make_narrow);
        eight_bits(narrow[f->element == LM_DTYPE_F8E5M2], plane[0], rows * cols, y);
        return true;
    }
#endif
    row_fn row = rows_of(f).bf16;
    if (row)
        run_rows(row, f, plane[0], rows, cols, y, sizeof(uint16_t));
    return row;
}

static void to_bf16(const float *x, uint16_t *y, int64_t n)
{
#ifdef __AVX512BF16__ /* 32 numbers at once, but for those below the normal range */
    int64_t at = 0;
    for (; at + 32 <= n; at += 32) {
        __m512 a = _mm512_loadu_ps(x + at), b = _mm512_loadu_ps(x + at + 16);
        if (_mm512_fpclass_ps_mask(a, 0x20) | _mm512_fpclass_ps_mask(b, 0x20))
            lm_convert(LM_DTYPE_F32, x + at, LM_DTYPE_BF16, y + at, 32);
        else
            _mm512_storeu_si512(y + at, (__m512i)_mm512_cvtne2ps_pbh(b, a));
    }
    lm_convert(LM_DTYPE_F32, x + at, LM_DTYPE_BF16, y + at, n - at);
#else
    VF_FOR(i, k, n, { vf_put_any(LM_DTYPE_BF16, y, i, vf_get_any(LM_DTYPE_F32, x, i, k), k); });
#endif
}

#ifdef __AVX512BF16__
const lm_code_rows_coder lm_code_rows_amx = { decode, to_bf16, decode_bf16 };
#elif defined(__AVX512F__)
const lm_code_rows_coder lm_code_rows_avx512 = { decode, to_bf16, decode_bf16 };
#else
const lm_code_rows_coder lm_code_rows_avx2 = { decode, to_bf16, decode_bf16 };
#endif
