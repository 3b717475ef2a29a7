/* SPDX-License-Identifier: Apache-2.0 */
/* attention_amx.h -- tiles for the AMX attention kernels: configuration, packing, transposes.
 *
 * A tile is 1 KiB: 16 rows of 64 bytes.  Three forms of bf16 tiles are made from rows of a matrix
 * X: natural  [16 rows x 32 d]      as an A operand (contraction over d) columns  row p, lane r =
 * (X[r][2p], X[r][2p+1])   B operand of Y X^T (contraction over d) pairs    row p, lane d =
 * (X[2p][d], X[2p+1][d])   B operand of Y X   (contraction over rows) turned   row d, pair p =
 * (X[2p][d], X[2p+1][d])   A operand of X^T Y (contraction over rows) Rows at or past `have` read
 * as zeros, as do columns at or past `wide`.  d is a multiple of 32. */
#ifndef LM_KERNELS_CPU_ATTENTION_AMX_H
#define LM_KERNELS_CPU_ATTENTION_AMX_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "kernels/cpu/vmath.h"

enum { TILE = 512 /* uint16_t in a bf16 tile */, CTILE = 256 /* floats in an f32 tile */ };

#ifdef __AMX_TILE__
/* A static object: GCC 12 tells the optimiser about the first 8 bytes of the operand only. */
static const struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} tile_config __attribute__((aligned(64))) = {
    .palette = 1,
    .bytes = { 64, 64, 64, 64, 64, 64, 64, 64 },
    .rows = { 16, 16, 16, 16, 16, 16, 16, 16 },
};

static inline void tiles_begin(void)
{
    _tile_loadconfig(&tile_config);
}

static inline void tiles_end(void)
{
    _tile_release();
}
#endif

/* Transpose 16 vectors of 16 32-bit elements in place. */
static inline __attribute__((always_inline)) void transpose16(__m512i v[16])
{
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        v[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        v[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        v[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        v[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(v[i], v[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(v[i], v[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(v[i + 8], v[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(v[i + 8], v[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; i++) {
        v[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        v[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
        v[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
        v[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
    }
}

/* Of 32 values those of the row: `wide` of them are left. */
static inline __mmask32 in_row(int64_t wide)
{
    return wide < 32 ? (UINT32_C(1) << wide) - 1 : UINT32_MAX;
}

/* The up to 32 values of row r from column d on, of `wide` in all, and zeros. */
static inline __m512i load_row(const uint16_t *x, int64_t pitch, int64_t r, int64_t d, int64_t wide,
                               int64_t have)
{
    if (r >= have)
        return _mm512_setzero_si512();
    if (wide - d >= 32)
        return _mm512_loadu_si512(x + r * pitch + d);
    return _mm512_maskz_loadu_epi16(in_row(wide - d), x + r * pitch + d);
}

static inline void pack_natural(uint16_t *to, const uint16_t *x, int64_t pitch, int64_t d,
                                int64_t wide, int64_t have)
{
    for (int r = 0; r < 16; r++)
        _mm512_store_si512(to + 32 * r, load_row(x, pitch, r, d, wide, have));
}

static inline void pack_columns(uint16_t *to, const uint16_t *x, int64_t pitch, int64_t d,
                                int64_t wide, int64_t have)
{
    __m512i v[16];
#pragma GCC unroll 16
    for (int r = 0; r < 16; r++)
        v[r] = load_row(x, pitch, r, d, wide, have);
    transpose16(v);
#pragma GCC unroll 16
    for (int r = 0; r < 16; r++)
        _mm512_store_si512(to + 32 * r, v[r]);
}

static const uint16_t weave_lo[32]
    __attribute__((aligned(64))) = { 0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                     8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47 };
static const uint16_t weave_hi[32] __attribute__((
    aligned(64))) = { 16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55,
                      24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63 };

/* 32 rows, columns d..d+31: the pair tiles of columns d.. and d+16.. into lo and hi. */
static inline void pack_pairs(uint16_t *lo, uint16_t *hi, const uint16_t *x, int64_t pitch,
                              int64_t d, int64_t wide, int64_t have)
{
    __m512i wl = _mm512_load_si512(weave_lo), wh = _mm512_load_si512(weave_hi);
    for (int p = 0; p < 16; p++) {
        __m512i a = load_row(x, pitch, 2 * p, d, wide, have),
                b = load_row(x, pitch, 2 * p + 1, d, wide, have);
        _mm512_store_si512(lo + 32 * p, _mm512_permutex2var_epi16(a, wl, b));
        _mm512_store_si512(hi + 32 * p, _mm512_permutex2var_epi16(a, wh, b));
    }
}

/* 16 of the 32 rows, columns d..d+31: a half of the pair tiles into lo and hi. */
static inline void pack_half_pairs(uint16_t *lo, uint16_t *hi, const uint16_t *x, int64_t pitch,
                                   int64_t d, int64_t wide, int64_t have)
{
    __m512i wl = _mm512_load_si512(weave_lo), wh = _mm512_load_si512(weave_hi);
    for (int p = 0; p < 8; p++) {
        __m512i a = load_row(x, pitch, 2 * p, d, wide, have),
                b = load_row(x, pitch, 2 * p + 1, d, wide, have);
        _mm512_store_si512(lo + 32 * p, _mm512_permutex2var_epi16(a, wl, b));
        _mm512_store_si512(hi + 32 * p, _mm512_permutex2var_epi16(a, wh, b));
    }
}

/* A pair tile becomes a turned one: rows are its 16 columns. */
static inline void turn_pairs(uint16_t *to, const uint16_t *pairs)
{
    __m512i v[16];
#pragma GCC unroll 16
    for (int r = 0; r < 16; r++)
        v[r] = _mm512_load_si512(pairs + 32 * r);
    transpose16(v);
#pragma GCC unroll 16
    for (int r = 0; r < 16; r++)
        _mm512_store_si512(to + 32 * r, v[r]);
}

#endif
