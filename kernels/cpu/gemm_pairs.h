/* SPDX-License-Identifier: Apache-2.0 */
/* gemm_pairs.h -- packing of BF16 in pairs of depth, for products by tiles (gemm_amx.c) and by dot
 * products of vectors (gemm_bf16.c).
 *
 * A panel of op(A) is, for each PAIRS_DEPTH of depth, its rows behind each other, 64 bytes of each.
 * A panel of op(B) has 32 columns: for each PAIRS_DEPTH of depth two tiles of 16 pairs of depth x
 * 16 columns, the pair interleaved; those of op(B) stored [n,k] are the panels of kernels/panels.h.
 * Beyond the ends there are zeros. */
#ifndef LM_KERNELS_CPU_GEMM_PAIRS_H
#define LM_KERNELS_CPU_GEMM_PAIRS_H

#include <immintrin.h>

#include "kernels/cpu/gemm.h"
#include "kernels/cpu/gemm_transpose.h"
#include "kernels/panels.h"

enum { PAIRS_DEPTH = LM_PANEL, PAIRS_TILE = 1024 /* bytes */ };

static inline __mmask32 mask32(int64_t n)
{
    return n >= 32 ? 0xffffffffu : n <= 0 ? 0 : (1u << n) - 1;
}

/* Up to 32 numbers. */
static inline __m512i load_up_to(const uint16_t *p, int64_t n)
{
    return n >= 32 ? _mm512_loadu_si512(p) : _mm512_maskz_loadu_epi16(mask32(n), p);
}

/* Rows k, k+1 of a [depth, .] matrix, 32 columns: pairs of columns c in lo/hi of each 128-bit lane,
 * so that lo holds columns 0-3, 8-11, 16-19, 24-27 and hi the others. */
static inline void load_pairs(const uint16_t *p, int64_t ld, int64_t k, int64_t kn, int64_t cols,
                              __m512i *lo, __m512i *hi)
{
    __m512i x = _mm512_setzero_si512(), y = x;

    if (k < kn)
        x = load_up_to(p + k * ld, cols);
    if (k + 1 < kn)
        y = load_up_to(p + (k + 1) * ld, cols);
    *lo = _mm512_unpacklo_epi16(x, y);
    *hi = _mm512_unpackhi_epi16(x, y);
}

/* op(A) stored [m,k], a panel of `height` rows: rows are copied. */
static inline void pack_rows(const uint16_t *p, int64_t ld, int64_t rows, int height, int64_t kn,
                             char *dst)
{
    for (int64_t k = 0; k < kn; k += PAIRS_DEPTH, dst += height * 64)
        for (int64_t r = 0; r < height; r++) {
            __m512i v = _mm512_setzero_si512();
            if (r < rows)
                v = load_up_to(p + r * ld + k, kn - k);
            _mm512_storeu_si512(dst + r * 64, v);
        }
}

/* op(A) stored [k,m], a panel of up to 16 rows: pairs of depth, then a transposition of 32-bit
 * elements. */
static inline __attribute__((always_inline)) void pack_few_rows_t(const uint16_t *p, int64_t ld,
                                                                  int64_t rows, const int height,
                                                                  int64_t kn, char *dst)
{
    __mmask16 valid = (__mmask16)mask32(rows < height ? rows : height);

    for (int64_t k = 0; k < kn; k += PAIRS_DEPTH, dst += height * 64) {
        __m512i v[16];
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) {
            __m256i lo = _mm256_setzero_si256(), hi = lo;
            if (k + 2 * i < kn)
                lo = _mm256_maskz_loadu_epi16(valid, p + (k + 2 * i) * ld);
            if (k + 2 * i + 1 < kn)
                hi = _mm256_maskz_loadu_epi16(valid, p + (k + 2 * i + 1) * ld);
            v[i] = _mm512_or_si512(_mm512_cvtepu16_epi32(lo),
                                   _mm512_slli_epi32(_mm512_cvtepu16_epi32(hi), 16));
        }
        transpose_16x16(v);
#pragma GCC unroll 16
        for (int r = 0; r < height; r++)
            _mm512_storeu_si512(dst + r * 64, v[r]);
    }
}

/* op(B) stored [k,n]: pairs of rows, with lanes restored to their order. */
static inline void pack_columns(const uint16_t *p, int64_t ld, int64_t cols, int64_t kn, char *dst)
{
    const __m512i first = _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0);
    const __m512i second = _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4);

    for (int64_t k = 0; k < kn; k += PAIRS_DEPTH, dst += 2 * PAIRS_TILE)
        for (int64_t r = 0; r < 16; r++) {
            __m512i lo, hi;
            load_pairs(p, ld, k + 2 * r, kn, cols, &lo, &hi);
            _mm512_store_si512(dst + r * 64, _mm512_permutex2var_epi64(lo, first, hi));
            _mm512_store_si512(dst + PAIRS_TILE + r * 64,
                               _mm512_permutex2var_epi64(lo, second, hi));
        }
}

/* op(B) stored [n,k]: a transposition of 32-bit elements. */
static inline void pack_columns_t(const uint16_t *p, int64_t ld, int64_t cols, int64_t kn,
                                  char *dst)
{
    for (int64_t k = 0; k < kn; k += PAIRS_DEPTH)
        for (int64_t h = 0; h < 2; h++, dst += PAIRS_TILE) {
            __m512i v[16];
#pragma GCC unroll 16
            for (int i = 0; i < 16; i++) {
                v[i] = _mm512_setzero_si512();
                if (16 * h + i < cols)
                    v[i] = load_up_to(p + (16 * h + i) * ld + k, kn - k);
            }
            transpose_16x16(v);
#pragma GCC unroll 16
            for (int i = 0; i < 16; i++)
                _mm512_store_si512(dst + i * 64, v[i]);
        }
}

/* sum[r] += sum of row r of a packed panel of op(A) with `height` rows, of which `rows` are valid,
 * for the up to 16 rows from `first` on. */
static inline __attribute__((always_inline)) void
sum_rows(const char *panel, int64_t kn, const int height, int first, int rows, float *sum)
{
    const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
    const int group = height - first < 16 ? height - first : 16;
    __m512 acc[16];

#pragma GCC unroll 16
    for (int r = 0; r < group; r++)
        acc[r] = _mm512_setzero_ps();
    for (int64_t k = 0; k < kn; k += PAIRS_DEPTH) {
        const char *t = panel + (k / PAIRS_DEPTH * height + first) * 64;
#pragma GCC unroll 16
        for (int r = 0; r < group; r++)
            acc[r] = _mm512_dpbf16_ps(acc[r], (__m512bh)_mm512_loadu_si512(t + r * 64), ones);
    }
    for (int r = 0; r < group && first + r < rows; r++)
        sum[first + r] += _mm512_reduce_add_ps(acc[r]);
}

#endif
