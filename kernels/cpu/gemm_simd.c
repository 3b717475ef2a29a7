/* SPDX-License-Identifier: Apache-2.0 */
/* gemm_simd.c -- F32 products on vector registers, and BF16 ones converted to F32 while packing;
 * compiled once for AVX2 and once for AVX-512.
 *
 * AVX-512: 14 x 32 of C in 28 registers; AVX2: 6 x 16 in 12.  A panel of B holds nr numbers for
 * each index of depth, a panel of A mr numbers. */
#include "kernels/cpu/gemm.h"
#include "kernels/cpu/gemm_vec.h"

enum {
    MR = VMR,
    NR = 2 * VW,
    AHEAD =
        2048 /* bytes between the rows of B that few rows of A are multiplied with and their prefetch */
};

/* A panel of `wide` <= width rows for each depth, from storage [depth, .]: contiguous. */
static inline __attribute__((always_inline)) void
pack_straight(const char *p, bool bf, int64_t ld, int64_t valid, int width, int64_t kn, float *dst)
{
    int64_t size = bf ? 2 : 4;

    for (int64_t k = 0; k < kn; k++, dst += width)
        for (int w = 0; w < width; w += VW)
            vstore_n(dst + w, vload_n(p + (k * ld + w) * size, bf, valid - w), width - w);
}

/* The same from storage [., depth]: square blocks are transposed. */
static inline __attribute__((always_inline)) void
pack_turned(const char *p, bool bf, int64_t ld, int64_t valid, int width, int64_t kn, float *dst)
{
    int64_t size = bf ? 2 : 4;

    for (int64_t k = 0; k < kn; k += VW) {
        int64_t deep = kn - k < VW ? kn - k : VW;
        for (int w = 0; w < width; w += VW) {
            vec v[VW];
#pragma GCC unroll 16
            for (int i = 0; i < VW; i++) {
                v[i] = vzero();
                if (w + i < valid && w + i < width)
                    v[i] = vload_n(p + ((w + i) * ld + k) * size, bf, deep);
            }
            vturn(v);
            for (int64_t i = 0; i < deep; i++)
                vstore_n(dst + (k + i) * width + w, v[i], width - w);
        }
    }
}

#define PACK(name, bf, operand, ld, rows, straight, width)                                      \
    static void name(const lm_gemm *g, int64_t i, int64_t k0, int64_t kn, void *dst)            \
    {                                                                                           \
        const char *p = g->operand;                                                             \
        int64_t size = bf ? 2 : 4;                                                              \
        if (straight)                                                                           \
            pack_straight(p + (k0 * g->ld + i) * size, bf, g->ld, g->rows - i, width, kn, dst); \
        else                                                                                    \
            pack_turned(p + (i * g->ld + k0) * size, bf, g->ld, g->rows - i, width, kn, dst);   \
    }
PACK(pack_a_f32, false, a, lda, m, g->ta, MR)
PACK(pack_a_bf16, true, a, lda, m, g->ta, MR)
PACK(pack_b_f32, false, b, ldb, n, !g->tb, NR)
PACK(pack_b_bf16, true, b, ldb, n, !g->tb, NR)

static void sum_a(const void *panel, int64_t kn, int rows, float *sum)
{
    const float *p = panel;
    float part[4 * VW] = { 0 };

    for (int w = 0; w < MR; w += VW) {
        vec acc[4] = { vzero(), vzero(), vzero(), vzero() };
        int64_t k = 0;
        for (; k + 4 <= kn; k += 4)
#pragma GCC unroll 4
            for (int q = 0; q < 4; q++)
                acc[q] = vadd(acc[q], vload_n(p + (k + q) * MR + w, false, MR - w));
        for (; k < kn; k++)
            acc[0] = vadd(acc[0], vload_n(p + k * MR + w, false, MR - w));
        vstore(part + w, vadd(vadd(acc[0], acc[1]), vadd(acc[2], acc[3])));
    }
    for (int r = 0; r < rows; r++)
        sum[r] += part[r];
}

static void micro(const lm_gemm_step *s)
{
    const float *a = s->a, *b = s->b;
    lm_gemm_ahead ahead = s->ahead;
    /* Lines of the next panel of B spread over the depth, in units of 4 steps. */
    int64_t lines = lm_ceil_div(ahead.lines * 4, s->kn);
    vec acc[MR][2];

#pragma GCC unroll 14
    for (int r = 0; r < MR; r++) {
        acc[r][0] = s->load ? vload(s->tile + r * NR) : vzero();
        acc[r][1] = s->load ? vload(s->tile + r * NR + VW) : vzero();
    }
    for (int64_t k = 0; k < s->kn; k++, a += MR, b += NR) {
        vec b0 = vload(b), b1 = vload(b + VW);
        _mm_prefetch((const char *)(a + 16 * MR), _MM_HINT_T0);
#pragma GCC unroll 14
        for (int r = 0; r < MR; r++) {
            vec x = vset1(a[r]);
            acc[r][0] = vfma(x, b0, acc[r][0]);
            acc[r][1] = vfma(x, b1, acc[r][1]);
        }
        if ((k & 3) == 0)
            lm_gemm_prefetch(&ahead, lines);
    }
#pragma GCC unroll 14
    for (int r = 0; r < MR; r++) {
        vstore(s->tile + r * NR, acc[r][0]);
        vstore(s->tile + r * NR + VW, acc[r][1]);
    }
}

/* One vector of a finished tile, with the operands added to it. */
static inline vec finished(const lm_gemm_tail *t, int r, int c)
{
    vec v = vload_n(t->tile + (int64_t)r * t->nr + c, false, t->nr - c);

    if (t->bias)
        v = vadd(v, vload_n(t->bias + c, false, t->cols - c));
    return v;
}

static void finish_f32(const lm_gemm_tail *t)
{
    bool stream = t->stream && ((uintptr_t)t->c & 63) == 0 && t->ldc % 16 == 0;

    for (int r = 0; r < t->rows; r++) {
        float *c = (float *)t->c + r * t->ldc;
        for (int j = 0; j < t->cols; j += VW) {
            vec v = finished(t, r, j);
            if (t->accumulate)
                v = vadd(v, vload_n(c + j, false, t->cols - j));
            if (stream && j + VW <= t->cols)
                vstream(c + j, v);
            else
                vstore_n(c + j, v, t->cols - j);
        }
    }
}

static void finish_bf16(const lm_gemm_tail *t)
{
    bool stream = t->stream && ((uintptr_t)t->c & 63) == 0 && t->ldc % 32 == 0;

    for (int r = 0; r < t->rows; r++) {
        uint16_t *c = (uint16_t *)t->c + r * t->ldc;
        for (int j = 0; j < t->cols; j += 2 * VW) {
            vec v = finished(t, r, j), w = vzero();
            if (j + VW < t->cols)
                w = finished(t, r, j + VW);
            if (t->accumulate) {
                v = vadd(v, vload_n(c + j, true, t->cols - j));
                w = vadd(w, vload_n(c + j + VW, true, t->cols - j - VW));
            }
            if (stream && j + 2 * VW <= t->cols) {
                vstream_bf16(c + j, v, w);
            } else {
                vstore_bf16_n(c + j, v, t->cols - j);
                vstore_bf16_n(c + j + VW, w, t->cols - j - VW);
            }
        }
    }
}

/* J rows of B against all rows of A, which they share the loads of; M is at most 8.  Half of the rows
 * begin at j, the others `apart` rows below: two streams keep more reads in flight than one, and each is
 * prefetched in the order in which it lies. */
static inline __attribute__((always_inline)) void
small_rows(const lm_gemm *g, const int M, const int J, const bool bf, int64_t j, int64_t apart)
{
    const int streams = J > 1 ? 2 : 1, each = J / streams, size = bf ? 2 : 4;
    const char *a = g->a, *b = (const char *)g->b + j * g->ldb * size;
    int64_t at[4], k = 0, ahead = AHEAD;
    vec acc[8][4];

#pragma GCC unroll 4
    for (int q = 0; q < J; q++)
        at[q] = (q / each * apart + q % each) * g->ldb * size;
#pragma GCC unroll 8
    for (int i = 0; i < M; i++)
#pragma GCC unroll 4
        for (int q = 0; q < J; q++)
            acc[i][q] = vzero();
    for (; k < g->k; k += 2 * VW) {
#pragma GCC unroll 4
        for (int64_t line = 0; line < each * 2 * VW * size; line += 64, ahead += 64)
#pragma GCC unroll 2
            for (int q = 0; q < J; q += each)
                _mm_prefetch(b + at[q] + ahead, _MM_HINT_T0);
#pragma GCC unroll 2
        for (int64_t h = 0; h < 2 * VW; h += VW) {
            vec w[4];
            if (k + h >= g->k)
                break;
#pragma GCC unroll 4
            for (int q = 0; q < J; q++)
                w[q] = vload_n(b + at[q] + (k + h) * size, bf, g->k - k - h);
#pragma GCC unroll 8
            for (int i = 0; i < M; i++) {
                vec x = vload_n(a + (i * g->lda + k + h) * size, bf, g->k - k - h);
#pragma GCC unroll 4
                for (int q = 0; q < J; q++)
                    acc[i][q] = vfma(x, w[q], acc[i][q]);
            }
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < M; i++)
#pragma GCC unroll 4
        for (int q = 0; q < J; q++)
            lm_gemm_put(g, i, j + q / each * apart + q % each, vsum(acc[i][q]));
}

static inline __attribute__((always_inline)) void
small_range(const lm_gemm *g, const int M, const int J, const bool bf, int64_t j0, int64_t j1)
{
    const int each = J > 1 ? J / 2 : 1;
    int64_t apart = (j1 - j0) / J * each, j = j0; /* whole groups of J rows; the others follow */

    for (; j + each <= j0 + apart; j += each)
        small_rows(g, M, J, bf, j, apart);
    for (j = j0 + (j1 - j0) / J * J; j < j1; j++)
        small_rows(g, M, 1, bf, j, 0);
}

#define SMALL(name, bf)                                        \
    static void name(const lm_gemm *g, int64_t j0, int64_t j1) \
    {                                                          \
        switch (g->m) {                                        \
        case 1:                                                \
            small_range(g, 1, 4, bf, j0, j1);                  \
            break;                                             \
        case 2:                                                \
            small_range(g, 2, 4, bf, j0, j1);                  \
            break;                                             \
        case 3:                                                \
            small_range(g, 3, SMALL_J, bf, j0, j1);            \
            break;                                             \
        case 4:                                                \
            small_range(g, 4, SMALL_J, bf, j0, j1);            \
            break;                                             \
        case 5:                                                \
            small_range(g, 5, SMALL_J / 2, bf, j0, j1);        \
            break;                                             \
        case 6:                                                \
            small_range(g, 6, SMALL_J / 2, bf, j0, j1);        \
            break;                                             \
        case 7:                                                \
            small_range(g, 7, SMALL_J / 2, bf, j0, j1);        \
            break;                                             \
        default:                                               \
            small_range(g, 8, SMALL_J / 2, bf, j0, j1);        \
        }                                                      \
    }
SMALL(small_f32, false)
SMALL(small_bf16, true)

static void end(void)
{
    _mm_sfence();
}

#define LEVEL_PASTE(name, level) name##_##level
#define LEVEL_NAME(name, level)  LEVEL_PASTE(name, level)

static void finish(const lm_gemm_tail *t)
{
    if (t->cd == LM_DTYPE_F32)
        finish_f32(t);
    else
        finish_bf16(t);
}

#define SHAPE                                                                            \
    .mr = MR, .nr = NR, .kr = 1, .esize = 4, .kc = VKC, .l2_bytes = 1 << 20, .pc = 2048, \
    .sum_a = sum_a, .micro = micro, .finish = finish, .end = end,                        \
    .coder = &LEVEL_NAME(lm_code_rows, LM_SIMD), .sums = &LEVEL_NAME(lm_code_rows_sums, LM_SIMD)

const lm_gemm_impl *LEVEL_NAME(lm_gemm_impl, LM_SIMD)(lm_dtype ab)
{
    static const lm_gemm_impl f32 = { SHAPE, .pack_a = pack_a_f32, .pack_b = pack_b_f32,
                                      .small_m = small_f32 };
    static const lm_gemm_impl bf16 = { SHAPE, .pack_a = pack_a_bf16, .pack_b = pack_b_bf16,
                                       .small_m = small_bf16 };

    return ab == LM_DTYPE_BF16 ? &bf16 : &f32;
}

#ifdef __AVX512F__
void lm_gemm_finish_avx512(const lm_gemm_tail *t)
{
    finish(t);
}

void lm_gemm_small_bf16_avx512(const lm_gemm *g, int64_t j0, int64_t j1)
{
    small_bf16(g, j0, j1);
}
#endif
