/* SPDX-License-Identifier: Apache-2.0 */
/* gemm_panels.h -- op(B) of BF16 products whose panels are those of kernels/panels.h (gemm_amx.c, gemm_bf16.c): panels
 * of its storage, turned panels of its transpose, and the rows of a panel.  All panels are 64-byte aligned. */
#ifndef LM_KERNELS_CPU_GEMM_PANELS_H
#define LM_KERNELS_CPU_GEMM_PANELS_H

#include "kernels/cpu/gemm_pairs.h"

/* 8 rows of 8 pairs of dwords, whose 16-bit halves change places as a 2 x 2 matrix: transposed. */
static inline void turn_8x8(const char *src, char *dst)
{
    const __m512i halves =
        _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
    __m512i r[8], t[8];

#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
        r[i] = _mm512_shuffle_epi8(_mm512_load_si512(src + i * 64), halves);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        t[2 * i] = _mm512_unpacklo_epi64(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi64(r[2 * i], r[2 * i + 1]);
    }
    /* t[2i+c] lane l: rows 2i and 2i+1 of column 2l+c */
#pragma GCC unroll 2
    for (int c = 0; c < 2; c++) {
        __m512i a = _mm512_shuffle_i32x4(t[c], t[2 + c], 0x88);
        __m512i b = _mm512_shuffle_i32x4(t[4 + c], t[6 + c], 0x88);
        __m512i d = _mm512_shuffle_i32x4(t[c], t[2 + c], 0xdd);
        __m512i e = _mm512_shuffle_i32x4(t[4 + c], t[6 + c], 0xdd);
        _mm512_store_si512(dst + (0 + c) * 64, _mm512_shuffle_i32x4(a, b, 0x88));
        _mm512_store_si512(dst + (4 + c) * 64, _mm512_shuffle_i32x4(a, b, 0xdd));
        _mm512_store_si512(dst + (2 + c) * 64, _mm512_shuffle_i32x4(d, e, 0x88));
        _mm512_store_si512(dst + (6 + c) * 64, _mm512_shuffle_i32x4(d, e, 0xdd));
    }
}

/* op(B) stored as the panels of its transpose: those of `ld` numbers deep lie behind each other, and
 * each 32 x 32 block of a panel is turned. */
static inline void pack_turned(const char *p, int64_t ld, int64_t kn, char *dst)
{
    for (int64_t k = 0; k < kn; k += PAIRS_DEPTH, dst += 2 * PAIRS_TILE, p += ld * LM_PANEL * 2)
        for (int h = 0; h < 2; h++)
            for (int t = 0; t < 2; t++)
                turn_8x8(p + h * PAIRS_TILE + t * 512, dst + t * PAIRS_TILE + h * 512);
}

/* The inverse of pack_columns_t: transposing twice is the identity. */
static inline void rows_b(const void *panel, int64_t k, void *dst)
{
    const char *src = panel;

    for (int64_t q = 0; q < k; q += PAIRS_DEPTH)
        for (int64_t h = 0; h < 2; h++, src += PAIRS_TILE) {
            __m512i v[16];
#pragma GCC unroll 16
            for (int i = 0; i < 16; i++)
                v[i] = _mm512_load_si512(src + i * 64);
            transpose_16x16(v);
#pragma GCC unroll 16
            for (int i = 0; i < 16; i++)
                _mm512_storeu_si512((uint16_t *)dst + (16 * h + i) * k + q, v[i]);
        }
}

static inline void pack_b(const lm_gemm *g, int64_t j, int64_t k0, int64_t kn, void *dst)
{
    const uint16_t *b = g->b;

    if (g->b_turned)
        pack_turned((const char *)g->b_turned + (k0 * g->ldb + j * LM_PANEL) * 2, g->ldb, kn, dst);
    else if (g->tb)
        pack_columns_t(b + j * g->ldb + k0, g->ldb, g->n - j, kn, dst);
    else
        pack_columns(b + k0 * g->ldb + j, g->ldb, g->n - j, kn, dst);
}

#endif
