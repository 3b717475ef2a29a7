/* SPDX-License-Identifier: Apache-2.0 */
/* gemm_amx.c -- BF16 products on AMX tiles.
 *
 * A panel of A is, for each 32 of depth, two tiles of 16 rows x 32 numbers; a panel of B two tiles
 * of 16 pairs of depth x 16 columns (the pair interleaved).  Four accumulators of 16 x 16 cover 32
 * x 32 of C: one tile load for each multiplication.  B stays in L1; A comes from L2 with the
 * streaming load, which keeps it from pushing B out. */
#include <immintrin.h>

#include "kernels/cpu/gemm.h"
#include "kernels/cpu/gemm_pairs.h"
#include "kernels/cpu/gemm_vec.h"

/* Of a tile pair of op(A) and of a panel of op(B); panels of op(B) stored [n,k] are those of kernels/panels.h. */
enum { R = LM_PANEL, DEPTH = PAIRS_DEPTH, TILE = PAIRS_TILE };

/* A constant object: with GCC 12 the stores into a local one may vanish before _tile_loadconfig. */
static const struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t column_bytes[16];
    uint8_t rows[16];
} config __attribute__((aligned(64))) = {
    .palette = 1,
    .column_bytes = { 64, 64, 64, 64, 64, 64, 64, 64 },
    .rows = { 16, 16, 16, 16, 16, 16, 16, 16 },
};

/* Configured for each range of work and released after it: other code may use other shapes, and a
 * context switch of a thread with tiles in use saves 8 KiB more. */
static void begin(void)
{
    _tile_loadconfig(&config);
}

static void end(void)
{
    _tile_release();
    _mm_sfence();
}

/* op(A) stored [k,m]: pairs of depth, then a transposition of 32-bit elements. */
static void pack_rows_t(const uint16_t *p, int64_t ld, int64_t rows, int64_t kn, char *dst)
{
    for (int64_t k = 0; k < kn; k += DEPTH, dst += 2 * TILE) {
        __m512i lo[16], hi[16];
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++)
            load_pairs(p, ld, k + 2 * i, kn, rows, &lo[i], &hi[i]);
        transpose_16x16(lo);
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++)
            _mm512_store_si512(dst + (i / 4 * 8 + i % 4) * 64, lo[i]);
        transpose_16x16(hi);
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++)
            _mm512_store_si512(dst + (i / 4 * 8 + 4 + i % 4) * 64, hi[i]);
    }
}

static void pack_a(const lm_gemm *g, int64_t i, int64_t k0, int64_t kn, void *dst)
{
    const uint16_t *a = g->a;

    if (g->ta)
        pack_rows_t(a + k0 * g->lda + i, g->lda, g->m - i, kn, dst);
    else
        pack_rows(a + i * g->lda + k0, g->lda, g->m - i, R, kn, dst);
}

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
static void pack_turned(const char *p, int64_t ld, int64_t kn, char *dst)
{
    for (int64_t k = 0; k < kn; k += DEPTH, dst += 2 * TILE, p += ld * R * 2)
        for (int h = 0; h < 2; h++)
            for (int t = 0; t < 2; t++)
                turn_8x8(p + h * TILE + t * 512, dst + t * TILE + h * 512);
}

/* The inverse of pack_columns_t: transposing twice is the identity. */
static void rows_b(const void *panel, int64_t k, void *dst)
{
    const char *src = panel;

    for (int64_t q = 0; q < k; q += DEPTH)
        for (int64_t h = 0; h < 2; h++, src += TILE) {
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

static void pack_b(const lm_gemm *g, int64_t j, int64_t k0, int64_t kn, void *dst)
{
    const uint16_t *b = g->b;

    if (g->b_turned)
        pack_turned((const char *)g->b_turned + (k0 * g->ldb + j * R) * 2, g->ldb, kn, dst);
    else if (g->tb)
        pack_columns_t(b + j * g->ldb + k0, g->ldb, g->n - j, kn, dst);
    else
        pack_columns(b + k0 * g->ldb + j, g->ldb, g->n - j, kn, dst);
}

static void sum_a(const void *panel, int64_t kn, int rows, float *sum)
{
    sum_rows(panel, kn, R, 0, rows, sum);
    sum_rows(panel, kn, R, 16, rows, sum);
}

/* Row r of an earlier tile, all 32 columns. */
static inline void store_row(const lm_gemm_tail *t, int r)
{
    vec v = vload(t->tile + r * R), w = vload(t->tile + r * R + 16);

    if (t->bias) {
        v = vadd(v, vload(t->bias));
        w = vadd(w, vload(t->bias + 16));
    }
    if (t->cd == LM_DTYPE_F32) {
        float *c = (float *)t->c + r * t->ldc;
        if (t->stream && ((uintptr_t)c & 63) == 0) {
            vstream(c, v);
            vstream(c + 16, w);
            return;
        }
        if (t->accumulate) {
            v = vadd(v, vload(c));
            w = vadd(w, vload(c + 16));
        }
        vstore(c, v);
        vstore(c + 16, w);
    } else {
        uint16_t *c = (uint16_t *)t->c + r * t->ldc;
        if (t->stream && ((uintptr_t)c & 63) == 0) {
            vstream_bf16(c, v, w);
            return;
        }
        if (t->accumulate) {
            v = vadd(v, vload_n(c, true, 16));
            w = vadd(w, vload_n(c + 16, true, 16));
        }
        vstore_bf16_n(c, v, 16);
        vstore_bf16_n(c + 16, w, 16);
    }
}

static void micro(const lm_gemm_step *s)
{
    const lm_gemm_tail *t = s->tail;
    int row = 0, rows = t ? t->rows : 0;
    const char *a = s->a, *b = s->b;
    lm_gemm_ahead ahead = s->ahead;
    int64_t steps = s->kn / DEPTH;
    int per_step = (int)lm_ceil_div(rows, steps);
    int64_t lines = lm_ceil_div(ahead.lines, steps);
    float *c = s->tile;

    if (s->load) {
        _tile_loadd(0, c, 128);
        _tile_loadd(1, c + 16, 128);
        _tile_loadd(2, c + 512, 128);
        _tile_loadd(3, c + 528, 128);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t i = 0; i < steps; i++, a += 2 * TILE, b += 2 * TILE) {
        _tile_stream_loadd(4, a, 64);
        _tile_loadd(6, b, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, b + TILE, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_stream_loadd(5, a + TILE, 64);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
        lm_gemm_prefetch(&ahead, lines);
        for (int q = 0; q < per_step && row < rows; q++)
            store_row(t, row++);
    }
    _tile_stored(0, c, 128);
    _tile_stored(1, c + 16, 128);
    _tile_stored(2, c + 512, 128);
    _tile_stored(3, c + 528, 128);
}

const lm_gemm_impl *lm_gemm_impl_amx(lm_dtype ab)
{
    static const lm_gemm_impl impl = {
        .mr = R,
        .nr = R,
        .kr = DEPTH,
        .esize = 2,
        .kc = 640,
        .l2_bytes = 1 << 20,
        .pc = 2048,
        .own_panels = 4, /* 256 bytes of each row of B [k,n] */
        .hide_tail = true,
        .begin = begin,
        .end = end,
        .pack_a = pack_a,
        .pack_b = pack_b,
        .sum_a = sum_a,
        .micro = micro,
        .finish = lm_gemm_finish_avx512,
        .small_m = lm_gemm_small_bf16_avx512,
        .rows_b = rows_b,
        .coder = &lm_code_rows_bf16,
        .sums = &lm_code_rows_sums_bf16,
    };

    return ab == LM_DTYPE_BF16 ? &impl : lm_gemm_impl_avx512(ab);
}
