/* SPDX-License-Identifier: Apache-2.0 */
/* chunk_pairs.h -- products of the matrices of a chunk, F32 rounded to BF16 with sums in F32: by dot products of pairs, or on
 * tiles (AMX).
 *
 * 64 numbers of depth and 64 columns at a time.  Both ways read the same operands: of A 64 rows of 32 pairs of depth, of B for
 * each pair of depth those of 64 columns.  What has no number is zeros, so that it adds nothing. */
#ifndef LM_KERNELS_CPU_CHUNK_PAIRS_H
#define LM_KERNELS_CPU_CHUNK_PAIRS_H

#include <immintrin.h>

#include "kernels/cpu/attention_amx.h"
#include "kernels/cpu/tile_simd.h"

enum { CHUNK_SIDE = 64 /* rows, columns and depth of a product */, CHUNK_STEP = 32 };

typedef struct {
    uint16_t a[CHUNK_SIDE][CHUNK_SIDE];     /* [row][depth] */
    uint32_t b[CHUNK_SIDE / 2][CHUNK_SIDE]; /* [pair][column] */
#ifdef __AMX_TILE__
    float c[CHUNK_STEP][CHUNK_STEP]; /* of fewer rows than the tiles have */
#endif
} __attribute__((aligned(64))) chunk_operands;

/* Two vectors as pairs. */
static inline __m512i chunk_pair(__m512 even, __m512 odd)
{
    const __m512i order =
        _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                         21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(odd, even));
}

/* The first n numbers at x, at most 16, and zeros. */
static inline __m512 chunk_load(const float *x, int64_t n)
{
    __mmask16 in = n >= 16 ? 0xffff : n <= 0 ? 0 : (__mmask16)((1u << n) - 1);
    return _mm512_maskz_loadu_ps(in, x);
}

/* Rows i0 to i0 + m of A, depth p0 to p0 + k. */
static inline void chunk_pack_a(chunk_operands *w, const mm_args *g, int64_t i0, int64_t m,
                                int64_t p0, int64_t k)
{
    const float *a = g->a + i0 * g->a_row + p0 * g->a_k;
    for (int64_t i = 0; i < CHUNK_SIDE && g->a_k == 1; i++)
        for (int64_t p = 0; p < CHUNK_SIDE; p += 32) {
            const float *x = a + i * g->a_row + p;
            __m512 lo = chunk_load(x, i < m ? k - p : 0),
                   hi = chunk_load(x + 16, i < m ? k - p - 16 : 0);
            _mm512_store_si512(w->a[i] + p, (__m512i)_mm512_cvtne2ps_pbh(hi, lo));
        }
    if (g->a_k == 1)
        return;
    for (int64_t i = 0; i < CHUNK_SIDE; i += 16) /* the rows of A are columns of what is stored */
        for (int64_t p = 0; p < CHUNK_SIDE; p += 32) {
            __m512i v[16];
            for (int64_t r = 0; r < 16; r++) {
                const float *x = a + i + (p + 2 * r) * g->a_k;
                v[r] = chunk_pair(chunk_load(x, p + 2 * r < k ? m - i : 0),
                                  chunk_load(x + g->a_k, p + 2 * r + 1 < k ? m - i : 0));
            }
            transpose16(v);
            for (int64_t r = 0; r < 16; r++)
                _mm512_store_si512(w->a[i + r] + p, v[r]);
        }
}

/* Columns j0 to j0 + n of B, whole vectors, depth p0 to p0 + k. */
static inline void chunk_pack_b(chunk_operands *w, const mm_args *g, int64_t j0, int64_t n,
                                int64_t p0, int64_t k)
{
    const float *b = g->b + p0 * g->ldb + j0;
    for (int64_t p = 0; p < CHUNK_SIDE / 2; p++)
        for (int64_t j = 0; j < n; j += 16)
            _mm512_store_si512(
                w->b[p] + j,
                chunk_pair(chunk_load(b + 2 * p * g->ldb + j, 2 * p < k ? 16 : 0),
                           chunk_load(b + (2 * p + 1) * g->ldb + j, 2 * p + 1 < k ? 16 : 0)));
}

#ifdef __AMX_TILE__
/* 32 rows of C from row i of the operands and 32 columns from column j; of the rows `m` are there. */
static inline void chunk_product(chunk_operands *w, float *c, int64_t ldc, int64_t i, int64_t m,
                                 int64_t j, int64_t k, bool add)
{
    const bool whole = m >= CHUNK_STEP;
    float *to = whole ? c : w->c[0];
    const int64_t ld = whole ? ldc : CHUNK_STEP, pitch = ld * (int64_t)sizeof *to;
    for (int64_t r = 0; !whole && add && r < m; r++)
        memcpy(w->c[r], c + r * ldc, sizeof w->c[r]);
    if (add) {
        _tile_loadd(0, to, pitch);
        _tile_loadd(1, to + 16, pitch);
        _tile_loadd(2, to + 16 * ld, pitch);
        _tile_loadd(3, to + 16 * ld + 16, pitch);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t p = 0; p < k; p += 32) {
        _tile_loadd(4, w->a[i] + p, sizeof w->a[0]);
        _tile_loadd(6, w->b[p / 2] + j, sizeof w->b[0]);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, w->b[p / 2] + j + 16, sizeof w->b[0]);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, w->a[i + 16] + p, sizeof w->a[0]);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, to, pitch);
    _tile_stored(1, to + 16, pitch);
    _tile_stored(2, to + 16 * ld, pitch);
    _tile_stored(3, to + 16 * ld + 16, pitch);
    for (int64_t r = 0; !whole && r < m; r++)
        memcpy(c + r * ldc, w->c[r], sizeof w->c[r]);
}
#else
/* `rows` (constant) rows of C from row i of the operands and 32 columns from column j. */
LM_INLINE void chunk_rows(const chunk_operands *w, float *c, int64_t ldc, const int rows, int64_t i,
                          int64_t j, int64_t k, bool add)
{
    __m512 x[12], y[12];
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) {
        x[r] = add ? _mm512_loadu_ps(c + r * ldc) : _mm512_setzero_ps();
        y[r] = add ? _mm512_loadu_ps(c + r * ldc + 16) : _mm512_setzero_ps();
    }
    for (int64_t p = 0; 2 * p < k; p++) {
        __m512bh b0 = (__m512bh)_mm512_load_si512(w->b[p] + j);
        __m512bh b1 = (__m512bh)_mm512_load_si512(w->b[p] + j + 16);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            int32_t pair;
            memcpy(&pair, w->a[i + r] + 2 * p, sizeof pair);
            __m512bh a = (__m512bh)_mm512_set1_epi32(pair);
            x[r] = _mm512_dpbf16_ps(x[r], a, b0);
            y[r] = _mm512_dpbf16_ps(y[r], a, b1);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) {
        _mm512_storeu_ps(c + r * ldc, x[r]);
        _mm512_storeu_ps(c + r * ldc + 16, y[r]);
    }
}

static inline void chunk_product(const chunk_operands *w, float *c, int64_t ldc, int64_t i,
                                 int64_t m, int64_t j, int64_t k, bool add)
{
    int64_t r = 0, most = m < CHUNK_STEP ? m : CHUNK_STEP;
    for (; r + 12 <= most; r += 12)
        chunk_rows(w, c + r * ldc, ldc, 12, i + r, j, k, add);
    for (; r + 4 <= most; r += 4)
        chunk_rows(w, c + r * ldc, ldc, 4, i + r, j, k, add);
    for (; r < most; r++)
        chunk_rows(w, c + r * ldc, ldc, 1, i + r, j, k, add);
}
#endif

/* C (+)= A B as mm, of numbers rounded to BF16: n is a multiple of 32. */
static inline void mm_pairs(const mm_args *g)
{
    chunk_operands w;
    for (int64_t j0 = 0; j0 < g->n; j0 += CHUNK_SIDE)
        for (int64_t p0 = 0; p0 < g->k; p0 += CHUNK_SIDE) {
            const int64_t n = g->n - j0 < CHUNK_SIDE ? g->n - j0 : CHUNK_SIDE;
            const int64_t k = g->k - p0 < CHUNK_SIDE ? g->k - p0 : CHUNK_SIDE;
            chunk_pack_b(&w, g, j0, n, p0, k);
            for (int64_t i0 = 0; i0 < g->m; i0 += CHUNK_SIDE) {
                const int64_t m = g->m - i0 < CHUNK_SIDE ? g->m - i0 : CHUNK_SIDE;
                chunk_pack_a(&w, g, i0, m, p0, k);
                for (int64_t i = 0; i < m; i += CHUNK_STEP)
                    for (int64_t j = 0; j < n; j += CHUNK_STEP)
                        chunk_product(&w, g->c + (i0 + i) * g->ldc + j0 + j, g->ldc, i, m - i, j, k,
                                      g->add || p0 > 0);
            }
        }
}

#endif
