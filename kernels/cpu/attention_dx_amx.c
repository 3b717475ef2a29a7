/* SPDX-License-Identifier: Apache-2.0 */
/* attention_dx_amx.c -- the backward of BF16 attention on AMX tiles: FlashAttention-2
 * (arXiv:2307.08691, algorithm 2), 64 keys in the outer loop, up to 128 queries in the inner one.
 *
 * Scores and dP are computed transposed, keys in rows and queries in lanes: the log-sum-exp and D_i
 * are then plain vectors, P^T and dS^T come out as A operands of dV and dK, and two of their rows
 * woven together are a B operand of dQ^T. */
#include "kernels/attention.h"

#include <math.h>

#include "kernels/cpu/attention_amx.h"
#include "kernels/cpu/attention_drop.h"
#include "kernels/cpu/attention_dx_amx.h"
#include "kernels/cpu/attention_jobs.h"
#include "kernels/cpu/vmath.h"

enum { KEYS = 64, BATCH = 4 /* times 32 queries */ };

/* What 32 queries see. */
typedef struct {
    int64_t lo, hi, full_lo, full_hi;
} query_span;

typedef struct {
    float s[2][2][2][CTILE];      /* S^T of two sub-blocks in turn, C tiles [16 keys][16 queries] */
    float dp[2][2][2][CTILE];     /* dP^T */
    uint32_t kept[KEYS / 32][32]; /* dropout: bit k of [i][query]: key 32 i + k stays */
    uint16_t p[KEYS / 16][BATCH][TILE];         /* P^T, A tiles [16 keys][32 queries] */
    uint16_t ds[KEYS / 16][BATCH][TILE];        /* dS^T */
    uint16_t woven[KEYS / 32][2 * BATCH][TILE]; /* dS^T, B tiles [32 keys][16 queries] */
    /* nk for keys and queries, nv for values and dO: */
    uint16_t *kn, *vn, *kt;      /* natural [keys/16][n], turned [keys/32][2 n] */
    uint16_t *qc, *oc, *qp, *op; /* Q, dO: columns [T/16][n], pairs [T/32][2 n] */
    float *dk, *dv, *dq;         /* C tiles [keys/16][2 n]; dQ^T [T/16][2 n] */
    float *lse, *delta;          /* [T], lse in log2 units */
    int32_t *start, *end;        /* [T]: visible keys */
    query_span *span;            /* [T/32] */
    uint32_t seen[KEYS];         /* bit q: query q of 32 sees the block of that key */
    int64_t D, E;
    float scale2;         /* of what the exponential takes: scores, or with a soft cap their tanh */
    float cap_by;         /* scale / soft_cap; 0: no soft cap */
    float keep;           /* 1/(1-p) of dropout */
    attn_bias_lines bias; /* of the head */
} dx_scratch;

static int64_t up(int64_t n)
{
    return (n + KEYS - 1) / KEYS * KEYS;
}

/* How many 32 numbers. */
static int tiles_of(int64_t n)
{
    return (int)((n + 31) / 32);
}

static size_t scratch_bytes(const lm_attention_attr *a)
{
    size_t n = (size_t)up(a->seq), D = 32 * (size_t)tiles_of(a->head_dim);
    size_t E = 32 * (size_t)tiles_of(lm_attention_value_dim(a));
    return attn_round64(sizeof(dx_scratch)) + n * D * (4 * sizeof(uint16_t) + 2 * sizeof(float)) +
           n * E * (3 * sizeof(uint16_t) + sizeof(float)) + 4 * n * 4 +
           attn_round64(n / 32 * sizeof(query_span)) +
           (size_t)attn_bias_numbers(a->seq, a->seq) * sizeof(float);
}

static void *carve(char **at, size_t bytes)
{
    void *p = *at;
    *at += attn_round64(bytes);
    return p;
}

static void place(dx_scratch *w, const lm_attention_attr *a)
{
    size_t n = (size_t)up(a->seq), row = 32 * n * sizeof(uint16_t);
    size_t nk = (size_t)tiles_of(a->head_dim), nv = (size_t)tiles_of(lm_attention_value_dim(a));
    char *at = (char *)w + attn_round64(sizeof *w);
    uint16_t **packs[] = { &w->kn, &w->vn, &w->kt, &w->qc, &w->oc, &w->qp, &w->op };
    float **sums[] = { &w->dk, &w->dv, &w->dq };
    for (int i = 0; i < 7; i++) {
        bool values = packs[i] == &w->vn || packs[i] == &w->oc || packs[i] == &w->op;
        *packs[i] = carve(&at, row * (values ? nv : nk));
    }
    for (int i = 0; i < 3; i++)
        *sums[i] = carve(&at, 2 * row * (i == 1 ? nv : nk));
    w->lse = carve(&at, 4 * n);
    w->delta = carve(&at, 4 * n);
    w->start = carve(&at, 4 * n);
    w->end = carve(&at, 4 * n);
    w->span = carve(&at, n / 32 * sizeof(query_span));
    w->bias.x = carve(&at, (size_t)attn_bias_numbers(a->seq, a->seq) * sizeof(float));
    w->D = a->head_dim;
    w->E = lm_attention_value_dim(a);
    w->keep = (float)(1 / (1 - a->dropout));
    w->scale2 = (float)((a->soft_cap > 0 ? a->soft_cap : a->scale) * 1.44269504088896341);
    w->cap_by = a->soft_cap > 0 ? (float)(a->scale / a->soft_cap) : 0;
}

static void load_keys(dx_scratch *w, const attn_dx_view *x, int64_t k0, int64_t k1)
{
    uint16_t lo[TILE] __attribute__((aligned(64))), hi[TILE] __attribute__((aligned(64)));
    const uint16_t *qkv = x->qkv;
    int nk = tiles_of(w->D), nv = tiles_of(w->E);
    for (int64_t j = k0; j < up(k1); j += 16) {
        const uint16_t *k = qkv + x->k_at + j * x->pitch, *v = qkv + x->v_at + j * x->pitch;
        for (int d = 0; d < nk; d++)
            pack_natural(w->kn + (j / 16 * nk + d) * TILE, k, x->pitch, 32 * d, w->D, k1 - j);
        for (int d = 0; d < nv; d++)
            pack_natural(w->vn + (j / 16 * nv + d) * TILE, v, x->pitch, 32 * d, w->E, k1 - j);
    }
    for (int64_t j = k0; j < up(k1); j += 32) {
        for (int d = 0; d < nk; d++) {
            uint16_t *to = w->kt + (j / 32 * 2 * nk + 2 * d) * TILE;
            pack_pairs(lo, hi, qkv + x->k_at + j * x->pitch, x->pitch, 32 * d, w->D, k1 - j);
            turn_pairs(to, lo);
            turn_pairs(to + TILE, hi);
        }
    }
}

/* What every query of [q0, q1) sees; the padding after them sees nothing. */
static void load_masks(dx_scratch *w, const attn_dx_view *x, int64_t q0, int64_t q1)
{
    for (int64_t i = q0; i < up(q1); i++) {
        w->start[i] = i < q1 ? (int32_t)attn_start(&x->mask, i) : INT32_MAX;
        w->end[i] = i < q1 ? (int32_t)attn_end(&x->mask, i) : 0;
    }
    for (int64_t i = q0; i < up(q1); i += 32) {
        attn_span s = { 0 };
        int64_t last = i + 32 < q1 ? i + 32 : q1;
        if (i < q1)
            s = attn_span_of(&x->mask, i, last);
        w->span[i / 32] =
            (query_span){ s.lo, s.hi, i + 32 > q1 ? INT64_MAX : s.full_lo, s.full_hi };
    }
}

/* n tiles wide rows i .. q1-1 of x (the first is `x`), as columns and as pairs. */
static void load_queries(uint16_t *columns, uint16_t *pairs, const uint16_t *x, int64_t pitch,
                         int64_t wide, int64_t i, int64_t q1)
{
    int n = tiles_of(wide);
    for (int d = 0; d < n; d++) {
        uint16_t *c = columns + (i / 16 * n + d) * TILE, *p = pairs + (i / 32 * n + d) * 2 * TILE;
        pack_columns(c, x, pitch, 32 * d, wide, q1 - i);
        pack_columns(c + n * TILE, x + 16 * pitch, pitch, 32 * d, wide, q1 - i - 16);
        pack_pairs(p, p + TILE, x, pitch, 32 * d, wide, q1 - i);
    }
}

static __m512 widen(__m256i x)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}

/* The product of n numbers of two rows. */
static float dot(const uint16_t *a, const uint16_t *b, int64_t n)
{
    __m512 sum = _mm512_setzero_ps();
    for (int64_t d = 0; d < n; d += 16) {
        __mmask16 in = (__mmask16)in_row(n - d < 16 ? n - d : 16);
        sum = _mm512_fmadd_ps(widen(_mm256_maskz_loadu_epi16(in, a + d)),
                              widen(_mm256_maskz_loadu_epi16(in, b + d)), sum);
    }
    return _mm512_reduce_add_ps(sum);
}

/* Queries and output gradients of head h, D_i = rowsum(dO o) (algorithm 2, line 4). */
static void load_head(dx_scratch *w, const attn_dx_view *x, int64_t h, int64_t q0, int64_t q1)
{
    const uint16_t *q = (const uint16_t *)x->qkv + h * w->D;
    const uint16_t *dout = (const uint16_t *)x->dout + h * w->E;
    const uint16_t *out = (const uint16_t *)x->o + h * w->E;
    for (int64_t i = q0; i < up(q1); i += 32) {
        load_queries(w->qc, w->qp, q + i * x->pitch, x->pitch, w->D, i, q1);
        load_queries(w->oc, w->op, dout + i * x->o_pitch, x->o_pitch, w->E, i, q1);
    }
    for (int64_t i = q0; i < up(q1); i++) {
        float lse = i < q1 ? x->lse[h * x->a->seq + i] : -INFINITY;
        w->delta[i] = 0;
        if (i < q1 && !x->a->undivided)
            w->delta[i] = dot(dout + i * x->o_pitch, out + i * x->o_pitch, w->E);
        w->lse[i] = lse == -INFINITY ? 0 : lse * 1.44269504089f;
    }
}

/* c[a][b] = x[a] y[b] over the head size: 32 keys in natural tiles, 32 queries in column tiles; plus the biases from
 * `bias` on, of which each row begins one number before the last, unless it is NULL. */
static inline __attribute__((always_inline)) void turned_product(float c[2][2][CTILE],
                                                                 const uint16_t *x,
                                                                 const uint16_t *y,
                                                                 const float *bias, int nd)
{
    if (bias) {
        const int step = -(int)sizeof *bias;
        _tile_loadd(0, bias, step);
        _tile_loadd(1, bias + 16, step);
        _tile_loadd(2, bias - 16, step);
        _tile_loadd(3, bias, step);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int d = 0; d < nd; d++) {
        _tile_loadd(4, x + d * TILE, 64);
        _tile_loadd(6, y + d * TILE, 64);
        _tile_loadd(7, y + (nd + d) * TILE, 64);
        _tile_loadd(5, x + (nd + d) * TILE, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c[0][0], 64);
    _tile_stored(1, c[0][1], 64);
    _tile_stored(2, c[1][0], 64);
    _tile_stored(3, c[1][1], 64);
}

/* The sub-block being worked on: 32 keys at j0 (number i of the block), 32 queries at i0 (number b
 * of the batch). */
typedef struct {
    int64_t j0, i0;
    int i, b, turn;
} sub_block;

static inline __attribute__((always_inline)) void products(dx_scratch *w, const sub_block *u,
                                                           int nk, int nv)
{
    int64_t j = u->j0 / 16 * TILE, i = u->i0 / 16 * TILE;
    turned_product(w->s[u->turn], w->kn + j * nk, w->qc + i * nk,
                   attn_bias_row(&w->bias, u->j0 - u->i0), nk);
    turned_product(w->dp[u->turn], w->vn + j * nv, w->oc + i * nv, NULL, nv);
}

/* P = exp2(S - lse) and dS = P (dP - D) of a sub-block, rounded into their tiles. */
static inline __attribute__((always_inline)) void gradients(dx_scratch *w, const sub_block *u,
                                                            bool masked, bool dropped, bool capped)
{
    const __m512 c = _mm512_set1_ps(w->scale2), keep = _mm512_set1_ps(w->keep);
    const __m512 cap_by = _mm512_set1_ps(w->cap_by), one = _mm512_set1_ps(1);
    const __m512i wl = _mm512_load_si512(weave_lo), wh = _mm512_load_si512(weave_hi);
    const uint32_t *blocks = w->seen + 32 * u->i;
    __m512 lse[2], delta[2];
    __m512i start[2], end[2], before = _mm512_setzero_si512();
    for (int g = 0; g < 2; g++) {
        lse[g] = _mm512_load_ps(w->lse + u->i0 + 16 * g);
        delta[g] = _mm512_load_ps(w->delta + u->i0 + 16 * g);
        start[g] = _mm512_load_si512(w->start + u->i0 + 16 * g);
        end[g] = _mm512_load_si512(w->end + u->i0 + 16 * g);
    }
    for (int r = 0; r < 32; r++) {
        __m512 p[2], ds[2];
        __m512i key = _mm512_set1_epi32((int)u->j0 + r);
        __m512i bit = _mm512_set1_epi32((int)(UINT32_C(1) << r));
        for (int g = 0; g < 2; g++) {
            const float *s = w->s[u->turn][r / 16][g] + r % 16 * 16;
            const float *dp = w->dp[u->turn][r / 16][g] + r % 16 * 16;
            __m512 score = _mm512_load_ps(s), slope = one;
            if (capped) {
                score = lm_tanh16(_mm512_mul_ps(score, cap_by));
                slope = _mm512_fnmadd_ps(score, score, one);
            }
            p[g] = fast_exp2(_mm512_fmsub_ps(score, c, lse[g]));
            if (masked) {
                __mmask16 seen =
                    (__mmask16)(_mm512_cmpge_epi32_mask(key, start[g]) &
                                _mm512_cmplt_epi32_mask(key, end[g]) & blocks[r] >> 16 * g);
                p[g] = _mm512_maskz_mov_ps(seen, p[g]);
            }
            if (dropped) {
                __m512i bits = _mm512_load_si512(w->kept[u->i] + 16 * g);
                __m512 z = _mm512_maskz_mov_ps(_mm512_test_epi32_mask(bits, bit), keep);
                ds[g] = _mm512_mul_ps(p[g], _mm512_fmsub_ps(_mm512_load_ps(dp), z, delta[g]));
                p[g] = _mm512_mul_ps(p[g], z);
            } else {
                ds[g] = _mm512_mul_ps(p[g], _mm512_sub_ps(_mm512_load_ps(dp), delta[g]));
            }
            if (capped)
                ds[g] = _mm512_mul_ps(ds[g], slope);
        }
        int t = 2 * u->i + r / 16, at = r % 16 * 32;
        __m512i d = (__m512i)_mm512_cvtne2ps_pbh(ds[1], ds[0]);
        _mm512_store_si512(&w->p[t][u->b][at], (__m512i)_mm512_cvtne2ps_pbh(p[1], p[0]));
        _mm512_store_si512(&w->ds[t][u->b][at], d);
        if (r % 2) {
            uint16_t(*to)[TILE] = &w->woven[u->i][2 * u->b];
            _mm512_store_si512(&to[0][r / 2 * 32], _mm512_permutex2var_epi16(before, wl, d));
            _mm512_store_si512(&to[1][r / 2 * 32], _mm512_permutex2var_epi16(before, wh, d));
        }
        before = d;
    }
}

/* The two sub-blocks of 32 queries follow each other, that of the first keys before the other.  m, h: a mask with blocks, and
 * the head, or NULL. */
static void gradients_any(dx_scratch *w, const sub_block *u, const attn_mask *m, int64_t h,
                          const attn_drop *drop, uint64_t draw, int64_t T)
{
    const query_span *s = &w->span[u->i0 / 32];
    bool masked = u->j0 < s->full_lo || u->j0 + 32 > s->full_hi;
    if (m) {
        int64_t rows = T - u->i0 < 32 ? T - u->i0 : 32;
        masked |= attn_seen(m, h, u->i0, rows, u->j0, 32, w->seen + 32 * u->i) != ATTN_ALL;
    }
    if (drop && u->i == 0)
        attn_kept_queries(drop, draw + (uint64_t)(u->i0 * attn_drop_pitch(drop) + u->j0),
                          (uint64_t)attn_drop_pitch(drop), 32, w->kept[0], w->kept[1]);
    if (w->cap_by > 0 && drop)
        gradients(w, u, true, true, true);
    else if (w->cap_by > 0)
        gradients(w, u, true, false, true);
    else if (drop && masked)
        gradients(w, u, true, true, false);
    else if (drop)
        gradients(w, u, false, true, false);
    else if (masked)
        gradients(w, u, true, false, false);
    else
        gradients(w, u, false, false, false);
}

static inline __attribute__((always_inline)) void load_four(float *c0, float *c1)
{
    _tile_loadd(0, c0, 64);
    _tile_loadd(1, c0 + CTILE, 64);
    _tile_loadd(2, c1, 64);
    _tile_loadd(3, c1 + CTILE, 64);
}

static inline __attribute__((always_inline)) void store_four(float *c0, float *c1)
{
    _tile_stored(0, c0, 64);
    _tile_stored(1, c0 + CTILE, 64);
    _tile_stored(2, c1, 64);
    _tile_stored(3, c1 + CTILE, 64);
}

/* One step of a 2 x 2 product: rows a0, a1, columns b0, b1. */
static inline __attribute__((always_inline)) void
four_products(const uint16_t *a0, const uint16_t *a1, const uint16_t *b0, const uint16_t *b1)
{
    _tile_loadd(4, a0, 64);
    _tile_loadd(6, b0, 64);
    _tile_loadd(7, b1, 64);
    _tile_loadd(5, a1, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
}

/* sum[64 keys][D] += a[keys][queries of the batch] pairs[queries][D] */
static inline __attribute__((always_inline)) void add_keys(float *sum, uint16_t a[][BATCH][TILE],
                                                           const uint16_t *pairs, const int64_t *i0,
                                                           int n, int nd)
{
    for (int t = 0; t < KEYS / 16; t += 2) {
        for (int d = 0; d < 2 * nd; d += 2) {
            float *c0 = sum + (t * 2 * nd + d) * CTILE, *c1 = c0 + 2 * nd * CTILE;
            load_four(c0, c1);
            for (int b = 0; b < n; b++) {
                const uint16_t *y = pairs + (i0[b] / 32 * 2 * nd + d) * TILE;
                four_products(a[t][b], a[t + 1][b], y, y + TILE);
            }
            store_four(c0, c1);
        }
    }
}

/* dQ^T[D][queries of the batch] += K^T dS^T */
static inline __attribute__((always_inline)) void add_queries(dx_scratch *w, int64_t j0,
                                                              const int64_t *i0, int n, int nd)
{
    const uint16_t *kt = w->kt + j0 / 32 * 2 * nd * TILE;
    for (int b = 0; b < n; b++) {
        for (int d = 0; d < 2 * nd; d += 2) {
            /* tiles (d, q), (d+1, q) are neighbours; so load_four's pairs run over d */
            float *c0 = w->dq + (i0[b] / 16 * 2 * nd + d) * CTILE, *c1 = c0 + 2 * nd * CTILE;
            _tile_loadd(0, c0, 64);
            _tile_loadd(1, c1, 64);
            _tile_loadd(2, c0 + CTILE, 64);
            _tile_loadd(3, c1 + CTILE, 64);
            for (int i = 0; i < KEYS / 32; i++) {
                const uint16_t *x = kt + (i * 2 * nd + d) * TILE;
                four_products(x, x + TILE, w->woven[i][2 * b], w->woven[i][2 * b + 1]);
            }
            _tile_stored(0, c0, 64);
            _tile_stored(1, c1, 64);
            _tile_stored(2, c0 + CTILE, 64);
            _tile_stored(3, c1 + CTILE, 64);
        }
    }
}

/* 64 keys at j0 against n times 32 queries. */
static inline __attribute__((always_inline)) void batch(dx_scratch *w, const attn_dx_job *job,
                                                        const attn_mask *m, int64_t h,
                                                        uint64_t draw, int64_t T, int64_t j0,
                                                        const int64_t *i0, int n, int nk, int nv)
{
    const attn_drop *drop = job->drop->rate > 0 ? job->drop : NULL;
    sub_block u = { .j0 = j0, .i0 = i0[0] };
    products(w, &u, nk, nv);
    for (int k = 0; k < 2 * n; k++) {
        sub_block next = { .i = (k + 1) % 2, .b = (k + 1) / 2, .turn = (k + 1) % 2 };
        if (k + 1 < 2 * n) { /* the tiles work on it while the vectors work on this one */
            next.j0 = j0 + 32 * next.i;
            next.i0 = i0[next.b];
            products(w, &next, nk, nv);
        }
        gradients_any(w, &u, m->blocks ? m : NULL, h, drop, draw, T);
        u = next;
    }
    if (job->keys) {
        add_keys(w->dv + j0 / 16 * 2 * nv * CTILE, w->p, w->op, i0, n, nv);
        add_keys(w->dk + j0 / 16 * 2 * nk * CTILE, w->ds, w->qp, i0, n, nk);
    }
    if (job->queries)
        add_queries(w, j0, i0, n, nk);
}

static inline __attribute__((always_inline)) void
sweep_head(dx_scratch *w, const attn_dx_view *x, const attn_dx_job *job, int64_t h, int nk, int nv)
{
    uint64_t draw = 0;
    if (job->drop->rate > 0)
        draw = lm_attention_draw(&job->drop->origin, job->b, h, 0);
    for (int64_t j0 = job->k0; j0 < job->k1; j0 += KEYS) {
        int64_t i0[BATCH];
        int n = 0;
        for (int64_t i = job->q0; i < job->q1; i += 32) {
            if (w->span[i / 32].hi > j0 && w->span[i / 32].lo < j0 + KEYS &&
                attn_open(&x->mask, h, i, i + 32 < x->a->seq ? i + 32 : x->a->seq, j0, j0 + KEYS))
                i0[n++] = i;
            if (n == BATCH) {
                batch(w, job, &x->mask, h, draw, x->a->seq, j0, i0, n, nk, nv);
                n = 0;
            }
        }
        if (n)
            batch(w, job, &x->mask, h, draw, x->a->seq, j0, i0, n, nk, nv);
    }
}

/* Rows r0 .. r1-1 of C tiles [rows/16][2 n], times scale, into bf16 rows of `wide` numbers, n being tiles_of(wide); turned: the
 * tiles hold the transpose. */
static inline __attribute__((always_inline)) void store_part(uint16_t *to, int64_t pitch,
                                                             const float *tiles, int64_t wide,
                                                             int64_t r0, int64_t r1, float scale,
                                                             bool turned)
{
    const __m512 f = _mm512_set1_ps(scale);
    const int n = tiles_of(wide);
    for (int64_t r = r0; r < r1; r += 16) {
        for (int d = 0; d < n; d++) {
            const float *x = tiles + (r / 16 * 2 * n + 2 * d) * CTILE;
            const __mmask32 in = in_row(wide - 32 * d);
            __m512i a[16], b[16];
#pragma GCC unroll 16
            for (int i = 0; i < 16; i++) {
                a[i] = _mm512_castps_si512(_mm512_mul_ps(_mm512_load_ps(x + 16 * i), f));
                b[i] = _mm512_castps_si512(_mm512_mul_ps(_mm512_load_ps(x + CTILE + 16 * i), f));
            }
            if (turned) {
                transpose16(a);
                transpose16(b);
            }
            int64_t rows = r1 - r < 16 ? r1 - r : 16;
#pragma GCC unroll 16
            for (int i = 0; i < 16; i++) {
                __m512i v = (__m512i)_mm512_cvtne2ps_pbh(_mm512_castsi512_ps(b[i]),
                                                         _mm512_castsi512_ps(a[i]));
                if (i < rows)
                    _mm512_mask_storeu_epi16(to + (r + i) * pitch + 32 * d, in, v);
            }
        }
    }
}

/* The biases of head h, by the scale, which its scores are multiplied by later. */
static void load_biases(dx_scratch *w, const attn_dx_view *x, int64_t h)
{
    w->bias.turned = true;
    w->bias.first = up(x->a->seq) - 1;
    attn_bias_fill(&w->bias, &x->bias, h, (float)(1 / x->a->scale),
                   attn_bias_numbers(x->a->seq, x->a->seq));
}

static void run_job(const attn_dx_job *job, void *scratch)
{
    dx_scratch *w = scratch;
    attn_dx_view x = attn_dx_view_of(job);
    uint16_t *dqkv = x.dqkv;
    const lm_attention_attr *a = x.a;
    int64_t group = a->heads / a->kv_heads;
    tiles_begin();
    place(w, a);
    const int nk = tiles_of(w->D), nv = tiles_of(w->E);
    size_t sums = (size_t)(up(a->seq) * 32) * sizeof(float);
    if (!x.bias.table)
        w->bias.x = NULL;
    memset(w->seen, 0xff, sizeof w->seen);
    load_keys(w, &x, job->k0, job->k1);
    load_masks(w, &x, job->q0, job->q1);
    memset(w->dk, 0, sums * (size_t)nk);
    memset(w->dv, 0, sums * (size_t)nv);
    for (int64_t h = job->kv * group; h < (job->kv + 1) * group; h++) {
        load_head(w, &x, h, job->q0, job->q1);
        if (w->bias.x)
            load_biases(w, &x, h);
        memset(w->dq, 0, sums * (size_t)nk);
        if (nk == 2 && nv == 2)
            sweep_head(w, &x, job, h, 2, 2);
        else if (nk == 4 && nv == 4)
            sweep_head(w, &x, job, h, 4, 4);
        else if (nk == 3 && nv == 2) /* the Gaussian kernel's keys beside values of 64 */
            sweep_head(w, &x, job, h, 3, 2);
        else
            sweep_head(w, &x, job, h, nk, nv);
        if (job->queries)
            store_part(dqkv + h * w->D, x.pitch, w->dq, w->D, job->q0, job->q1, (float)a->scale,
                       true);
    }
    if (job->keys) {
        store_part(dqkv + x.k_at, x.pitch, w->dk, w->D, job->k0, job->k1, (float)a->scale, false);
        store_part(dqkv + x.v_at, x.pitch, w->dv, w->E, job->k0, job->k1, 1, false);
    }
    tiles_end();
}

/* Heads of 16 numbers would fill half of their tiles. */
static bool fits(const lm_attention_attr *a)
{
    return a->head_dim > 16 && lm_attention_value_dim(a) > 16;
}

void lm_attention_dx_amx(const lm_call *c)
{
    const lm_attention_attr *a = c->attr;
    if (fits(a))
        attn_dx_run(c, run_job, scratch_bytes(a));
    else
        attn_fallback("attention_dx", a)->run(c);
}

size_t lm_attention_dx_amx_work(const lm_call *c, int threads)
{
    const lm_attention_attr *a = c->attr;
    return fits(a) ? attn_run_work(threads, scratch_bytes(a))
                   : attn_fallback("attention_dx", a)->work(c, threads);
}
