/* SPDX-License-Identifier: Apache-2.0 */
/* kv_blocks.h -- scores and weighted values of up to 256 tokens by products of rows with codes as 8-bit integers
 * (kv_products.h); included by kv_simd.c.
 *
 * A run is tokens whose codes are multiplied with the same rows:
 * of keys those that share the scales of channels, of values those that share scales, or second scales, of channels. */
#ifndef LM_KERNELS_CPU_KV_BLOCKS_H
#define LM_KERNELS_CPU_KV_BLOCKS_H

#include "kernels/cpu/kv_products.h"
#include "kernels/cpu/kv_tile_blocks.h"

/* 64 numbers, of up to 16,256, times `inverse` as two planes; the sum of the whole numbers is added to *whole. */
static inline void planes_of_64(const float *x, __m512 inverse, int8_t *hi, int8_t *lo,
                                __m512i *whole)
{
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i half = _mm512_set1_epi16(64), low = _mm512_set1_epi16(127);
    __m512i v[4], h[2], l[2];
    for (int i = 0; i < 4; i++)
        v[i] = _mm512_cvtps_epi32(_mm512_loadu_ps(x + 16 * i) * inverse);
    for (int i = 0; i < 2; i++) {
        __m512i w = _mm512_packs_epi32(v[2 * i], v[2 * i + 1]);
        *whole = _mm512_add_epi32(*whole, _mm512_madd_epi16(w, _mm512_set1_epi16(1)));
        w = _mm512_add_epi16(w, half);
        h[i] = _mm512_srai_epi16(w, 7);
        l[i] = _mm512_sub_epi16(_mm512_and_si512(w, low), half);
    }
    _mm512_storeu_si512(hi, _mm512_permutexvar_epi32(order, _mm512_packs_epi16(h[0], h[1])));
    _mm512_storeu_si512(lo, _mm512_permutexvar_epi32(order, _mm512_packs_epi16(l[0], l[1])));
}

/* ---- keys ---- */

/* Query rows times the scales of channels in w->tile as whole numbers, with the sums of their products with minima. */
static void plane_queries_by_channel(const kv_call *k, const kv_seq *s, int64_t n,
                                     const kv_scratch *w)
{
    const kv_planes *p = &w->keys;
    float *x = w->of_token + 2 * KV_MOST_GROUPS * KV_BLOCK;
    memset(x + in_sixteens(s->D), 0, (size_t)(KV_TILE_DIM - in_sixteens(s->D)) * sizeof *x);
    for (int64_t r = 0; r < n; r++) {
        const float *q = w->q + r * k->ld;
        __m512 least = _mm512_setzero_ps(), most = least, bad = least;
        __m512i whole = _mm512_setzero_si512();
        for (int64_t d = 0; d < s->D; d += 16) {
            __mmask16 live = vf_lanes(s->D - d < 16 ? s->D - d : 16);
            __m512 y = _mm512_loadu_ps(q + d);
            __m512 v = _mm512_maskz_mul_ps(live, y, _mm512_loadu_ps(w->tile->cs + d));
            _mm512_storeu_ps(x + d, v);
            most = _mm512_max_ps(_mm512_abs_ps(v), most);
            bad = _mm512_fmadd_ps(v, _mm512_setzero_ps(), bad);
            least = _mm512_mask3_fmadd_ps(y, _mm512_loadu_ps(w->tile->cm + d), least, live);
        }
        float a = _mm512_reduce_max_ps(most);
        __m512 inverse = _mm512_set1_ps(a > 0 ? (float)KV_MOST / a : 0);
        int8_t *row = p->plane + r / p->half * p->parts * KV_A + r % p->half * 64;
        for (int64_t i = 0; i < p->parts; i++, row += KV_A)
            planes_of_64(x + 64 * i, inverse, row, row + p->half * 64, &whole);
        p->unit[r] =
            a / (float)KV_MOST + _mm512_reduce_add_ps(bad); /* NaN if a number is not finite */
        p->whole[r] = _mm512_reduce_add_epi32(whole);
        p->sum[r] = _mm512_reduce_add_ps(least);
    }
}

/* Scores of row r0 + r: products of group g of tiles [x0, x1) times units, with minima; `second`: times the second
 * scales of tokens. */
LM_INLINE void scores_of_row(const kv_seq *s, bool by_channel, int64_t r0, int64_t r, int64_t g,
                             int64_t x0, int64_t x1, const kv_scratch *w, float *out)
{
    const lm_kv_format *f = s->k.f;
    const kv_planes *p = &w->keys;
    int64_t at = (r0 + r) * p->groups + g;
    const float *scale = w->of_token + g * KV_BLOCK, *least = scale + KV_MOST_GROUPS * KV_BLOCK;
    const __m512 unit = _mm512_set1_ps(p->unit[at]), sum = _mm512_set1_ps(p->sum[at]);
    const __m512i offset = _mm512_set1_epi32(code_offset(f) * p->whole[at]);
    bool minima = lm_kv_has_min(f);
    stay_awake();
    for (int64_t x = x0; x < x1; x++) {
        const int32_t *c = w->product + x * (KV_A / 4) + r * 16;
        float *to = out + (r0 + r) * KV_BLOCK + x * LM_KV_TILE;
        fetch_some(w->ahead);
        __m512i i = _mm512_slli_epi32(_mm512_load_si512(c), 7);
        i = _mm512_sub_epi32(_mm512_add_epi32(i, _mm512_load_si512(c + p->half * 16)), offset);
        __m512 v = _mm512_cvtepi32_ps(i) * unit;
        if (by_channel) {
            v = v + (minima ? sum : _mm512_setzero_ps());
            if (f->second)
                v = v * _mm512_loadu_ps(scale + x * LM_KV_TILE);
        } else {
            v = v * _mm512_loadu_ps(scale + x * LM_KV_TILE);
            if (minima)
                v = _mm512_fmadd_ps(_mm512_loadu_ps(least + x * LM_KV_TILE), sum, v);
            if (g > 0)
                v = v + _mm512_loadu_ps(to);
        }
        _mm512_storeu_ps(to, v);
    }
}

/* Scores of tiles [x0, x1) of the block, whose codes are at b[x0].. */
static void score_run(const kv_seq *s, const uint8_t *const *b, int64_t x0, int64_t x1, int64_t n,
                      const kv_scratch *w, float *out)
{
    const kv_planes *p = &w->keys;
    const kv_part *part = w->key_part;
    bool by_channel = s->k.f->axis == LM_KV_CHANNEL;
    for (int64_t r0 = 0; r0 < n; r0 += p->half)
        for (int64_t first = 0, last; first < p->parts; first = last) {
            const int8_t *a = p->plane + (r0 / p->half * p->parts + first) * KV_A;
            int64_t g = part[first].g, rows = n - r0 < p->half ? n - r0 : p->half, from[5];
            for (last = first; last < p->parts && part[last].g == g; last++)
                from[last - first] = part[last].from / 64 * KV_A;
            if (last - first == 1)
                key_products(1, a, b, from, x0, x1, p->half, rows, w->product);
            else if (last - first == 2)
                key_products(2, a, b, from, x0, x1, p->half, rows, w->product);
            else if (last - first == 3)
                key_products(3, a, b, from, x0, x1, p->half, rows, w->product);
            else
                key_products(4, a, b, from, x0, x1, p->half, rows, w->product);
            for (int64_t r = 0; r < rows; r++) {
                if (by_channel)
                    scores_of_row(s, true, r0, r, g, x0, x1, w, out);
                else
                    scores_of_row(s, false, r0, r, g, x0, x1, w, out);
            }
        }
}

/* Scores of the coded tokens in columns [c0, c1), multiples of 64, of the block, that lie in [lo, hi). */
static void score_codes(const kv_call *k, const kv_seq *s, int64_t block, int64_t c0, int64_t c1,
                        int64_t lo, int64_t hi, int64_t n, const kv_scratch *w)
{
    const kv_side *side = &s->k;
    const lm_kv_format *f = side->f;
    const uint8_t *b[KV_BLOCK_TILES] = { NULL };
    keys_of_tiles(s, block, c0 / LM_KV_TILE, c1 / LM_KV_TILE, lo, hi, w, b);
    if (f->axis == LM_KV_TOKEN) {
        scales_of_tokens(s, side, w->keys.groups, block, block + c1, lo, hi, w);
        score_run(s, b, c0 / LM_KV_TILE, c1 / LM_KV_TILE, n, w, w->s);
        return;
    }
    if (f->second)
        take_scales_of(f->scale, s, side, side->at.second, 1, block, block + c1, lo, hi,
                       w->of_token);
    int64_t of = f->group ? f->group : s->T, run = of < KV_BLOCK ? of : KV_BLOCK;
    for (int64_t c = c0 / run * run; c < c1;
         c += run) { /* tokens that share the scales of channels */
        int64_t j = block + c, from = c > c0 ? c : c0, to = c + run < c1 ? c + run : c1;
        if (block + from >= hi || block + to <= lo)
            continue;
        j = j > lo ? j : lo;
        prepare_scales(s, side, &k->prep->k, kv_page(s, side, j), j % s->T, w->tile);
        plane_queries_by_channel(k, s, n, w);
        score_run(s, b, from / LM_KV_TILE, to / LM_KV_TILE, n, w, w->s);
    }
}

/* ---- values ---- */

/* Numerators of row r in columns [c0, c1) for group g: times the scales of tokens (by_channel: as they are), into whole
 * numbers; those that are 0 stay so, whatever the scale.  Runs have `run` columns. */
LM_INLINE void plane_numerators(bool by_channel, const kv_seq *s, int64_t r, int64_t c0, int64_t c1,
                                int64_t run, int64_t g, const kv_scratch *w)
{
    const kv_planes *p = &w->values;
    const float *scale = w->of_token + g * KV_BLOCK, *least = scale + KV_MOST_GROUPS * KV_BLOCK;
    bool minima = lm_kv_has_min(s->v.f), whole = code_offset(s->v.f) != 0;
    __m512 most = _mm512_setzero_ps(), bad = most;
    float x[KV_BLOCK];
    int64_t at = r * p->groups + g;
    for (int64_t c = c0 / run * run; c < c1; c += run) {
        __m512 sum = _mm512_setzero_ps();
        for (int64_t i = c > c0 ? c : c0; i < c + run && i < c1; i += 16) {
            __m512 v = _mm512_loadu_ps(w->s + r * KV_BLOCK + i);
            fetch_some(w->ahead);
            __mmask16 some = _mm512_cmp_ps_mask(v, _mm512_setzero_ps(), _CMP_NEQ_UQ);
            if (by_channel)
                sum = sum + v;
            else if (minima)
                sum = _mm512_mask3_fmadd_ps(v, _mm512_loadu_ps(least + i), sum, some);
            if (!by_channel)
                v = _mm512_maskz_mul_ps(some, v, _mm512_loadu_ps(scale + i));
            _mm512_storeu_ps(x + i, v);
            most = _mm512_max_ps(_mm512_abs_ps(v), most); /* scales may be negative */
            bad = _mm512_fmadd_ps(v, _mm512_setzero_ps(), bad);
        }
        p->sum[4 * at + c / run] = by_channel || minima ? _mm512_reduce_add_ps(sum) : 0;
    }
    float a = _mm512_reduce_max_ps(most);
    stay_awake();
    __m512 inverse = _mm512_set1_ps(a > 0 ? (float)KV_MOST / a : 0);
    p->unit[at] =
        a / (float)KV_MOST + _mm512_reduce_add_ps(bad); /* NaN if a number is not finite */
    int8_t *row = p->plane + (r / p->half * p->parts + 4 * g) * KV_A + r % p->half * 64;
    for (int64_t c = c0 / run * run; c < c1; c += run) {
        __m512i all = _mm512_setzero_si512();
        for (int64_t i = c > c0 ? c : c0; i < c + run && i < c1; i += KV_SUB) {
            int8_t *to = row + i / KV_SUB * KV_A;
            planes_of_64(x + i, inverse, to, to + p->half * 64, &all);
        }
        p->whole[4 * at + c / run] = whole ? _mm512_reduce_add_epi32(all) : 0;
    }
}

/* acc of row r0 + r += the products of a run. */
LM_INLINE void add_values(const kv_call *k, const kv_seq *s, int64_t r0, int64_t r, int64_t run,
                          int64_t channels, const kv_scratch *w)
{
    const lm_kv_format *f = s->v.f;
    const kv_planes *p = &w->values;
    bool by_channel = f->axis == LM_KV_CHANNEL, minima = lm_kv_has_min(f);
    float *acc = w->acc + (r0 + r) * k->ld;
    int32_t offset = code_offset(f);
    for (int64_t d = 0, g = 0, end = channels; d < s->D; d += 16) {
        if (d == end) {
            g++;
            end += channels;
        }
        int64_t at = (r0 + r) * p->groups + g;
        const int32_t *c = w->product + d / 16 * (KV_A / 4) + r * 16;
        __m512i i = _mm512_slli_epi32(_mm512_load_si512(c), 7);
        i = _mm512_add_epi32(i, _mm512_load_si512(c + p->half * 16));
        i = _mm512_sub_epi32(i, _mm512_set1_epi32(offset * p->whole[4 * at + run]));
        __m512 v = _mm512_cvtepi32_ps(i) * _mm512_set1_ps(p->unit[at]);
        __m512 sum = _mm512_set1_ps(p->sum[4 * at + run]), now = _mm512_loadu_ps(acc + d);
        if (by_channel) {
            now = _mm512_fmadd_ps(v, _mm512_loadu_ps(w->tile->cs + d), now);
            if (minima)
                now = _mm512_fmadd_ps(sum, _mm512_loadu_ps(w->tile->cm + d), now);
        } else {
            if (minima)
                v = v + sum;
            if (f->second)
                v = v * _mm512_loadu_ps(w->tile->second + d);
            now = now + v;
        }
        _mm512_storeu_ps(acc + d, now);
    }
}

/* w->acc += numerators in columns [c0, c1), multiples of 64, of the block, of tokens that are coded, times values. */
static void weigh_codes(const kv_call *k, const kv_seq *s, int64_t block, int64_t c0, int64_t c1,
                        int64_t lo, int64_t hi, int64_t n, const kv_scratch *w)
{
    const kv_side *side = &s->v;
    const lm_kv_format *f = side->f;
    const kv_planes *p = &w->values;
    const uint8_t *b[KV_BLOCK_SUBS] = { NULL };
    bool by_channel = f->axis == LM_KV_CHANNEL;
    int64_t of = kv_run_of(f, s->T), run = of && of < KV_BLOCK ? of : KV_BLOCK;
    int64_t D = in_sixteens(s->D), channels = !by_channel && f->group ? f->group : D;
    for (int64_t c = c0; c < c1; c += KV_SUB) {
        int64_t j = block + c;
        b[c / KV_SUB] = values_of_block(s, j > lo ? j : lo, c / KV_SUB, w);
    }
    if (!by_channel)
        scales_of_tokens(s, side, p->groups, block, block + c1, lo, hi, w);
    for (int64_t r = 0; r < n; r++)
        for (int64_t g = 0; g < p->groups; g++) {
            if (by_channel)
                plane_numerators(true, s, r, c0, c1, run, g, w);
            else
                plane_numerators(false, s, r, c0, c1, run, g, w);
        }
    for (int64_t c = c0 / run * run; c < c1; c += run) {
        int64_t from = c > c0 ? c : c0, to = c + run < c1 ? c + run : c1, x = from / KV_SUB;
        int64_t j = block + from > lo ? block + from : lo, parts = to / KV_SUB - x;
        if (block + from >= hi || block + to <= lo)
            continue;
        if (by_channel || f->second)
            prepare_scales(s, side, &k->prep->v, kv_page(s, side, j), j % s->T, w->tile);
        for (int64_t r0 = 0; r0 < n; r0 += p->half) {
            for (int64_t g = 0; g < p->groups; g++) {
                const int8_t *a = p->plane + (r0 / p->half * p->parts + 4 * g + x) * KV_A;
                int64_t rows = n - r0 < p->half ? n - r0 : p->half;
                int64_t d = g * channels / 16,
                        e = d + channels / 16 < D / 16 ? d + channels / 16 : D / 16;
                if (parts == 4)
                    value_products(4, a, b, d, e, p->half, rows, w->product);
                else if (parts == 3)
                    value_products(3, a, b + x, d, e, p->half, rows, w->product);
                else if (parts == 2)
                    value_products(2, a, b + x, d, e, p->half, rows, w->product);
                else
                    value_products(1, a, b + x, d, e, p->half, rows, w->product);
            }
            for (int64_t r = 0; r < p->half && r0 + r < n; r++)
                add_values(k, s, r0, r, c / run, channels, w);
        }
    }
}

#endif
