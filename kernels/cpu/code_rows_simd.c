/* SPDX-License-Identifier: Apache-2.0 */
/* code_rows_simd.c -- the formats that weights come in most, row by row, and the rounding to BF16.
 *
 * Each number is made by the operations of lib/numeric, in their order. */
#include "kernels/cpu/code_rows.h"

#include <pthread.h>

#include "numeric/format_normal.h"
#include "numeric/format_scaled.h"

#ifdef __AVX512F__
#include "kernels/cpu/code_rows_512.h"
#else
#include "kernels/cpu/code_rows_256.h"
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

static bool is_scaled(const lm_format *f)
{
    return f->gguf == LM_NO_GGUF && !strcmp(f->name, "fp8_e4m3_128");
}

/* The row decoders of a format; NULL: lib/numeric has them alone. */
static const row_coder *coder_of(const lm_format *f)
{
#ifdef __AVX512F__
    if (is_scaled(f))
        return &scaled_rows;
#endif
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (f->gguf == known[i].gguf)
            return &known[i];
    return NULL;
}

enum { AHEAD = 2048 }; /* bytes between a row and what is prefetched meanwhile */

/* Rows are read in the order of memory. */
LM_INLINE void prefetch_row(const uint8_t *p, int64_t bytes)
{
    for (int64_t at = 0; at < bytes; at += 64)
        _mm_prefetch((const char *)p + AHEAD + at, _MM_HINT_T0);
}

static void run_rows(row_fn row, const lm_format *f, const uint8_t *p, int64_t rows, int64_t cols,
                     void *y, size_t size)
{
    int64_t bytes = (int64_t)lm_plane_bytes(&f->plane[0], 1, cols);
    for (int64_t r = 0; r < rows; r++) {
        prefetch_row(p + r * bytes, bytes);
        row(p + r * bytes, cols, (char *)y + (size_t)(r * cols) * size);
    }
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

#ifndef __AVX512F__
/* Rows of blocks of E4M3, each behind its scale. */
static void scaled(const uint8_t *p, int64_t n, float *y)
{
    for (int64_t at = 0; at < n; at += LM_SCALED_BLOCK, p += LM_SCALED_BYTES) {
        float s, *to = y + at;
        memcpy(&s, p, sizeof s);
        by_table(table[0], p + sizeof s, LM_SCALED_BLOCK, to);
        vf by = vf_set(s);
        VF_FOR(i, k, LM_SCALED_BLOCK,
               { vf_put_any(LM_DTYPE_F32, to, i, vf_get_any(LM_DTYPE_F32, to, i, k) * by, k); });
    }
}
#endif

/* ---- NF4 ---- */

/* The values of 8 or 16 codes of 4 bits each in `bytes`, times a scale. */
LM_INLINE void normal_vector(const uint8_t *bytes, vf scale, float *y)
{
#ifdef __AVX512F__
    __m128i b = _mm_loadl_epi64((const __m128i *)bytes);
    __m128i both = _mm_unpacklo_epi8(b, _mm_srli_epi16(b, 4));
    __m512i code = _mm512_cvtepu8_epi32(_mm_and_si128(both, _mm_set1_epi8(15)));
    vf_store(y, _mm512_permutexvar_ps(code, vf_load(lm_normal_values)) * scale);
#else
    int32_t word;
    memcpy(&word, bytes, sizeof word);
    __m128i b = _mm_cvtsi32_si128(word);
    __m128i both = _mm_unpacklo_epi8(b, _mm_srli_epi16(b, 4));
    __m256i code = _mm256_cvtepu8_epi32(_mm_and_si128(both, _mm_set1_epi8(15)));
    __m256 low = _mm256_permutevar8x32_ps(vf_load(lm_normal_values), code);
    __m256 high = _mm256_permutevar8x32_ps(vf_load(lm_normal_values + 8), code);
    __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(code, 28)); /* bit 3 decides */
    vf_store(y, _mm256_blendv_ps(low, high, upper) * scale);
#endif
}

/* A row of whole blocks. */
static void normal_row(const uint8_t *code, const float *scale, int64_t cols, float *y)
{
    for (int64_t j = 0; j < cols; j += LM_NORMAL_BLOCK) {
        vf by = vf_set(scale[j / LM_NORMAL_BLOCK]);
        for (int64_t i = j; i < j + LM_NORMAL_BLOCK; i += VF_LANES)
            normal_vector(code + i / 2, by, y + i);
    }
}

/* Rows of nf4 and nf4_dq; false: they end in a short block, or are longer than one group. */
static bool normal(const lm_format *f, const void *const *plane, int64_t rows, int64_t cols,
                   float *y)
{
    const uint8_t *code = plane[0], *scale = plane[1], *second = plane[2], *mean = plane[3];
    int64_t blocks = cols / LM_NORMAL_BLOCK, four = (int64_t)sizeof(float);
    float of_row[LM_NORMAL_SCALES];
    if (f->decode != lm_normal_decode || cols % LM_NORMAL_BLOCK || cols > LM_NORMAL_GROUP)
        return false;
    for (int64_t r = 0; r < rows; r++) {
        if (f->n_planes > 2)
            lm_normal_scales(scale + r * blocks, second + r * four, mean + r * four, blocks,
                             of_row);
        else
            memcpy(of_row, scale + r * blocks * four, (size_t)(blocks * four));
        normal_row(code + r * (cols / 2), of_row, cols, y + r * cols);
    }
    return true;
}

static bool decode(const lm_format *f, const void *const *plane, int64_t rows, int64_t cols,
                   float *y)
{
    const row_coder *by = coder_of(f);
    if (by) {
        run_rows(by->f32, f, plane[0], rows, cols, y, sizeof(float));
        return true;
    }
    if (normal(f, plane, rows, cols, y))
        return true;
    if (!strcmp(f->name, "dynamic8")) {
        pthread_once(&dynamic_made, make_dynamic);
        dynamic8(plane, rows, cols, y);
        return true;
    }
#ifndef __AVX512F__
    if (is_scaled(f)) {
        pthread_once(&made, make_tables);
        scaled(plane[0], rows * cols, y);
        return true;
    }
#endif
    if (f->element != LM_DTYPE_F8E4M3 && f->element != LM_DTYPE_F8E5M2)
        return false;
    pthread_once(&made, make_tables);
    by_table(table[f->element == LM_DTYPE_F8E5M2], plane[0], rows * cols, y);
    return true;
}

static bool decode_bf16(const lm_format *f, const void *const *plane, int64_t rows, int64_t cols,
                        uint16_t *y)
{
#ifdef __AVX512F__
    if (f->element == LM_DTYPE_F8E4M3 || f->element == LM_DTYPE_F8E5M2) {
        narrow_row(narrow_of(f->element), plane[0], rows * cols, y);
        return true;
    }
#endif
    const row_coder *by = coder_of(f);
    if (by && by->bf16)
        run_rows(by->bf16, f, plane[0], rows, cols, y, sizeof(uint16_t));
    return by && by->bf16;
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

#ifdef __AVX512F__
/* lm_code_rows_sums */
static bool sums(const lm_format *f, lm_dtype t, const uint8_t *p, int64_t rows, int64_t cols,
                 const float *x, int m, float *sum)
{
    const sums_fn *by = cols % 32 ? NULL : sums_of(f, coder_of(f), t);
    int64_t bytes = (int64_t)lm_plane_bytes(&f->plane[0], 1, cols);
    if (!by)
        return false;
    for (int64_t r = 0; r < rows; r++) {
        prefetch_row(p + r * bytes, bytes);
        by[m < 3 ? m - 1 : 2](p + r * bytes, cols, x, sum + r * LM_CODE_SUMS_X);
    }
    return true;
}
#endif

#ifdef __AVX512BF16__
const lm_code_rows_coder lm_code_rows_bf16 = { decode, to_bf16, decode_bf16 };
const lm_code_rows_sums lm_code_rows_sums_bf16 = sums;
#elif defined(__AVX512F__)
const lm_code_rows_coder lm_code_rows_avx512 = { decode, to_bf16, decode_bf16 };
const lm_code_rows_sums lm_code_rows_sums_avx512 = sums;
#else
const lm_code_rows_coder lm_code_rows_avx2 = { decode, to_bf16, decode_bf16 };
const lm_code_rows_sums lm_code_rows_sums_avx2 = NULL;
#endif
