/* SPDX-License-Identifier: Apache-2.0 */
/* gemm_bf16.c -- BF16 products by dot products of pairs on vectors (AVX512-BF16): twice the
 * products of an FMA in F32.
 *
 * 14 x 32 of C in 28 registers; packing and the order of panels are those of AMX (gemm_pairs.h),
 * with 14 rows in a panel of op(A): its pairs are broadcast from their rows. */
#include <string.h>

#include "kernels/cpu/gemm_pairs.h"
#include "kernels/cpu/gemm_panels.h"
#include "kernels/cpu/gemm_vec.h"

enum { MR = 14, NR = LM_PANEL };

static void pack_a(const lm_gemm *g, int64_t i, int64_t k0, int64_t kn, void *dst)
{
    const uint16_t *a = g->a;

    if (g->ta)
        pack_few_rows_t(a + k0 * g->lda + i, g->lda, g->m - i, MR, kn, dst);
    else
        pack_rows(a + i * g->lda + k0, g->lda, g->m - i, MR, kn, dst);
}

static void sum_a(const void *panel, int64_t kn, int rows, float *sum)
{
    sum_rows(panel, kn, MR, 0, rows, sum);
}

/* R rows of one or two vectors, and as many pairs of depth as count: the last rows of a product, and those of
 * low rank, would else take as long as full panels. */
VINLINE void tile(const lm_gemm_step *s, const int R, const int vectors)
{
    const char *a = s->a, *b = s->b;
    lm_gemm_ahead ahead = s->ahead;
    int64_t steps = s->kn / PAIRS_DEPTH, lines = lm_ceil_div(ahead.lines, 4 * steps);
    vec acc[MR][2];

#pragma GCC unroll 14
    for (int r = 0; r < R; r++) {
        acc[r][0] = s->load ? vload(s->tile + r * NR) : vzero();
        if (vectors > 1)
            acc[r][1] = s->load ? vload(s->tile + r * NR + VW) : vzero();
    }
    for (int64_t i = 0; i < steps; i++, a += MR * 64, b += 2 * PAIRS_TILE) {
        int64_t pairs = lm_ceil_div(s->depth - i * PAIRS_DEPTH, 2);
        for (int64_t k = 0; k < (pairs < 16 ? pairs : 16); k++) {
            __m512bh b0 = (__m512bh)_mm512_load_si512(b + k * 64), b1 = b0;
            if (vectors > 1)
                b1 = (__m512bh)_mm512_load_si512(b + PAIRS_TILE + k * 64);
            if (k < R)
                _mm_prefetch(a + (2 * MR + k) * 64, _MM_HINT_T0);
#pragma GCC unroll 14
            for (int r = 0; r < R; r++) {
                int32_t pair;
                memcpy(&pair, a + r * 64 + k * 4, 4);
                __m512bh x = (__m512bh)_mm512_set1_epi32(pair);
                acc[r][0] = _mm512_dpbf16_ps(acc[r][0], x, b0);
                if (vectors > 1)
                    acc[r][1] = _mm512_dpbf16_ps(acc[r][1], x, b1);
            }
            if ((k & 3) == 0)
                lm_gemm_prefetch(&ahead, lines);
        }
    }
#pragma GCC unroll 14
    for (int r = 0; r < R; r++) {
        vstore(s->tile + r * NR, acc[r][0]);
        if (vectors > 1)
            vstore(s->tile + r * NR + VW, acc[r][1]);
    }
}

static void micro(const lm_gemm_step *s)
{
    bool wide = s->cols > VW;

    if (s->rows > 8)
        wide ? tile(s, MR, 2) : tile(s, MR, 1);
    else if (s->rows > 4)
        wide ? tile(s, 8, 2) : tile(s, 8, 1);
    else
        wide ? tile(s, 4, 2) : tile(s, 4, 1);
}

static void end(void)
{
    _mm_sfence();
}

const lm_gemm_impl *lm_gemm_impl_bf16(lm_dtype ab)
{
    static const lm_gemm_impl impl = {
        .mr = MR,
        .nr = NR,
        .kr = PAIRS_DEPTH,
        .esize = 2,
        .kc = 512,
        .l2_bytes = 1 << 19,
        .pc = 2048,
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
