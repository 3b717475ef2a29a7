/* SPDX-License-Identifier: Apache-2.0 */
/* attention_pairs.h -- what the BF16 attention kernels on vectors are made of: products by dot
 * products of pairs (AVX512-BF16), and the packing of their operands.
 *
 * C[rows][16 columns] (+)= A B over a depth of pairs of BF16 numbers, sums in F32.  A 64-byte row
 * of an operand is 16 pairs:
 *   A  for each 32 of depth all rows, each with its 16 pairs, of which one at a time is broadcast
 *   B  for each pair the two numbers of 16 columns (half a panel of gemm_pairs.h)
 * Any range of rows, of 16 columns and of pairs of packed operands can be multiplied, so that
 * documents and the diagonal bound the work to 8 keys and 16 queries.  Each element is summed over
 * its pairs in order, whatever the rows beside it. */
#ifndef LM_KERNELS_CPU_ATTENTION_PAIRS_H
#define LM_KERNELS_CPU_ATTENTION_PAIRS_H

#include <math.h>
#include <string.h>

#include "kernels/cpu/attention_jobs.h"
#include "kernels/cpu/gemm_pairs.h"
#include "kernels/cpu/vmath.h"

enum {
    LANES = 16,           /* queries of a group, columns of C */
    KEYS = 64,            /* of a block */
    UNIT = 8,             /* ranges of rows are multiples of it */
    MOST_ROWS = 24,       /* of C in registers */
    ROW = 32,             /* numbers in 64 bytes of an operand */
    HALF = PAIRS_TILE / 2 /* numbers in 16 pairs of depth of 16 columns */
};

typedef struct {
    const uint16_t *a, *b;
    int64_t a_step, b_step; /* numbers from 16 pairs of depth to the next */
    float *c;
    int64_t ldc;
    int64_t from, to;   /* pairs */
    bool add;           /* c += instead of c = */
    const float *start; /* NULL, or start[-r] to start[15 - r] are added to row r of C */
} pair_product;

static inline int64_t up_to(int64_t n, int64_t unit)
{
    return (n + unit - 1) / unit * unit;
}

/* `rows` (constant) rows of C from row r0. */
static inline __attribute__((always_inline)) void product_rows(const pair_product *g,
                                                               const int rows, int64_t r0)
{
    __m512 sum[MOST_ROWS];
    float *c = g->c + r0 * g->ldc;
#pragma GCC unroll 24
    for (int r = 0; r < rows; r++) {
        if (g->start)
            sum[r] = _mm512_loadu_ps(g->start - r0 - r);
        else
            sum[r] = g->add ? _mm512_load_ps(c + r * g->ldc) : _mm512_setzero_ps();
    }
    for (int64_t p = g->from, n; p < g->to; p += n) {
        const uint16_t *a = g->a + p / 16 * g->a_step + r0 * ROW + p % 16 * 2;
        const uint16_t *b = g->b + p / 16 * g->b_step + p % 16 * ROW;
        n = 16 - p % 16 < g->to - p ? 16 - p % 16 : g->to - p;
        for (int64_t k = 0; k < n; k++, a += 2, b += ROW) {
            __m512bh y = (__m512bh)_mm512_load_si512(b);
#pragma GCC unroll 24
            for (int r = 0; r < rows; r++) {
                int32_t pair;
                memcpy(&pair, a + r * ROW, sizeof pair);
                sum[r] = _mm512_dpbf16_ps(sum[r], (__m512bh)_mm512_set1_epi32(pair), y);
            }
        }
    }
#pragma GCC unroll 24
    for (int r = 0; r < rows; r++)
        _mm512_store_ps(c + r * g->ldc, sum[r]);
}

static __attribute__((noinline)) void product_24(const pair_product *g, int64_t r0)
{
    product_rows(g, 24, r0);
}

static __attribute__((noinline)) void product_16(const pair_product *g, int64_t r0)
{
    product_rows(g, 16, r0);
}

static __attribute__((noinline)) void product_8(const pair_product *g, int64_t r0)
{
    product_rows(g, 8, r0);
}

/* Rows r0 .. r1-1 of C, a multiple of UNIT. */
static inline void product(const pair_product *g, int64_t r0, int64_t r1)
{
    for (; r1 - r0 >= 24; r0 += 24)
        product_24(g, r0);
    if (r1 - r0 == 16)
        product_16(g, r0);
    else if (r1 - r0 == 8)
        product_8(g, r0);
}

/* Rows at .. at+n-1 of an A operand of `height` rows, its depth the D numbers of n rows of x. */
static inline void pack_a_rows(uint16_t *to, int64_t height, int64_t at, const uint16_t *x,
                               int64_t pitch, int64_t n, int64_t D)
{
    for (int64_t d = 0; d < D; d += ROW)
        for (int64_t r = 0; r < n; r++)
            _mm512_store_si512(to + (d / ROW * height + at + r) * ROW,
                               load_up_to(x + r * pitch + d, D - d));
}

/* The same of zeros. */
static inline void clear_a_rows(uint16_t *to, int64_t height, int64_t at, int64_t n, int64_t D)
{
    for (int64_t d = 0; d < D; d += ROW)
        for (int64_t r = 0; r < n; r++)
            _mm512_store_si512(to + (d / ROW * height + at + r) * ROW, _mm512_setzero_si512());
}

/* 32 of depth of an A operand whose rows are the D columns of x (rounded up to LANES) and whose
 * depth is its rows, of which n are there; zeros behind them. */
static inline void pack_a_turned(uint16_t *to, const uint16_t *x, int64_t pitch, int64_t n,
                                 int64_t D)
{
    for (int64_t d = 0; d < D; d += LANES)
        pack_few_rows_t(x + d, pitch, D - d, LANES, n < ROW ? n : ROW, (char *)(to + d * ROW));
}

/* Two B operands, [D/32][2][16 pairs]: the columns are up to 32 rows of x, of which n are there,
 * the depth is their D numbers. */
static inline void pack_b_rows(uint16_t *to, const uint16_t *x, int64_t pitch, int64_t n, int64_t D)
{
    pack_columns_t(x, pitch, n, D, (char *)to);
}

/* Two B operands, [n/32][2][16 pairs]: the columns are up to 32 columns of x, the depth is its n
 * rows. */
static inline void pack_b_columns(uint16_t *to, const uint16_t *x, int64_t pitch, int64_t n,
                                  int64_t columns)
{
    pack_columns(x, pitch, columns, n, (char *)to);
}

/* Sums with queries in lanes, [D][16], times `by` (of each query), into rows first .. last-1 of
 * `to`. */
static inline void store_turned(const float *sum, __m512 by, uint16_t *to, int64_t pitch,
                                int64_t first, int64_t last, int64_t D)
{
    for (int64_t d = 0; d < D; d += 32) {
        __m512i a[16], b[16];
        const float *x = sum + d * LANES, *y = D - d > 16 ? x + 16 * LANES : x;
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) {
            a[i] = _mm512_castps_si512(_mm512_mul_ps(_mm512_load_ps(x + i * LANES), by));
            b[i] = _mm512_castps_si512(_mm512_mul_ps(_mm512_load_ps(y + i * LANES), by));
        }
        transpose_16x16(a);
        transpose_16x16(b);
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++)
            if (i >= first && i < last)
                _mm512_mask_storeu_epi16(to + i * pitch + d, mask32(D - d),
                                         (__m512i)_mm512_cvtne2ps_pbh(_mm512_castsi512_ps(b[i]),
                                                                      _mm512_castsi512_ps(a[i])));
    }
}

/* Of two keys' numbers of 16 queries (the halves of x), the pairs of each query. */
static inline __m512i weave(__m512i x)
{
    static const uint16_t order[32]
        __attribute__((aligned(64))) = { 0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                         21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                         11, 27, 12, 28, 13, 29, 14, 30, 15, 31 };
    return _mm512_permutexvar_epi16(_mm512_load_si512(order), x);
}

/* Which of 16 queries see key j, of the keys that each sees. */
static inline __mmask16 seers(int64_t j, __m512i start, __m512i end)
{
    __m512i key = _mm512_set1_epi32((int)j);
    return _mm512_cmpge_epi32_mask(key, start) & _mm512_cmplt_epi32_mask(key, end);
}

/* The part of a block of keys that a group of queries sees, in rows of the block. */
typedef struct {
    int64_t r0, r1;
    bool masked; /* not by all of the group */
} key_range;

/* Of the keys of the block at j0 that a group of queries sees otherwise, which of them are in blocks that they see: bits into
 * seen.  False if there are no such keys. */
static inline bool open_keys(const attn_mask *m, int64_t h, int64_t i0, int64_t rows, int64_t j0,
                             key_range *k, uint32_t seen[KEYS])
{
    int64_t there = rows - i0 < LANES ? rows - i0 : LANES;
    attn_share share = attn_seen(m, h, i0, there, j0, KEYS, seen);
    if (share == ATTN_NONE)
        k->r0 = k->r1 = 0;
    k->masked |= share != ATTN_ALL;
    return share != ATTN_NONE;
}

/* For which of 16 queries dropout keeps key r of the block; bits of attn_kept_queries. */
static inline __mmask16 keepers(uint32_t kept[KEYS / 32][LANES], int64_t r)
{
    return _mm512_test_epi32_mask(_mm512_load_si512(kept[r / 32]),
                                  _mm512_set1_epi32((int)(UINT32_C(1) << r % 32)));
}

/* Of the block at j0 those of the keys [lo, hi). */
static inline key_range range_of(const attn_span *s, int64_t lo, int64_t hi, int64_t j0)
{
    key_range k = { .r0 = (s->lo > lo ? s->lo : lo) - j0, .r1 = (s->hi < hi ? s->hi : hi) - j0 };
    k.r0 = k.r0 < 0 ? 0 : k.r0 / UNIT * UNIT;
    k.r1 = k.r1 > KEYS ? KEYS : up_to(k.r1, UNIT);
    k.masked = j0 + k.r0 < s->full_lo || j0 + k.r1 > s->full_hi;
    return k;
}

/* What queries i0 .. i0+15 see, of which those before `rows` are there; what each of them sees
 * alone into start and end. */
static inline attn_span group_span(const attn_mask *m, int64_t i0, int64_t rows,
                                   int32_t start[LANES], int32_t end[LANES])
{
    attn_span s = { 0 };
    int64_t last = i0 + LANES < rows ? i0 + LANES : rows;
    for (int64_t i = i0; i < i0 + LANES; i++) {
        start[i - i0] = i < rows ? (int32_t)attn_start(m, i) : INT32_MAX;
        end[i - i0] = i < rows ? (int32_t)attn_end(m, i) : 0;
    }
    if (i0 < rows)
        s = attn_span_of(m, i0, last);
    if (last < i0 + LANES)
        s.full_lo = INT64_MAX;
    return s;
}

void lm_attention_dx_bf16(const lm_call *c);
size_t lm_attention_dx_bf16_work(const lm_call *c, int threads);

#endif
