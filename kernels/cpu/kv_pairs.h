/* SPDX-License-Identifier: Apache-2.0 */
/* kv_pairs.h -- tables and FP8 by tiles of BF16: codes become numbers by look-up in two halves of bytes, in the order of
 * pairs that tiles multiply; included by kv_simd.c.
 *
 * A line of 64 codes holds four channels of 16 tokens of keys, or four tokens of 16 channels of values: two rows of
 * pairs.  Scales of tokens are multiplied with scores and with probabilities. */
#ifndef LM_KERNELS_CPU_KV_PAIRS_H
#define LM_KERNELS_CPU_KV_PAIRS_H

enum { KV_PAIR_TILE = 512 /* numbers: 16 rows of 32 */ };

static bool kv_has_pairs(const lm_kv_format *f, int64_t T, int64_t D)
{
    return f && (f->levels == LM_KV_FLOAT8 || f->levels == LM_KV_TABLE) && f->axis == LM_KV_TOKEN &&
           !f->second && !f->outliers && D <= KV_TILE_DIM && D % 32 == 0 && f->group % 32 == 0 &&
           (!f->values || T >= KV_SUB);
}

/* Rows of pairs of a line whose numbers have these low and high bytes. */
LM_INLINE void store_line(uint16_t *to, __m512i lo, __m512i hi)
{
    __m512 p = _mm512_castsi512_ps(_mm512_unpacklo_epi8(lo, hi));
    __m512 q = _mm512_castsi512_ps(_mm512_unpackhi_epi8(lo, hi));
    _mm512_store_ps(to, _mm512_shuffle_ps(p, q, 0x88));
    _mm512_store_ps(to + 32, _mm512_shuffle_ps(p, q, 0xdd));
}

/* n lines of codes of at most 4 bits at b as 2 n rows of pairs. */
static void pairs_of_sixteen(const kv_levels *l, const uint8_t *b, int64_t n, uint16_t *to)
{
    const __m512i low =
        _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)(const void *)l->low));
    const __m512i high =
        _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)(const void *)l->high));
    for (int64_t i = 0; i < n; i++, to += 64) {
        __m512i x = _mm512_loadu_si512(b + i * LM_KV_LINE);
        store_line(to, _mm512_shuffle_epi8(low, x), _mm512_shuffle_epi8(high, x));
    }
}

/* n lines of codes at b as 2 n rows of pairs. */
static void pairs_of(const kv_levels *l, const uint8_t *b, int64_t n, uint16_t *to)
{
    const __m512i lo0 = _mm512_loadu_si512(l->low), lo1 = _mm512_loadu_si512(l->low + 64);
    const __m512i hi0 = _mm512_loadu_si512(l->high), hi1 = _mm512_loadu_si512(l->high + 64);
    const __m512i sign = _mm512_set1_epi8(l->kind == KV_FLOAT ? -128 : 0);
    if (l->kind == KV_LOOK_UP && l->sixteen) {
        pairs_of_sixteen(l, b, n, to);
        return;
    }
    for (int64_t i = 0; i < n; i++, to += 64) {
        __m512i x = _mm512_loadu_si512(b + i * LM_KV_LINE);
        __m512i lo = _mm512_permutex2var_epi8(lo0, x, lo1);
        __m512i hi = _mm512_permutex2var_epi8(hi0, x, hi1);
        store_line(to, lo, _mm512_or_si512(hi, _mm512_and_si512(x, sign)));
    }
}

/* Numbers x[n], n a multiple of 32, as row r of blocks. */
static void put_row(const kv_rows *p, int64_t r, int64_t first, int64_t blocks, const float *x,
                    int64_t n)
{
    uint16_t *to = p->row + ((r / p->chunk * blocks + first) * p->chunk + r % p->chunk) * 32;
    for (int64_t i = 0; i < n; i += 32, to += p->chunk * 32) {
        __m512bh v = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(x + i + 16), _mm512_loadu_ps(x + i));
        _mm512_storeu_si512(to, (__m512i)v);
    }
}

/* Zeros in the place of rows from n to the end of a tile. */
static void clear_rows_after(const kv_rows *p, int64_t n, int64_t blocks)
{
    for (int64_t r = n; r % p->chunk; r++)
        for (int64_t k = 0; k < blocks; k++)
            memset(p->row + ((r / p->chunk * blocks + k) * p->chunk + r % p->chunk) * 32, 0, 64);
}

/* Tile `to` = the sum over n blocks of 32 of rows at a times pairs at b + i * step. */
#define KV_PAIRS(to, a, b, step, n, size)          \
    do {                                           \
        _tile_zero(to);                            \
        for (int64_t i_ = 0; i_ < (n); i_++) {     \
            _tile_loadd(4, (a) + i_ * (size), 64); \
            _tile_loadd(2, (b) + i_ * (step), 64); \
            _tile_dpbf16ps(to, 4, 2);              \
        }                                          \
    } while (0)

/* Query rows; sums of groups for minima. */
static void rows_of_queries(const kv_call *k, const kv_seq *s, int64_t n, const kv_scratch *w)
{
    const kv_rows *p = &w->key_rows;
    int64_t group = s->k.f->group ? s->k.f->group : s->D, groups = lm_kv_groups(s->k.f, s->D);
    for (int64_t r = 0; r < n; r++) {
        const float *q = w->q + r * k->ld;
        put_row(p, r, 0, s->D / 32, q, s->D);
        for (int64_t g = 0; g < groups; g++) {
            __m512 sum = _mm512_setzero_ps();
            for (int64_t d = g * group; d < (g + 1) * group && d < s->D; d += 16)
                sum = sum + _mm512_loadu_ps(q + d);
            p->sum[r * groups + g] = _mm512_reduce_add_ps(sum);
        }
    }
    clear_rows_after(p, n, s->D / 32);
}

/* Scores of the tokens [j0, j0 + 64): columns of `out`. */
static void score_pairs(const kv_call *k, const kv_seq *s, int64_t j0, int64_t lo, int64_t hi,
                        int64_t n, const kv_scratch *w, float *out)
{
    const lm_kv_format *f = s->k.f;
    const kv_rows *p = &w->key_rows;
    int64_t group = f->group ? f->group : s->D, groups = lm_kv_groups(f, s->D), nd = s->D / 32;
    int64_t size = p->chunk * 32;
    const uint8_t *b[4];
    float *c = (float *)(void *)w->product;
    keys_of_tiles(s, j0, 0, 4, lo, hi, w, b);
    scales_of_tokens(s, &s->k, groups, j0, j0 + KV_SUB, lo, hi, w);
    for (int64_t x = 0; x < 4; x++) {
        pairs_of(&k->prep->k, b[x], s->D / 4, w->pairs);
        for (int64_t r0 = 0; r0 < n; r0 += p->chunk) {
            const uint16_t *a = p->row + r0 / p->chunk * nd * size;
            int64_t rows = n - r0 < p->chunk ? n - r0 : p->chunk;
            for (int64_t g = 0; g < groups; g++) {
                int64_t d = g * group / 32, e = (g + 1) * group / 32;
                KV_PAIRS(0, a + d * size, w->pairs + d * KV_PAIR_TILE, KV_PAIR_TILE,
                         (e < nd ? e : nd) - d, size);
                _tile_stored(0, c, 64);
                const float *scale = w->of_token + g * KV_BLOCK + x * LM_KV_TILE;
                __m512 by = _mm512_loadu_ps(scale);
                __m512 least = _mm512_loadu_ps(scale + KV_MOST_GROUPS * KV_BLOCK);
                for (int64_t r = 0; r < rows; r++) {
                    float *to = out + (r0 + r) * KV_BLOCK + x * LM_KV_TILE;
                    __m512 v = by * _mm512_load_ps(c + r * 16);
                    fetch_some(w->ahead);
                    if (f->zero)
                        v = _mm512_fmadd_ps(least, _mm512_set1_ps(p->sum[(r0 + r) * groups + g]),
                                            v);
                    if (g > 0)
                        v = v + _mm512_loadu_ps(to);
                    _mm512_storeu_ps(to, v);
                }
            }
        }
    }
}

/* Scaled numerators in columns [c0, c1) of n rows, as rows. */
static void rows_of_numerators(const kv_scratch *w, int64_t n, int64_t c0, int64_t c1, int64_t g,
                               int64_t groups)
{
    const kv_rows *p = &w->value_rows;
    float x[KV_BLOCK];
    if (c1 - c0 < KV_BLOCK)
        memset(x, 0, sizeof x);
    for (int64_t r = 0; r < n; r++) {
        p->sum[r * groups + g] = scaled_numerators(w, r, c0, c1, g, x);
        put_row(p, r, 8 * g, 8 * groups, x, KV_BLOCK);
    }
}

/* w->acc += numerators of the block of 256 in columns [c0, c1) times values. */
static void weigh_pairs(const kv_call *k, const kv_seq *s, int64_t block, int64_t c0, int64_t c1,
                        int64_t lo, int64_t hi, int64_t n, const kv_scratch *w)
{
    const lm_kv_format *f = s->v.f;
    const kv_rows *p = &w->value_rows;
    int64_t groups = lm_kv_groups(f, s->D), group = f->group ? f->group : s->D;
    int64_t size = p->chunk * 32, lines = lm_kv_tile_lines(true, s->T, s->D);
    float *c = (float *)(void *)w->product;
    scales_of_tokens(s, &s->v, groups, block + c0, block + c1, lo, hi, w);
    for (int64_t g = 0; g < groups; g++)
        rows_of_numerators(w, n, c0, c1, g, groups);
    clear_rows_after(p, n, 8 * groups);
    for (int64_t x = c0 / KV_SUB; x < c1 / KV_SUB; x++) {
        int64_t j = block + x * KV_SUB;
        pairs_of(&k->prep->v, values_of_block(s, j > lo ? j : lo, 0, w), lines,
                 w->pairs + x * lines * 64);
    }
    for (int64_t r0 = 0; r0 < n; r0 += p->chunk) {
        const uint16_t *a = p->row + r0 / p->chunk * 8 * groups * size;
        int64_t rows = n - r0 < p->chunk ? n - r0 : p->chunk;
        for (int64_t d = 0; d < s->D; d += 16) {
            int64_t g = d / group;
            _tile_zero(0);
            for (int64_t x = c0 / 32; x < c1 / 32; x++) {
                _tile_loadd(4, a + (8 * g + x) * size, 64);
                _tile_loadd(2, w->pairs + x / 2 * lines * 64 + (d / 16 * 2 + x % 2) * KV_PAIR_TILE,
                            64);
                _tile_dpbf16ps(0, 4, 2);
            }
            _tile_stored(0, c, 64);
            for (int64_t r = 0; r < rows; r++) {
                float *to = w->acc + (r0 + r) * k->ld + d;
                fetch_some(w->ahead);
                float sum = f->zero ? p->sum[(r0 + r) * groups + g] : 0;
                _mm512_storeu_ps(to, _mm512_loadu_ps(to) +
                                         (_mm512_load_ps(c + r * 16) + _mm512_set1_ps(sum)));
            }
        }
    }
}

static void start_pairs(const kv_call *k, const kv_seq *s, int64_t n, kv_scratch *w)
{
    if (!k->key_pairs && !k->value_pairs)
        return;
    _tile_loadconfig(&kv_tile_config[n > 4]);
    w->key_rows.chunk = w->value_rows.chunk = n > 4 ? 16 : 8;
    if (k->key_pairs)
        rows_of_queries(k, s, n, w);
}

static size_t pairs_scratch_of(const kv_call *k, char *at, kv_scratch *w)
{
    size_t of_rows = (size_t)KV_ROWS * 32 * sizeof(uint16_t), bytes = 0;
    size_t sums = attn_round64((size_t)(KV_ROWS * KV_MOST_GROUPS) * sizeof(float));
    size_t D = (size_t)k->a->head_dim;
    const lm_kv_format *values = k->c->in[KV_VALUES].kv;
    if (!k->key_pairs && !k->value_pairs)
        return 0;
    w->key_rows.row = (uint16_t *)(void *)at;
    bytes += of_rows * (D / 32);
    w->value_rows.row = (uint16_t *)(void *)(at + bytes);
    bytes += k->value_pairs ? of_rows * 8 * (size_t)lm_kv_groups(values, k->a->head_dim) : 0;
    w->key_rows.sum = (float *)(void *)(at + bytes);
    w->value_rows.sum = (float *)(void *)(at + bytes + sums);
    bytes += 2 * sums;
    w->pairs = (uint16_t *)(void *)(at + bytes);
    return bytes + KV_BLOCK * attn_round64(D * sizeof(uint16_t));
}

#endif
