/* SPDX-License-Identifier: Apache-2.0 */
/* attention_amx.c -- BF16 attention on AMX tiles, forward: FlashAttention-2 (arXiv:2307.08691,
 * algorithm 1) with 32 queries against blocks of 128 keys.
 *
 * S = Q K^T and P V run on tiles, the softmax in AVX-512 between them.  Keys are packed as column
 * tiles and values as pair tiles once for each key/value head, for all queries of its group.  The
 * running maximum of a row moves only when it has to grow by more than 2^8 (the factor exp2(s - m)
 * stays far inside F32 and BF16), so rows are almost never rescaled after their first block. */
#include "kernels/attention.h"

#include <math.h>

#include "kernels/cpu/attention_amx.h"
#include "kernels/cpu/attention_drop.h"
#include "kernels/cpu/attention_dx_amx.h"
#include "kernels/cpu/attention_jobs.h"
#include "kernels/cpu/tables.h"
#include "kernels/cpu/vmath.h"

enum { BQ = 32, BK = 64, MAX_TILES_D = 16 };

/* Scores of a block: [16 queries][16 keys] C tiles; the probabilities of 32 keys (an A tile) then
 * take the place of the scores of the first 16 of them. */
typedef struct {
    float tile[2][BK / 16][CTILE];
} score_block;

/* Scratch of one worker; the packed keys and values follow it. */
typedef struct {
    score_block s[2];     /* of this block, and of the one before until it is that of the next */
    float l[BQ][16];      /* lane-wise sums of p */
    float m[BQ], top[BQ]; /* maximum in use, maximum of the block; log2 units */
    uint64_t kept[BQ];    /* dropout: bit j: key j of the block stays */
    uint16_t q[MAX_TILES_D * TILE];     /* queries, A tiles [2][D/32] */
    float acc[2 * MAX_TILES_D * CTILE]; /* output, C tiles [2][D/16] */
    attn_bias_lines bias;               /* of the head, behind the values */
} forward_scratch;

static int64_t blocks_of(int64_t n, int64_t size)
{
    return (n + size - 1) / size;
}

static size_t scratch_bytes(const lm_attention_attr *a, int64_t keys)
{
    size_t n = (size_t)(blocks_of(keys, BK) * BK);
    int64_t tiles = blocks_of(a->head_dim, 32) + blocks_of(lm_attention_value_dim(a), 32);
    return attn_round64(sizeof(forward_scratch)) + n * (size_t)(32 * tiles) * sizeof(uint16_t) +
           (size_t)attn_bias_numbers(keys, keys) * sizeof(float);
}

static void pack_keys(const attn_job *job, int64_t keys, uint16_t *kp, uint16_t *vp)
{
    int64_t nk = blocks_of(job->D, 32), nv = blocks_of(job->E, 32);
    int64_t padded = blocks_of(keys, BK) * BK;
    for (int64_t j = 0; j < padded; j += 16)
        for (int64_t d = 0; d < nk; d++)
            pack_columns(kp + (j / 16 * nk + d) * TILE, (const uint16_t *)job->k + j * job->k_pitch,
                         job->k_pitch, 32 * d, job->D, keys - j);
    for (int64_t j = 0; j < padded; j += 32) {
        for (int64_t d = 0; d < nv; d++) {
            uint16_t *to = vp + (j / 32 * nv + d) * 2 * TILE;
            pack_pairs(to, to + TILE, (const uint16_t *)job->v + j * job->v_pitch, job->v_pitch,
                       32 * d, job->E, keys - j);
        }
    }
}

/* The same of pages: a tile of 16 keys is in one of them, 32 values may be in two. */
static void pack_pages(const attn_job *job, int64_t keys, uint16_t *kp, uint16_t *vp)
{
    int64_t nk = blocks_of(job->D, 32), nv = blocks_of(job->E, 32);
    int64_t padded = blocks_of(keys, BK) * BK, run;
    for (int64_t j = 0; j < padded; j += 16) {
        const uint16_t *k = job->k, *v = job->v;
        if (j < keys) {
            k = attn_piece(job, job->k, job->k_pitch, sizeof *k, j, keys, &run);
            v = attn_piece(job, job->v, job->v_pitch, sizeof *v, j, keys, &run);
        }
        for (int64_t d = 0; d < nk; d++)
            pack_columns(kp + (j / 16 * nk + d) * TILE, k, job->k_pitch, 32 * d, job->D, keys - j);
        for (int64_t d = 0; d < nv; d++) {
            uint16_t *to = vp + (j / 32 * nv + d) * 2 * TILE + j % 32 / 16 * (TILE / 2);
            pack_half_pairs(to, to + TILE, v, job->v_pitch, 32 * d, job->E, keys - j);
        }
    }
}

/* The tile products of a block are cut into units of four, 2 * nk for the scores and 2 * nv for the output, where a key has
 * nk times 32 numbers, rounded up, and a value nv times.  `steps` (1 or 2) is how many 32 keys the block has. */

/* Rows that begin one number before each other: biases by distance, of 16 queries and as many keys. */
enum { BIAS_STEP = -(int)sizeof(float) };

/* Unit u of s = q k^T, plus the biases from `bias` on, unless it is NULL. */
static inline __attribute__((always_inline)) void scores_unit(const forward_scratch *w,
                                                              score_block *s, const uint16_t *kp,
                                                              const float *bias, int steps, int u,
                                                              int nk)
{
    int t = u / nk, d = u % nk;
    const uint16_t *k0 = kp + (2 * t * nk + d) * TILE;
    if (t >= steps)
        return;
    if (d == 0 && bias) {
        const float *b = bias + 32 * t;
        _tile_loadd(0, b, BIAS_STEP);
        _tile_loadd(1, b + 16, BIAS_STEP);
        _tile_loadd(2, b - 16, BIAS_STEP);
        _tile_loadd(3, b, BIAS_STEP);
    } else if (d == 0) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    _tile_loadd(4, w->q + d * TILE, 64);
    _tile_loadd(6, k0, 64);
    _tile_loadd(7, k0 + nk * TILE, 64);
    _tile_loadd(5, w->q + (nk + d) * TILE, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
    if (d == nk - 1) {
        _tile_stored(0, s->tile[0][2 * t], 64);
        _tile_stored(1, s->tile[0][2 * t + 1], 64);
        _tile_stored(2, s->tile[1][2 * t], 64);
        _tile_stored(3, s->tile[1][2 * t + 1], 64);
    }
}

/* The same for head size 64 (nk = 2), a tile of keys at a time with the queries in registers 4
 * to 7. */
static inline __attribute__((always_inline)) void scores_unit_64(const forward_scratch *w,
                                                                 score_block *s, const uint16_t *kp,
                                                                 const float *bias, int steps,
                                                                 int u)
{
    const uint16_t *k = kp + 2 * u * TILE;
    if (u >= 2 * steps)
        return;
    if (u == 0) {
        _tile_loadd(4, w->q, 64);
        _tile_loadd(5, w->q + TILE, 64);
        _tile_loadd(6, w->q + 2 * TILE, 64);
        _tile_loadd(7, w->q + 3 * TILE, 64);
    }
    if (bias) {
        _tile_loadd(0, bias + 16 * u, BIAS_STEP);
        _tile_loadd(1, bias + 16 * u - 16, BIAS_STEP);
    } else {
        _tile_zero(0);
        _tile_zero(1);
    }
    _tile_loadd(2, k, 64);
    _tile_dpbf16ps(0, 4, 2);
    _tile_dpbf16ps(1, 6, 2);
    _tile_loadd(3, k + TILE, 64);
    _tile_dpbf16ps(0, 5, 3);
    _tile_dpbf16ps(1, 7, 3);
    _tile_stored(0, s->tile[0][u], 64);
    _tile_stored(1, s->tile[1][u], 64);
}

/* Unit u of acc += p v. */
static inline __attribute__((always_inline)) void
weigh_unit(forward_scratch *w, const score_block *p, const uint16_t *vp, int steps, int u, int nv)
{
    int d = u / 2 * 2, t = u % 2;
    const uint16_t *v = vp + (t * 2 * nv + d) * TILE;
    float *c0 = w->acc + d * CTILE, *c1 = c0 + 2 * nv * CTILE;
    if (t >= steps)
        return;
    if (t == 0) {
        _tile_loadd(0, c0, 64);
        _tile_loadd(1, c0 + CTILE, 64);
        _tile_loadd(2, c1, 64);
        _tile_loadd(3, c1 + CTILE, 64);
    }
    _tile_loadd(4, p->tile[0][2 * t], 64);
    _tile_loadd(6, v, 64);
    _tile_loadd(7, v + TILE, 64);
    _tile_loadd(5, p->tile[1][2 * t], 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
    if (t == steps - 1) {
        _tile_stored(0, c0, 64);
        _tile_stored(1, c0 + CTILE, 64);
        _tile_stored(2, c1, 64);
        _tile_stored(3, c1 + CTILE, 64);
    }
}

static inline __attribute__((always_inline)) void scores_all(const forward_scratch *w,
                                                             score_block *s, const uint16_t *kp,
                                                             const float *bias, int steps, int nk)
{
    for (int u = 0; u < 2 * nk; u++) {
        if (nk == 2)
            scores_unit_64(w, s, kp, bias, steps, u);
        else
            scores_unit(w, s, kp, bias, steps, u, nk);
    }
}

static inline __attribute__((always_inline)) void
weigh_all(forward_scratch *w, const score_block *p, const uint16_t *vp, int steps, int nv)
{
    for (int u = 0; u < 2 * nv; u++)
        weigh_unit(w, p, vp, steps, u, nv);
}

/* Scores of row r against the v-th 16 keys. */
static inline float *score_row(score_block *s, int64_t r, int v)
{
    return s->tile[r / 16][v] + r % 16 * 16;
}

/* With a soft cap the scores become tanh(s * by), and the cap stands in their scale. */
static void cap_scores(score_block *s, int vecs, float by)
{
    const __m512 f = _mm512_set1_ps(by);
    for (int64_t r = 0; r < BQ; r++)
        for (int v = 0; v < vecs; v++) {
            float *x = score_row(s, r, v);
            _mm512_store_ps(x, lm_tanh16(_mm512_mul_ps(_mm512_load_ps(x), f)));
        }
}

/* Scores that a query may not see become -inf. */
static void mask_scores(score_block *s, const attn_mask *m, int64_t i0, int64_t n, int64_t j0,
                        int vecs)
{
    const __m512 none = _mm512_set1_ps(-INFINITY);
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (int64_t r = 0; r < BQ; r++) {
        int64_t start = r < n ? attn_start(m, i0 + r) - j0 : BK;
        int64_t end = r < n ? attn_end(m, i0 + r) - j0 : 0;
        start = start < 0 ? 0 : start > BK ? BK : start;
        end = end < 0 ? 0 : end > BK ? BK : end;
        if (start == 0 && end >= 16 * vecs)
            continue;
        for (int v = 0; v < vecs; v++) {
            __m512i j = _mm512_add_epi32(lane, _mm512_set1_epi32(16 * v));
            __mmask16 seen = _mm512_cmpge_epi32_mask(j, _mm512_set1_epi32((int)start)) &
                             _mm512_cmplt_epi32_mask(j, _mm512_set1_epi32((int)end));
            _mm512_mask_storeu_ps(score_row(s, r, v), (__mmask16)~seen, none);
        }
    }
}

/* The greatest of the 16 lanes of each x[i]; lanes 4 to 7 of the result are those of x[8] to x[11],
 * and lanes 8 to 11 those of x[4] to x[7]. */
static inline __attribute__((always_inline)) __m512 maxima_of_16(__m512 x[16])
{
    /* Each step folds the halves of two vectors into one. */
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        __m512 a = x[i], b = x[i + 8];
        x[i] = _mm512_max_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        __m512 a = x[i], b = x[i + 4];
        x[i] = _mm512_max_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        __m512 a = x[i], b = x[i + 2];
        x[i] = _mm512_max_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    }
    __m512 a = x[0], b = x[1];
    return _mm512_max_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
}

/* Row maxima of the block in log2 units; whether any row must move its maximum. */
static inline __attribute__((always_inline)) bool find_maxima(forward_scratch *w, score_block *s,
                                                              int vecs, float scale2)
{
    int moved = 0;
    for (int g = 0; g < BQ / 16; g++) {
        __m512 x[16];
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) {
            int r = 16 * g + (i & 3) + (i & 4) * 2 + (i & 8) / 2; /* the order of maxima_of_16 */
            x[i] = _mm512_max_ps(_mm512_load_ps(score_row(s, r, 0)),
                                 _mm512_load_ps(score_row(s, r, 1)));
            if (vecs > 2)
                x[i] = _mm512_max_ps(x[i], _mm512_max_ps(_mm512_load_ps(score_row(s, r, 2)),
                                                         _mm512_load_ps(score_row(s, r, 3))));
        }
        __m512 t = _mm512_mul_ps(maxima_of_16(x), _mm512_set1_ps(scale2));
        __m512 limit = _mm512_add_ps(_mm512_load_ps(w->m + 16 * g), _mm512_set1_ps(8.0f));
        _mm512_store_ps(w->top + 16 * g, t);
        moved |= _mm512_cmp_ps_mask(t, limit, _CMP_GT_OQ);
    }
    return moved;
}

/* Give the rows that outgrew their maximum a new one, and rescale what they have summed. */
static void move_maxima(forward_scratch *w, int nv)
{
    for (int r = 0; r < BQ; r++) {
        if (!(w->top[r] > w->m[r] + 8))
            continue;
        __m512 f = _mm512_set1_ps(w->m[r] == -INFINITY ? 0.0f : exp2f(w->m[r] - w->top[r]));
        w->m[r] = w->top[r];
        _mm512_store_ps(w->l[r], _mm512_mul_ps(_mm512_load_ps(w->l[r]), f));
        for (int d = 0; d < 2 * nv; d++) {
            float *x = w->acc + (r / 16 * 2 * nv + d) * CTILE + r % 16 * 16;
            _mm512_store_ps(x, _mm512_mul_ps(_mm512_load_ps(x), f));
        }
    }
}

/* Where dropout stands: NULL when there is none. */
typedef struct {
    const attn_drop *drop;
    uint64_t draw; /* of row 0, key 0 */
    int64_t T;     /* draws of a row */
} row_drop;

/* p = exp2(s * scale2 - m) of rows r0 .. r1-1, summed into l, rounded into A tiles; times Z/(1-p)
 * where dropout is on. */
static inline __attribute__((always_inline)) void exponentials(forward_scratch *w, score_block *s,
                                                               int r0, int r1, int steps,
                                                               float scale2, const row_drop *x,
                                                               int64_t j0)
{
    const __m512 c = _mm512_set1_ps(scale2);
    for (int r = r0; r < r1; r++) {
        __m512 m = _mm512_set1_ps(w->m[r] == -INFINITY ? 0.0f : -w->m[r]);
        __m512 l = _mm512_load_ps(w->l[r]);
        if (x->drop && r % 2 == 0)
            attn_kept_two(x->drop, x->draw + (uint64_t)(r * x->T + j0), (uint64_t)x->T,
                          w->kept + r);
        for (int t = 0; t < steps; t++) {
            __m512 a = _mm512_fmadd_ps(_mm512_load_ps(score_row(s, r, 2 * t)), c, m);
            __m512 b = _mm512_fmadd_ps(_mm512_load_ps(score_row(s, r, 2 * t + 1)), c, m);
            a = fast_exp2(a);
            b = fast_exp2(b);
            l = _mm512_add_ps(l, _mm512_add_ps(a, b));
            if (x->drop) {
                __m512 keep = _mm512_set1_ps(x->drop->keep);
                __mmask32 k = (__mmask32)(w->kept[r] >> 32 * t);
                a = _mm512_maskz_mul_ps((__mmask16)k, a, keep);
                b = _mm512_maskz_mul_ps((__mmask16)(k >> 16), b, keep);
            }
            _mm512_store_si512(score_row(s, r, 2 * t), (__m512i)_mm512_cvtne2ps_pbh(b, a));
        }
        _mm512_store_ps(w->l[r], l);
    }
}

static void store_rows(forward_scratch *w, const attn_job *job, int64_t h, int64_t i0, int64_t n)
{
    const int64_t tiles = 2 * blocks_of(job->E, 32);
    for (int64_t r = 0; r < n; r++) {
        float l = _mm512_reduce_add_ps(_mm512_load_ps(w->l[r]));
        float fade = job->sinks ? attn_add_sink2(job->sinks[h], &w->m[r], &l) : 1;
        __m512 inv = _mm512_set1_ps(attn_row_factor2(job->undivided, fade, w->m[r], l));
        uint16_t *o = (uint16_t *)job->o + (i0 + r) * job->o_pitch + h * job->E;
        for (int64_t d = 0; d < tiles; d += 2) {
            const float *x = w->acc + (r / 16 * tiles + d) * CTILE + r % 16 * 16;
            __m512 a = _mm512_mul_ps(_mm512_load_ps(x), inv);
            __m512 b = _mm512_mul_ps(_mm512_load_ps(x + CTILE), inv);
            _mm512_mask_storeu_epi16(o + 16 * d, in_row(job->E - 16 * d),
                                     (__m512i)_mm512_cvtne2ps_pbh(b, a));
        }
        if (job->lse)
            job->lse[h * job->lse_head + (i0 + r) * job->lse_row] =
                attn_row_lse2(job->undivided, w->m[r], l);
    }
}

/* Bring into L1 what the tiles will read soon: the keys of the next block, the values of this one.
 */
static inline __attribute__((always_inline)) void fetch(const uint16_t *k_next, const uint16_t *v,
                                                        int u, int nk)
{
    /* The keys are wanted in the second half of the units, the values after them. */
    const uint16_t *from = u < 2 * nk ? k_next + 2 * u * TILE : v + 2 * (u - 2 * nk) * TILE;
    for (int i = 0; i < 2 * TILE / 32; i++)
        _mm_prefetch((const char *)(from + 32 * i), _MM_HINT_T0);
}

/* The block of keys behind the one at j0 of which queries i0 .. i0+n-1 of head h see some, or one at or behind the end. */
static int64_t next_block(const attn_job *job, int64_t h, int64_t i0, int64_t n,
                          const attn_span *span, int64_t j0)
{
    for (j0 += BK; job->mask.blocks && j0 < span->hi; j0 += BK)
        if (attn_open(&job->mask, h, i0, i0 + n, j0, j0 + BK))
            break;
    return j0;
}

/* How many 32 keys of the block at j0 there are. */
static int block_steps(const attn_span *span, int64_t j0)
{
    return j0 >= span->hi ? 0 : span->hi - j0 > 32 ? 2 : 1;
}

/* Scores of keys in blocks that a query does not see become -inf. */
static void hide_scores(score_block *s, const attn_mask *m, int64_t h, int64_t i0, int64_t n,
                        int64_t j0)
{
    const __m512 none = _mm512_set1_ps(-INFINITY);
    for (int64_t r = 0, next; r < n; r = next) {
        uint64_t seen = attn_seen_row(m, h, i0 + r, j0, BK, &next);
        next = next - i0 < n ? next - i0 : n;
        for (int64_t q = r; seen != UINT64_MAX && q < next; q++)
            for (int v = 0; v < BK / 16; v++)
                _mm512_mask_storeu_ps(score_row(s, q, v), (__mmask16)(~seen >> 16 * v), none);
    }
}

/* Cap scores, and hide those that are not seen. */
static inline void mask_block(score_block *s, const attn_job *job, int64_t h, int64_t i0, int64_t n,
                              const attn_span *span, int64_t j0, int steps)
{
    if (job->soft_cap > 0)
        cap_scores(s, 2 * steps, job->scale / job->soft_cap);
    if (j0 < span->full_lo || j0 + 32 * steps > span->full_hi || n < BQ)
        mask_scores(s, &job->mask, i0, n, j0, 2 * steps);
    if (job->mask.blocks)
        hide_scores(s, &job->mask, h, i0, n, j0);
}

/* The blocks of keys that queries i0 .. i0+n-1 see.  While the exponentials of a block run, so do
 * the tile products of its neighbours, in small portions: the tile unit must never stay idle for
 * long, since after a pause of some 300 ns its next product takes as long again. */
static inline __attribute__((always_inline)) void
sweep_keys(forward_scratch *w, const attn_job *job, int64_t h, int64_t i0, int64_t n,
           const attn_span *span, const uint16_t *kp, const uint16_t *vp, int nk, int nv)
{
    const float scale2 = (job->soft_cap > 0 ? job->soft_cap : job->scale) * 1.44269504088896341f;
    row_drop x = { .drop = job->drop->rate > 0 ? job->drop : NULL,
                   .T = attn_drop_pitch(job->drop) };
    if (x.drop)
        x.draw = lm_attention_draw(&x.drop->origin, job->b, h, i0);
    int64_t j0 = next_block(job, h, i0, n, span, span->lo / BK * BK - BK), j1, past = 0;
    const int64_t distance = -job->mask.off - i0;
    score_block *prev = &w->s[0], *cur = &w->s[1];
    int steps = block_steps(span, j0), prev_steps = 0, next_steps;
    if (!steps)
        return;
    scores_all(w, cur, kp + j0 / 16 * nk * TILE, attn_bias_row(&w->bias, j0 + distance), steps, nk);
    for (; steps; j0 = j1, steps = next_steps) {
        j1 = next_block(job, h, i0, n, span, j0);
        next_steps = block_steps(span, j1);
        const uint16_t *k_next = kp + j1 / 16 * nk * TILE;
        const uint16_t *v_prev = vp + past / 32 * 2 * nv * TILE;
        const float *bias = next_steps ? attn_bias_row(&w->bias, j1 + distance) : NULL;
        mask_block(cur, job, h, i0, n, span, j0, steps);
        if (find_maxima(w, cur, 2 * steps, scale2)) {
            weigh_all(w, prev, v_prev, prev_steps, nv); /* it was made with the old maximum */
            prev_steps = 0;
            move_maxima(w, nv);
        }
#pragma GCC unroll 16
        for (int u = 0, all = 2 * (nk + nv); u < all; u++) {
            if (u < 2 * nv)
                weigh_unit(w, prev, v_prev, prev_steps, u, nv);
            else if (nk == 2)
                scores_unit_64(w, prev, k_next, bias, next_steps, u - 2 * nv);
            else
                scores_unit(w, prev, k_next, bias, next_steps, u - 2 * nv, nk);
            fetch(k_next, vp + j0 / 32 * 2 * nv * TILE, u, nk);
            exponentials(w, cur, BQ * u / all, BQ * (u + 1) / all, steps, scale2, &x, j0);
        }
        score_block *spare = prev; /* it holds the scores of the next block by now */
        prev = cur;
        cur = spare;
        past = j0;
        prev_steps = steps;
    }
    weigh_all(w, prev, vp + past / 32 * 2 * nv * TILE, prev_steps, nv);
}

/* Queries i0 .. i0+n-1 of head h. */
static inline __attribute__((always_inline)) void
query_block(forward_scratch *w, const attn_job *job, int64_t h, int64_t i0, int64_t n,
            const uint16_t *kp, const uint16_t *vp, int nk, int nv)
{
    const uint16_t *q = (const uint16_t *)job->q + i0 * job->q_pitch + h * job->D;
    for (int g = 0; g < BQ / 16; g++)
        for (int d = 0; d < nk; d++)
            pack_natural(w->q + (g * nk + d) * TILE, q + 16 * g * job->q_pitch, job->q_pitch,
                         32 * d, job->D, n - 16 * g);
    _tile_zero(0);
    for (int i = 0; i < 4 * nv; i++) /* tiles, to wake their unit */
        _tile_stored(0, w->acc + i * CTILE, 64);
    for (int r = 0; r < BQ; r++) {
        _mm512_store_ps(w->l[r], _mm512_setzero_ps());
        w->m[r] = -INFINITY;
    }
    attn_span span = attn_span_of(&job->mask, i0, i0 + n);
    if (span.lo < span.hi)
        sweep_keys(w, job, h, i0, n, &span, kp, vp, nk, nv);
    store_rows(w, job, h, i0, n);
}

static void query_block_any(forward_scratch *w, const attn_job *job, int64_t h, int64_t i0,
                            int64_t n, const uint16_t *kp, const uint16_t *vp)
{
    int nk = (int)blocks_of(job->D, 32), nv = (int)blocks_of(job->E, 32);
    if (nk == 2 && nv == 2)
        query_block(w, job, h, i0, n, kp, vp, 2, 2);
    else if (nk == 4 && nv == 4)
        query_block(w, job, h, i0, n, kp, vp, 4, 4);
    else if (nk == 3 && nv == 2) /* the Gaussian kernel's keys beside values of 64 */
        query_block(w, job, h, i0, n, kp, vp, 3, 2);
    else
        query_block(w, job, h, i0, n, kp, vp, nk, nv);
}

/* The biases of head h, by the scale, which its scores are multiplied by later. */
static void load_biases(forward_scratch *w, const attn_job *job, int64_t h)
{
    w->bias.first = 1 - BQ - job->mask.off - (job->queries - 1) / BQ * BQ;
    attn_bias_fill(&w->bias, &job->bias, h, 1 / job->scale,
                   attn_bias_numbers(job->mask.keys, job->queries));
}

/* All queries of one key/value head's group whose block number is `part` modulo `parts`. */
static void run_job(const attn_job *job, void *scratch)
{
    forward_scratch *w = scratch;
    int64_t keys = job->mask.keys, padded = blocks_of(keys, BK) * BK;
    uint16_t *kp = attn_at(w, 1, attn_round64(sizeof *w));
    uint16_t *vp = kp + padded * 32 * blocks_of(job->D, 32);
    w->bias = (attn_bias_lines){
        .x = (float *)(void *)(vp + padded * 32 * blocks_of(job->E, 32)),
    };
    if (!job->bias.table)
        w->bias.x = NULL;
    tiles_begin();
    if (job->pack)
        job->pack(job, attn_start(&job->mask, 0), kp, vp);
    else if (job->pages)
        pack_pages(job, keys, kp, vp);
    else
        pack_keys(job, keys, kp, vp);
    for (int64_t h = job->h0; h < job->h1; h++) {
        if (w->bias.x)
            load_biases(w, job, h);
        for (int64_t i0 = BQ * job->part; i0 < job->queries; i0 += BQ * job->parts) {
            int64_t n = job->queries - i0 < BQ ? job->queries - i0 : BQ;
            query_block_any(w, job, h, i0, n, kp, vp);
        }
    }
    tiles_end();
}

/* Heads of 16 numbers would fill half of their tiles. */
static bool fits(const lm_attention_attr *a)
{
    const int64_t D = a->head_dim, E = lm_attention_value_dim(a);
    return D > 16 && E > 16 && D <= 16 * MAX_TILES_D && E <= 16 * MAX_TILES_D;
}

size_t lm_attention_packed_bytes_amx(const lm_attention_attr *a, int64_t keys)
{
    return fits(a) && a->head_dim % 32 == 0 && lm_attention_value_dim(a) == a->head_dim
               ? scratch_bytes(a, keys)
               : 0;
}

void lm_attention_packed_amx(const attn_job *job, void *scratch)
{
    run_job(job, scratch);
}

static void attention(const lm_call *c)
{
    const lm_attention_attr *a = c->attr;
    if (fits(a))
        attn_run_split(c, run_job, scratch_bytes(a, a->seq), NULL);
    else
        attn_fallback("attention", a)->run(c);
}

static size_t attention_work(const lm_call *c, int threads)
{
    const lm_attention_attr *a = c->attr;
    return fits(a) ? attn_run_work(threads, scratch_bytes(a, a->seq))
                   : attn_fallback("attention", a)->work(c, threads);
}

static void attention_cached(const lm_call *c)
{
    attn_seqs s = attn_seqs_of(c);
    attn_kinds k = attn_kinds_of(&s);
    if (!k.prompts || !s.values || !fits(c->attr)) {
        attn_fallback("attention_cached", c->attr)->run(c);
        return;
    }
    attn_append(c);
    if (k.tokens)
        lm_attention_decode_avx512(c);
    attn_run_split(c, run_job, scratch_bytes(c->attr, attn_room(&s)), &s);
}

static size_t attention_cached_work(const lm_call *c, int threads)
{
    attn_seqs s = attn_seqs_of(c);
    attn_kinds k = attn_kinds_of(&s);
    if (!k.prompts || !s.values || !fits(c->attr))
        return attn_fallback("attention_cached", c->attr)->work(c, threads);
    size_t few = k.tokens ? lm_attention_decode_work_avx512(c, threads) : 0;
    return attn_more(few, attn_run_work(threads, scratch_bytes(c->attr, attn_room(&s))));
}

const lm_kernel lm_attention_amx_kernels[] = {
    { "attention", LM_DTYPE_BF16, LM_CPU_AMX, attention, attention_work },
    { "attention_dx", LM_DTYPE_BF16, LM_CPU_AMX, lm_attention_dx_amx, lm_attention_dx_amx_work },
    { "attention_cached", LM_DTYPE_BF16, LM_CPU_AMX, attention_cached, attention_cached_work },
    { 0 },
};
