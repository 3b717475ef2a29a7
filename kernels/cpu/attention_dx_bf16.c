/* SPDX-License-Identifier: Apache-2.0 */
/* attention_dx_bf16.c -- the backward of BF16 attention by dot products of pairs on vectors:
 * FlashAttention-2 (arXiv:2307.08691, algorithm 2), 64 keys in the outer loop, up to 128 queries in
 * the inner one.
 *
 * Scores and dP are computed transposed, keys in rows and 16 queries in lanes: the log-sum-exp and
 * D_i are then plain vectors, P^T and dS^T come out as A operands of dV and dK, and two rows of
 * dS^T woven together are a B operand of dQ^T.
 *
 * Where no query at or behind a position sees a key before it, and no query before it a key at or
 * behind it (a document begins), the sequence can be cut.  Sections of at least SECTION positions
 * follow one another, so that their packed operands and sums stay in the cache.  Blocks of keys and
 * groups of queries lie at multiples of their sizes in the whole sequence: the bits do not depend
 * on how its gradients are divided into jobs. */
#include "kernels/attention.h"

#include "kernels/cpu/attention_drop.h"
#include "kernels/cpu/attention_pairs.h"

enum { GROUPS = 8 /* of queries in a batch; even */, SECTION = 128 };

typedef struct {
    float s[KEYS][LANES], dp[KEYS][LANES]; /* S^T and dP^T of a group */
    uint16_t p[GROUPS / 2][KEYS][ROW];     /* P^T of a batch, an A operand */
    uint16_t ds[GROUPS / 2][KEYS][ROW];    /* dS^T */
    uint16_t woven[KEYS / 32][HALF];       /* dS^T of a group, a B operand */
    uint32_t kept[KEYS / 32][LANES];       /* dropout: bit k of [i][query]: key 32 i + k stays */
    uint32_t seen[KEYS];  /* bit q: query q of the group sees the block of that key */
    int32_t *start, *end; /* [T]: visible keys */
    int32_t *
        first; /* [T]: the first key that this query or a later one sees; 0 if one before sees this key or later */
    attn_span *span; /* [T/16]: what a group sees */
    /* Of a section, from `base` on: */
    uint16_t *k,
        *v;       /* A operands [D/32][height][32], depth D; of values E, as below with dO and dV */
    uint16_t *kt; /* A operand [height/32][rows][32], depth keys */
    uint16_t *qc, *oc;  /* Q, dO: B operands [height/32][D/32][2][16 pairs], depth D */
    uint16_t *qp, *op;  /* Q, dO: B operands [D/32][height/32][2][16 pairs], depth queries */
    float *dk, *dv;     /* [height][deep], [height][deep_v] */
    float *dq;          /* dQ^T [height/16][rows][16] */
    float *lse, *delta; /* [height], lse in log2 units */
    int64_t base, height;
    int64_t D, rows, deep; /* rows: D rounded up to 16; deep: D rounded up to 32 */
    int64_t E, deep_v;     /* deep_v: E rounded up to 32 */
    float scale2;         /* of what the exponential takes: scores, or with a soft cap their tanh */
    float cap_by;         /* scale / soft_cap; 0: no soft cap */
    float keep;           /* 1/(1-p) of dropout */
    attn_bias_lines bias; /* of the head */
} dx_scratch;

/* A multiple of 64, as are its parts. */
static size_t scratch_bytes(const lm_attention_attr *a)
{
    size_t n = (size_t)up_to(a->seq, KEYS), deep = (size_t)up_to(a->head_dim, ROW);
    size_t deep_v = (size_t)up_to(lm_attention_value_dim(a), ROW);
    return attn_round64(sizeof(dx_scratch)) +
           n * deep * (4 * sizeof(uint16_t) + 2 * sizeof(float)) +
           n * deep_v * (3 * sizeof(uint16_t) + sizeof(float)) +
           n * (3 * sizeof(int32_t) + 2 * sizeof(float)) + n / LANES * sizeof(attn_span) +
           (size_t)attn_bias_numbers(a->seq, a->seq) * sizeof(float);
}

static void *carve(char **at, size_t bytes)
{
    void *p = *at;
    *at += bytes;
    return p;
}

static void place(dx_scratch *w, const lm_attention_attr *a)
{
    char *at = (char *)w + attn_round64(sizeof *w);
    size_t n = (size_t)up_to(a->seq, KEYS), deep = (size_t)up_to(a->head_dim, ROW);
    size_t deep_v = (size_t)up_to(lm_attention_value_dim(a), ROW);
    uint16_t **packs[] = { &w->k, &w->v, &w->kt, &w->qc, &w->oc, &w->qp, &w->op };
    float **sums[] = { &w->dk, &w->dv, &w->dq };
    for (int i = 0; i < 7; i++) {
        bool values = packs[i] == &w->v || packs[i] == &w->oc || packs[i] == &w->op;
        *packs[i] = carve(&at, n * (values ? deep_v : deep) * sizeof(uint16_t));
    }
    for (int i = 0; i < 3; i++)
        *sums[i] = carve(&at, n * (i == 1 ? deep_v : deep) * sizeof(float));
    w->start = carve(&at, n * sizeof(int32_t));
    w->end = carve(&at, n * sizeof(int32_t));
    w->first = carve(&at, n * sizeof(int32_t));
    w->lse = carve(&at, n * sizeof(float));
    w->delta = carve(&at, n * sizeof(float));
    w->span = carve(&at, n / LANES * sizeof(attn_span));
    w->bias.x = carve(&at, (size_t)attn_bias_numbers(a->seq, a->seq) * sizeof(float));
    w->D = a->head_dim;
    w->deep = (int64_t)deep;
    w->E = lm_attention_value_dim(a);
    w->deep_v = (int64_t)deep_v;
    w->rows = up_to(w->D, LANES);
    w->scale2 = (float)((a->soft_cap > 0 ? a->soft_cap : a->scale) * 1.44269504088896341);
    w->cap_by = a->soft_cap > 0 ? (float)(a->scale / a->soft_cap) : 0;
    w->keep = (float)(1 / (1 - a->dropout));
}

/* What every query of the sequence sees. */
static void load_masks(dx_scratch *w, const attn_mask *m, int64_t T)
{
    int32_t first = INT32_MAX;
    for (int64_t i = 0; i < T; i += LANES)
        w->span[i / LANES] = group_span(m, i, T, w->start + i, w->end + i);
    for (int64_t i = T - 1; i >= 0; i--) {
        first = w->start[i] < first ? w->start[i] : first;
        w->first[i] = first;
    }
    for (int64_t i = 0, end = 0; i < T; i++) {
        if (end > i)
            w->first[i] = 0;
        end = w->end[i] > end ? w->end[i] : end;
    }
}

/* The end of the section that begins at c0. */
static int64_t section_end(const dx_scratch *w, int64_t c0, int64_t T)
{
    int64_t c = c0 + SECTION;
    while (c < T && w->first[c] < c)
        c++;
    return c < T ? c : T;
}

/* Positions from .. to-1 of the keys and values. */
static void load_keys(dx_scratch *w, const attn_dx_view *x, int64_t from, int64_t to)
{
    const uint16_t *k = (const uint16_t *)x->qkv + x->k_at + from * x->pitch;
    const uint16_t *v = (const uint16_t *)x->qkv + x->v_at + from * x->pitch;
    int64_t at = from - w->base, n = to - from, more = up_to(n, UNIT) - n;
    pack_a_rows(w->k, w->height, at, k, x->pitch, n, w->D);
    pack_a_rows(w->v, w->height, at, v, x->pitch, n, w->E);
    clear_a_rows(w->k, w->height, at + n, more, w->D);
    clear_a_rows(w->v, w->height, at + n, more, w->E);
    for (int64_t j = 0; j < n; j += ROW)
        pack_a_turned(w->kt + (at + j) * w->rows, k + j * x->pitch, x->pitch, n - j, w->D);
}

/* Queries from .. to-1 of head h, their output gradients, D_i = rowsum(dO o) (algorithm 2, line 4), which sums that are
 * not divided do not have. */
static void load_head(dx_scratch *w, const attn_dx_view *x, int64_t h, int64_t from, int64_t to)
{
    int64_t D = w->D, E = w->E, n = to - from, at = from - w->base;
    const uint16_t *q = (const uint16_t *)x->qkv + from * x->pitch + h * D;
    const uint16_t *dout = (const uint16_t *)x->dout + from * x->o_pitch + h * E;
    const uint16_t *o = (const uint16_t *)x->o + from * x->o_pitch + h * E;
    for (int64_t i = 0; i < n; i += ROW) {
        pack_b_rows(w->qc + (at + i) * w->deep, q + i * x->pitch, x->pitch, n - i, D);
        pack_b_rows(w->oc + (at + i) * w->deep_v, dout + i * x->o_pitch, x->o_pitch, n - i, E);
    }
    for (int64_t d = 0; d < D; d += ROW)
        pack_b_columns(w->qp + (d / ROW * w->height + at) * ROW, q + d, x->pitch, n, D - d);
    for (int64_t d = 0; d < E; d += ROW)
        pack_b_columns(w->op + (d / ROW * w->height + at) * ROW, dout + d, x->o_pitch, n, E - d);
    for (int64_t i = 0; i < up_to(n, LANES); i++) {
        __m512 sum = _mm512_setzero_ps();
        float lse = -INFINITY;
        if (i < n) {
            for (int64_t d = 0; d < E; d += ROW)
                sum = _mm512_dpbf16_ps(sum, (__m512bh)load_up_to(dout + i * x->o_pitch + d, E - d),
                                       (__m512bh)load_up_to(o + i * x->o_pitch + d, E - d));
            lse = x->lse[h * x->a->seq + from + i];
        }
        w->delta[at + i] = x->a->undivided ? 0 : _mm512_reduce_add_ps(sum);
        w->lse[at + i] = lse == -INFINITY ? 0 : lse * 1.44269504089f;
    }
}

/* A group of queries against a block of keys; g: its number in the batch. */
typedef struct {
    int64_t j0, i0;
    int g;
    key_range keys;
} tile;

/* P = exp2(S - lse) and dS = P (dP - D) of a tile, rounded into their operands. */
static inline __attribute__((always_inline)) void gradients(dx_scratch *w, const tile *u,
                                                            bool masked, bool dropped, bool capped)
{
    const __m512 c = _mm512_set1_ps(w->scale2), keep = _mm512_set1_ps(w->keep);
    const __m512 cap_by = _mm512_set1_ps(w->cap_by), one = _mm512_set1_ps(1);
    __m512 lse = _mm512_load_ps(w->lse + u->i0 - w->base);
    __m512 delta = _mm512_load_ps(w->delta + u->i0 - w->base);
    __m512i start = _mm512_load_si512(w->start + u->i0), end = _mm512_load_si512(w->end + u->i0);
    for (int64_t r = u->keys.r0; r < u->keys.r1; r += 2) {
        __m512 p[2], ds[2];
        for (int i = 0; i < 2; i++) {
            __m512 s = _mm512_load_ps(w->s[r + i]), dp = _mm512_load_ps(w->dp[r + i]), slope = one;
            if (capped) {
                s = lm_tanh16(_mm512_mul_ps(s, cap_by));
                slope = _mm512_fnmadd_ps(s, s, one);
            }
            p[i] = fast_exp2(_mm512_fmsub_ps(s, c, lse));
            if (masked)
                p[i] = _mm512_maskz_mov_ps(
                    (__mmask16)(seers(u->j0 + r + i, start, end) & w->seen[r + i]), p[i]);
            if (dropped) {
                __m512 z = _mm512_maskz_mov_ps(keepers(w->kept, r + i), keep);
                ds[i] = _mm512_mul_ps(p[i], _mm512_fmsub_ps(dp, z, delta));
                p[i] = _mm512_mul_ps(p[i], z);
            } else {
                ds[i] = _mm512_mul_ps(p[i], _mm512_sub_ps(dp, delta));
            }
            if (capped)
                ds[i] = _mm512_mul_ps(ds[i], slope);
        }
        __m512i a = (__m512i)_mm512_cvtne2ps_pbh(p[1], p[0]);
        __m512i b = (__m512i)_mm512_cvtne2ps_pbh(ds[1], ds[0]);
        for (int i = 0; i < 2; i++) {
            int64_t at = u->g % 2 * LANES;
            _mm256_store_si256((__m256i *)(w->p[u->g / 2][r + i] + at),
                               i ? _mm512_extracti64x4_epi64(a, 1) : _mm512_castsi512_si256(a));
            _mm256_store_si256((__m256i *)(w->ds[u->g / 2][r + i] + at),
                               i ? _mm512_extracti64x4_epi64(b, 1) : _mm512_castsi512_si256(b));
        }
        _mm512_store_si512(w->woven[r / 32] + r % 32 / 2 * ROW, weave(b));
    }
}

static void gradients_any(dx_scratch *w, const tile *u, bool dropped)
{
    if (w->cap_by > 0 && dropped)
        gradients(w, u, true, true, true);
    else if (w->cap_by > 0)
        gradients(w, u, true, false, true);
    else if (u->keys.masked && dropped)
        gradients(w, u, true, true, false);
    else if (dropped)
        gradients(w, u, false, true, false);
    else if (u->keys.masked)
        gradients(w, u, true, false, false);
    else
        gradients(w, u, false, false, false);
}

/* Keys that no query of the group sees. */
static void clear_rows(dx_scratch *w, int g, int64_t r0, int64_t r1)
{
    int64_t at = g % 2 * LANES;
    for (int64_t r = r0; r < r1; r++) {
        _mm256_store_si256((__m256i *)(w->p[g / 2][r] + at), _mm256_setzero_si256());
        _mm256_store_si256((__m256i *)(w->ds[g / 2][r] + at), _mm256_setzero_si256());
    }
}

/* P, dS and, with `queries`, the part of dQ of a tile. */
static void work_tile(dx_scratch *w, const tile *u, const attn_drop *drop, uint64_t draw,
                      bool queries)
{
    int64_t j = u->j0 - w->base, i = u->i0 - w->base, a_step = w->height * ROW;
    int64_t half = i % ROW / LANES * HALF;
    const uint16_t *q = w->qc + i / ROW * ROW * w->deep + half;
    const uint16_t *dout = w->oc + i / ROW * ROW * w->deep_v + half;
    int64_t r0 = u->keys.r0, r1 = u->keys.r1;
    clear_rows(w, u->g, 0, r0);
    clear_rows(w, u->g, r1, KEYS);
    if (r0 >= r1)
        return;
    product(&(pair_product){ w->k + j * ROW, q, a_step, 2 * HALF, w->s[0], LANES, 0, (w->D + 1) / 2,
                             false, attn_bias_row(&w->bias, u->j0 - u->i0) },
            r0, r1);
    product(&(pair_product){ w->v + j * ROW, dout, a_step, 2 * HALF, w->dp[0], LANES, 0,
                             (w->E + 1) / 2, false, NULL },
            r0, r1);
    if (drop)
        attn_kept_queries(drop, draw + (uint64_t)(u->i0 * attn_drop_pitch(drop) + u->j0),
                          (uint64_t)attn_drop_pitch(drop), LANES, w->kept[0], w->kept[1]);
    gradients_any(w, u, drop != NULL);
    if (queries)
        product(&(pair_product){ w->kt + j * w->rows, w->woven[0], w->rows * ROW, HALF,
                                 w->dq + i * w->rows, LANES, r0 / 2, r1 / 2, true, NULL },
                0, up_to(w->D, UNIT));
}

/* sum[keys of the block][D] += a[keys][queries of the batch] b[queries][D], rows of sums `deep` apart; n groups, and
 * the keys that each of them sees. */
static void add_keys(const dx_scratch *w, float *sum, int64_t D, int64_t deep,
                     uint16_t a[][KEYS][ROW], const uint16_t *b, const key_range *seen, int n)
{
    int64_t r0 = KEYS, r1 = 0;
    for (int g = 0; g < n; g++) {
        if (seen[g].r0 >= seen[g].r1)
            continue;
        r0 = seen[g].r0 < r0 ? seen[g].r0 : r0;
        r1 = seen[g].r1 > r1 ? seen[g].r1 : r1;
    }
    for (int64_t r = r0; r < r1; r += MOST_ROWS) {
        int64_t end = r1 - r < MOST_ROWS ? r1 : r + MOST_ROWS;
        int from = n, to = 0;
        for (int g = 0; g < n; g++)
            if (seen[g].r0 < end && seen[g].r1 > r && seen[g].r0 < seen[g].r1) {
                from = g < from ? g : from;
                to = g + 1;
            }
        for (int64_t d = 0; d < D && from < to; d += LANES)
            product(&(pair_product){ a[0][0],
                                     b + d / ROW * w->height * ROW + d % ROW / LANES * HALF,
                                     KEYS * ROW, 2 * HALF, sum + d, deep, LANES / 2 * from,
                                     LANES / 2 * to, true, NULL },
                    r, end);
    }
}

/* The positions of a section with which a job has to do. */
typedef struct {
    int64_t c0, c1; /* the section */
    int64_t k0, k1; /* keys; k0 a multiple of KEYS */
    int64_t q0, q1; /* queries; q0 a multiple of 32 */
} section;

/* The keys of the block at j0 that group i0 / 16 of head h sees, if any; of a mask with blocks also into w->seen. */
static key_range keys_seen(dx_scratch *w, const section *c, const attn_mask *m, int64_t h,
                           int64_t i0, int64_t j0)
{
    key_range k = range_of(&w->span[i0 / LANES], c->c0, c->c1, j0);
    if (m->blocks && k.r0 < k.r1)
        open_keys(m, h, i0, m->keys, j0, &k, w->seen);
    return k;
}

static void sweep_block(dx_scratch *w, const attn_dx_job *job, const section *c, const attn_mask *m,
                        int64_t h, uint64_t draw, int64_t j0)
{
    const attn_drop *drop = job->drop->rate > 0 ? job->drop : NULL;
    int64_t from = c->q1, to = c->q0;
    for (int64_t i = c->q0; i < c->q1; i += LANES) {
        key_range k = keys_seen(w, c, m, h, i, j0);
        if (k.r0 < k.r1) {
            from = i < from ? i / ROW * ROW : from;
            to = i + LANES;
        }
    }
    for (int64_t i = from; i < to; i += GROUPS * LANES) {
        key_range seen[GROUPS];
        int n = 0;
        for (; n < GROUPS && i + n * LANES < to; n++) {
            int64_t i0 = i + n * LANES;
            seen[n] = keys_seen(w, c, m, h, i0, j0);
            if (seen[n].r0 >= seen[n].r1)
                seen[n].r0 = seen[n].r1 = 0;
            work_tile(w, &(tile){ j0, i0, n, seen[n] }, drop, draw, job->queries);
        }
        if (job->keys) {
            int64_t at = j0 - w->base, pairs = (i - w->base) * ROW;
            add_keys(w, w->dv + at * w->deep_v, w->E, w->deep_v, w->p, w->op + pairs, seen, n);
            add_keys(w, w->dk + at * w->deep, w->D, w->deep, w->ds, w->qp + pairs, seen, n);
        }
    }
}

static int64_t greater(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

static int64_t lesser(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* Rows from .. to-1 of sums [height][deep], D numbers of each times `by`, to their places in dqkv. */
static void store_keys(const dx_scratch *w, uint16_t *dqkv, int64_t pitch, const float *sums,
                       int64_t D, int64_t deep, int64_t from, int64_t to, float by)
{
    const __m512 f = _mm512_set1_ps(by);
    for (int64_t j = from; j < to; j++) {
        const float *x = sums + (j - w->base) * deep;
        for (int64_t d = 0; d < D; d += ROW)
            _mm512_mask_storeu_epi16(
                dqkv + j * pitch + d, mask32(D - d),
                (__m512i)_mm512_cvtne2ps_pbh(_mm512_mul_ps(_mm512_load_ps(x + d + LANES), f),
                                             _mm512_mul_ps(_mm512_load_ps(x + d), f)));
    }
}

/* dQ of head h: the queries of the job in the section. */
static void store_queries(const dx_scratch *w, const attn_dx_view *x, const attn_dx_job *job,
                          const section *c, int64_t h)
{
    int64_t from = greater(c->c0, job->q0), to = lesser(c->c1, job->q1);
    for (int64_t i = from / LANES * LANES; i < to; i += LANES)
        store_turned(w->dq + (i - w->base) * w->rows, _mm512_set1_ps((float)x->a->scale),
                     (uint16_t *)x->dqkv + i * x->pitch + h * w->D, x->pitch, from - i, to - i,
                     w->D);
}

/* The biases of head h for the section, by the scale, which its scores are multiplied by later. */
static void load_biases(dx_scratch *w, const attn_dx_view *x, int64_t h)
{
    w->bias.turned = true;
    w->bias.first = w->height - 1;
    attn_bias_fill(&w->bias, &x->bias, h, (float)(1 / x->a->scale),
                   attn_bias_numbers(w->height, w->height));
}

/* What the job computes of section c0 .. c1-1. */
static void run_section(dx_scratch *w, const attn_dx_view *x, const attn_dx_job *job, int64_t c0,
                        int64_t c1)
{
    const lm_attention_attr *a = x->a;
    int64_t group = a->heads / a->kv_heads;
    w->base = c0 / KEYS * KEYS;
    w->height = up_to(c1 - w->base, KEYS);
    section c = { .c0 = c0, .c1 = c1 };
    c.k0 = greater(w->base, job->k0);
    c.q0 = greater(w->base, greater(job->q0, a->causal ? job->k0 : 0));
    c.q1 = lesser(c1, job->q1);
    c.k1 = lesser(c1, a->causal ? lesser(job->k1, c.q1) : job->k1);
    if (c.k0 >= c.k1 || c.q0 >= c.q1)
        return;
    size_t keys = (size_t)(c.k1 - c.k0) * sizeof(float);
    load_keys(w, x, c.k0, c.k1);
    memset(w->dk + (c.k0 - w->base) * w->deep, 0, keys * (size_t)w->deep);
    memset(w->dv + (c.k0 - w->base) * w->deep_v, 0, keys * (size_t)w->deep_v);
    for (int64_t h = job->kv * group; h < (job->kv + 1) * group; h++) {
        uint64_t draw = lm_attention_draw(&job->drop->origin, job->b, h, 0);
        load_head(w, x, h, c.q0, c.q1);
        if (w->bias.x)
            load_biases(w, x, h);
        if (job->queries)
            memset(w->dq + (c.q0 - w->base) * w->rows, 0,
                   (size_t)(up_to(c.q1 - c.q0, LANES) * w->rows) * sizeof(float));
        for (int64_t j0 = c.k0; j0 < c.k1; j0 += KEYS)
            sweep_block(w, job, &c, &x->mask, h, draw, j0);
        if (job->queries)
            store_queries(w, x, job, &c, h);
    }
    if (job->keys) {
        store_keys(w, (uint16_t *)x->dqkv + x->k_at, x->pitch, w->dk, w->D, w->deep,
                   greater(c0, c.k0), c.k1, (float)a->scale);
        store_keys(w, (uint16_t *)x->dqkv + x->v_at, x->pitch, w->dv, w->E, w->deep_v,
                   greater(c0, c.k0), c.k1, 1);
    }
}

static void run_job(const attn_dx_job *job, void *scratch)
{
    dx_scratch *w = scratch;
    attn_dx_view x = attn_dx_view_of(job);
    int64_t T = x.a->seq;
    place(w, x.a);
    if (!x.bias.table)
        w->bias.x = NULL;
    memset(w->seen, 0xff, sizeof w->seen);
    load_masks(w, &x.mask, T);
    for (int64_t c0 = 0, c1; c0 < T; c0 = c1) {
        c1 = section_end(w, c0, T);
        run_section(w, &x, job, c0, c1);
    }
}

void lm_attention_dx_bf16(const lm_call *c)
{
    attn_dx_run(c, run_job, scratch_bytes(c->attr));
}

size_t lm_attention_dx_bf16_work(const lm_call *c, int threads)
{
    return attn_run_work(threads, scratch_bytes(c->attr));
}
