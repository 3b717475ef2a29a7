/* SPDX-License-Identifier: Apache-2.0 */
/* gemm_amx.c -- BF16 products on AMX tiles.
 *
 * A panel of A is, for each 32 of depth, two tiles of 16 rows x 32 numbers; a panel of B two tiles
 * of 16 pairs of depth x 16 columns (the pair interleaved).  Four accumulators of 16 x 16 cover 32
 * x 32 of C: one tile load for each multiplication.  B stays in L1; A comes from L2 with the
 * streaming load, which keeps it from pushing B out.  The four loads of a step stand before its multiplications: in
 * turn with these they take 3 to 12 % more time, most of it where another program uses the other half of the core. */
#include <immintrin.h>

#include "kernels/cpu/gemm.h"
#include "kernels/cpu/gemm_pairs.h"
#include "kernels/cpu/gemm_panels.h"
#include "kernels/cpu/gemm_vec.h"

/* Of a tile pair of op(A) and of a panel of op(B). */
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
    bool whole = s->rows > 16; /* the last panel of few rows may have one tile of them */

    if (s->load) {
        _tile_loadd(0, c, 128);
        _tile_loadd(1, c + 16, 128);
        if (whole) {
            _tile_loadd(2, c + 512, 128);
            _tile_loadd(3, c + 528, 128);
        }
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t i = 0; i < steps; i++, a += 2 * TILE, b += 2 * TILE) {
        _tile_stream_loadd(4, a, 64);
        _tile_loadd(6, b, 64);
        _tile_loadd(7, b + TILE, 64);
        if (whole)
            _tile_stream_loadd(5, a + TILE, 64);
        lm_gemm_prefetch(&ahead, lines);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (whole) {
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        for (int q = 0; q < per_step && row < rows; q++)
            store_row(t, row++);
    }
    _tile_stored(0, c, 128);
    _tile_stored(1, c + 16, 128);
    if (whole) {
        _tile_stored(2, c + 512, 128);
        _tile_stored(3, c + 528, 128);
    }
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
