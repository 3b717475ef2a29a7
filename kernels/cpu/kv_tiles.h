/* SPDX-License-Identifier: Apache-2.0 */
/* kv_tiles.h -- rows as whole numbers in two planes of 8 bits, for products with codes (kv_amx.c). */
#ifndef LM_KERNELS_CPU_KV_TILES_H
#define LM_KERNELS_CPU_KV_TILES_H

#include "kernels/cpu/attention_amx.h"
#include "kernels/cpu/kv_wide.h"

enum {
    KV_A = 1024,       /* bytes of a tile */
    KV_TILE_DIM = 256, /* largest head */
    KV_MOST = 16256,   /* 127 * 128: the largest whole number of two planes */
};

/* Whole numbers for the rows of a unit: planes, and for each row and group what they are a multiple of, and their sum;
 * beside them a sum of floats, which is multiplied with minima. */
typedef struct {
    int8_t *plane; /* [(rows / half)][parts][KV_A] */
    float *unit, *sum;
    int32_t *whole;        /* [rows][groups] each; of values sum and whole [rows][groups][4 runs] */
    int64_t parts, groups; /* a part is a group within 64 numbers */
    int64_t half;          /* rows of an A operand, 4 or 8: of hi, and as many of lo */
} kv_planes;

/* Rows of queries or numerators as BF16 (kv_pairs.h). */
typedef struct {
    uint16_t *row; /* [chunks][blocks of 32 numbers][chunk][32] */
    float *sum;    /* [rows][groups] of floats, for minima */
    int64_t chunk; /* rows of a tile: 8 or 16 */
} kv_rows;

/* What the next block reads: stretches of lines, which are prefetched into the second level a few at a time, all over the
 * work on this one. */
typedef struct {
    struct {
        const char *at;
        int64_t lines;
    } part[8 * (KV_BLOCK / LM_KV_TILE)];
    int64_t parts, part_now, line;
    int64_t due, rate; /* 256ths of lines: due now, more with each step */
} kv_ahead;

LM_INLINE void fetch_some(kv_ahead *a)
{
    for (a->due += a->rate; a->due >= 256 && a->part_now < a->parts; a->due -= 256) {
        _mm_prefetch(a->part[a->part_now].at + a->line * LM_KV_LINE, _MM_HINT_T1);
        if (++a->line < a->part[a->part_now].lines)
            continue;
        a->part_now++;
        a->line = 0;
    }
}

/* The unit of tiles sleeps after a pause of some 300 ns, and its next product then takes as long again: between the
 * products of a block it is kept awake by some whose results are not used (tile 1). */
LM_INLINE void stay_awake(void)
{
#ifdef KV_TILES
    _tile_dpbsud(1, 7, 3);
#endif
}

/* A part of an A operand: numbers [from, to) of the row, all of group g, within a tile's 64. */
typedef struct {
    int64_t g, from, to;
} kv_part;

/* The parts of rows of n numbers in groups of `group`, in the order of groups; returns how many. */
static inline int64_t kv_parts_of(int64_t n, int64_t group, kv_part *out)
{
    int64_t parts = 0;
    for (int64_t g = 0, at = 0; at < n; g++, at += group) {
        int64_t end = at + group < n ? at + group : n;
        for (int64_t from = at; from < end; from = from / 64 * 64 + 64) {
            int64_t to = from / 64 * 64 + 64;
            out[parts++] = (kv_part){ g, from, to < end ? to : end };
        }
    }
    return parts;
}

/* Tokens that are multiplied with the same scales, or second scales, of channels; 0: no tokens are. */
static inline int64_t kv_run_of(const lm_kv_format *f, int64_t T)
{
    if (f->axis == LM_KV_CHANNEL)
        return f->group ? f->group : T;
    return !f->second ? 0 : f->span ? f->span : T;
}

/* True if the levels of a table are whole numbers of 8 bits: 128 more are put in the place of the codes. */
static inline bool kv_is_whole(const lm_kv_format *f)
{
    bool whole = f->levels == LM_KV_TABLE && f->bits <= 4 && !f->zero;
    for (int i = 0; whole && i < f->n_table; i++)
        whole = f->table[i] >= -128 && f->table[i] <= 127 && f->table[i] == rintf(f->table[i]);
    return whole;
}

/* True if codes, or levels in their place, can be multiplied as they are. */
static inline bool kv_has_tiles(const lm_kv_format *f, int64_t T, int64_t D)
{
    if (!f || f->outliers || D > KV_TILE_DIM ||
        (f->levels != LM_KV_SYM && f->levels != LM_KV_ASYM && !kv_is_whole(f)))
        return false;
    int64_t run = kv_run_of(f, T), unit = f->values ? 64 : LM_KV_TILE;
    return T % unit == 0 && run % unit == 0 &&
           (run == 0 || KV_BLOCK % run == 0 || run % KV_BLOCK == 0) &&
           (!f->second || f->values == (f->axis == LM_KV_TOKEN)) &&
           (f->axis == LM_KV_CHANNEL || !f->group || f->group % 64 == 0 || 64 % f->group == 0);
}

/* x[0..n), n <= 64 and a multiple of 16, over `inverse` as two planes; returns the sum of the whole numbers. */
static inline int32_t to_planes(const float *x, int64_t n, float inverse, int8_t *hi, int8_t *lo)
{
    __m512i sum = _mm512_setzero_si512();
    for (int64_t i = 0; i < n; i += 16) {
        __m512i v = _mm512_cvtps_epi32(_mm512_loadu_ps(x + i) * _mm512_set1_ps(inverse));
        __m512i h = _mm512_srai_epi32(_mm512_add_epi32(v, _mm512_set1_epi32(64)), 7);
        sum = _mm512_add_epi32(sum, v);
        _mm_storeu_si128((__m128i *)(void *)(hi + i), _mm512_cvtepi32_epi8(h));
        _mm_storeu_si128((__m128i *)(void *)(lo + i),
                         _mm512_cvtepi32_epi8(_mm512_sub_epi32(v, _mm512_slli_epi32(h, 7))));
    }
    return _mm512_reduce_add_epi32(sum);
}

/* Row r of planes: group g of x[from..to), multiples of 16, whose largest magnitude and sum are taken first. */
static inline void put_group(const kv_planes *p, int64_t r, const kv_part *part, int64_t parts,
                             int64_t first, const float *x)
{
    int64_t g = part[first].g, last = first;
    __m512 most = _mm512_setzero_ps(), all = _mm512_setzero_ps();
    while (last < parts && part[last].g == g)
        last++;
    for (int64_t i = part[first].from; i < part[last - 1].to; i += 16) {
        __m512 v = _mm512_loadu_ps(x + i);
        most = _mm512_max_ps(_mm512_abs_ps(v), most);
        all = all + v;
    }
    float a = _mm512_reduce_max_ps(most), sum = _mm512_reduce_add_ps(all);
    float inverse = a > 0 ? (float)KV_MOST / a : 0;
    int32_t whole = 0;
    for (int64_t k = first; k < last; k++) {
        int8_t *tile = p->plane + (r / p->half * p->parts + k) * KV_A + r % p->half * 64;
        int64_t at = part[k].from % 64;
        memset(tile, 0, 64);
        memset(tile + p->half * 64, 0, 64);
        whole += to_planes(x + part[k].from, part[k].to - part[k].from, inverse, tile + at,
                           tile + p->half * 64 + at);
    }
    p->unit[r * p->groups + g] =
        a / (float)KV_MOST + (sum - sum); /* NaN if a number is not finite */
    p->whole[r * p->groups + g] = whole;
    p->sum[r * p->groups + g] = sum;
}

/* What codes are raised by. */
static inline int32_t code_offset(const lm_kv_format *f)
{
    return f->levels == LM_KV_SYM ? 1 << (f->bits - 1) : f->levels == LM_KV_TABLE ? 128 : 0;
}

#ifdef KV_TILES
/* Tiles 0, 1 (results) and 4 to 7 (rows) have 8 or 16 rows; 2 and 3 are those of codes. */
#define KV_CONFIG(n)                                                         \
    {                                                                        \
        .palette = 1, .bytes = { 64, 64, 64, 64, 64, 64, 64, 64 }, .rows = { \
            n,                                                               \
            n,                                                               \
            16,                                                              \
            16,                                                              \
            n,                                                               \
            n,                                                               \
            n,                                                               \
            n                                                                \
        }                                                                    \
    }
static const struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} kv_tile_config[2] __attribute__((aligned(64))) = { KV_CONFIG(8), KV_CONFIG(16) };
#endif

#endif
