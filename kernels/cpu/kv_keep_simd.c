/* SPDX-License-Identifier: Apache-2.0 */
/* kv_keep_simd.c -- masses of tokens on vectors: 64 keys of a head against all rows of queries, so that each sum has one
 * owner and one order.  Few rows (new tokens) are multiplied with keys as they lie, more with keys that are turned once;
 * of BF16 by tiles (kv_keep_amx.c). */
#include <math.h>

#include "kernels/cpu/attention_simd.h"
#include "kernels/cpu/kv_mass.h"
#include "kernels/cpu/kv_wide.h"
#include "kernels/cpu/tables.h"

enum {
    MASS_KEYS_AT_ONCE = BC, /* keys of a unit */
    MASS_ROWS = BR,         /* rows of queries at once */
    MASS_FEW = 8,           /* rows of a head that do not pay for turning keys */
};

typedef struct {
    const lm_call *c;
    int64_t ld, units;        /* units: of a head */
    size_t scratch, prepared; /* bytes of a worker; of all workers, before these: of coded keys */
} mass_call;

typedef struct {
    kv_tile_scratch *tile; /* of coded keys */
    float *keys;           /* [64][ld], and turned [ld][64] */
    float *turned, *q, *s;
} mass_scratch;

static mass_call mass_call_of(const lm_call *c)
{
    const lm_kv_mass_attr *a = c->attr;
    mass_call m = { .c = c, .ld = padded(a->attention.head_dim, PAD) };
    m.units = (c->out[0].dim[2] + MASS_KEYS_AT_ONCE - 1) / MASS_KEYS_AT_ONCE;
    const lm_tensor *keys = &c->in[MASS_KEYS];
    if (keys->kv) {
        m.prepared = attn_round64(sizeof(kv_levels)) + fixed_bytes(keys);
        m.scratch = attn_round64(sizeof(kv_tile_scratch));
    }
    m.scratch +=
        (size_t)(2 * MASS_KEYS_AT_ONCE * m.ld + MASS_ROWS * m.ld + MASS_ROWS * MASS_KEYS_AT_ONCE) *
        sizeof(float);
    return m;
}

static mass_scratch scratch_of(const mass_call *m, int worker)
{
    char *at = (char *)m->c->work + m->prepared + (size_t)worker * m->scratch;
    mass_scratch w = { .tile = (kv_tile_scratch *)(void *)at };
    w.keys = (float *)(void *)(at + (m->prepared ? attn_round64(sizeof *w.tile) : 0));
    w.turned = w.keys + MASS_KEYS_AT_ONCE * m->ld;
    w.q = w.turned + MASS_KEYS_AT_ONCE * m->ld;
    w.s = w.q + MASS_ROWS * m->ld;
    return w;
}

/* Keys [j0, j1), none of them coded, as floats; zeros behind them. */
LM_INLINE void load_keys(lm_dtype t, const mass_seq *s, int64_t j0, int64_t j1, int64_t ld,
                         float *to)
{
    int64_t D = s->a->attention.head_dim;
    for (int64_t j = j0; j < j1; j++)
        pack_rows(t, to + (j - j0) * ld, ld, 1, mass_plain(s, j), D, 1, D, 1);
    memset(to + (j1 - j0) * ld, 0, (size_t)((j0 + MASS_KEYS_AT_ONCE - j1) * ld) * sizeof *to);
}

/* Keys [j0, j1), turned, of which some are coded. */
LM_INLINE void turn_coded(lm_dtype t, const mass_call *m, const mass_seq *s, int64_t j0, int64_t j1,
                          const mass_scratch *w)
{
    const lm_tensor *keys = &m->c->in[MASS_KEYS];
    int64_t D = s->a->attention.head_dim, sinks = s->a->sinks;
    kv_seq q = { .kv = s->kv, .T = s->page, .D = D, .table = s->pages, .k.f = keys->kv };
    lm_kv_page(keys->kv, s->page, D, &q.k.at, NULL);
    q.k.step = (size_t)keys->dim[1] * q.k.at.all;
    q.k.pages = (const char *)keys->data + (size_t)s->kv * q.k.at.all;
    memset(w->turned, 0, (size_t)(D * MASS_KEYS_AT_ONCE) * sizeof(float));
    for (int64_t j = j0; j < j1; j += LM_KV_TILE) {
        int64_t end = j + LM_KV_TILE < j1 ? j + LM_KV_TILE : j1;
        if (j < s->coded && end > sinks)
            wide_keys(&q, m->c->work, j, w->tile, w->turned + (j - j0));
        for (int64_t i = j; i < end; i++) {
            const void *plain = mass_plain(s, i);
            for (int64_t d = 0; plain && d < D; d++)
                w->turned[d * MASS_KEYS_AT_ONCE + i - j0] =
                    t == LM_DTYPE_BF16 ? lm_bf16_to_f32(((const uint16_t *)plain)[d])
                                       : ((const float *)plain)[d];
        }
    }
}

/* Scores of n rows with the keys: rows of 64. */
static void score_rows(const mass_call *m, const mass_scratch *w, int64_t D, int64_t n, bool few)
{
    if (!few) {
        mm(&(mm_args){ .m = n,
                       .n = MASS_KEYS_AT_ONCE,
                       .k = D,
                       .a = w->q,
                       .a_row = m->ld,
                       .a_k = 1,
                       .b = w->turned,
                       .ldb = MASS_KEYS_AT_ONCE,
                       .c = w->s,
                       .ldc = MASS_KEYS_AT_ONCE });
        return;
    }
    for (int64_t j = 0; j < MASS_KEYS_AT_ONCE; j++)
        for (int64_t r = 0; r < n; r++) {
            vf sum = vf_zero();
            for (int64_t d = 0; d < m->ld; d += VF_LANES)
                sum = vf_fma(vf_load(w->q + r * m->ld + d), vf_load(w->keys + j * m->ld + d), sum);
            w->s[r * MASS_KEYS_AT_ONCE + j] = vf_sum(sum);
        }
}

/* Query heads of n rows, which begin with row r0 of those from `first` on: numbers times the scale, or as they are. */
LM_INLINE void load_queries(lm_dtype t, const mass_call *m, const mass_seq *s, int64_t first,
                            int64_t r0, int64_t n, bool tiles, const mass_scratch *w)
{
    const lm_attention_attr *a = &s->a->attention;
    int64_t group = a->heads / a->kv_heads, D = a->head_dim;
    for (int64_t r = 0; r < n; r++) {
        int64_t i = first + (r0 + r) / group, h = s->kv * group + (r0 + r) % group;
        int64_t at = ((s->row + i) * lm_kv_mass_row(s->a) + h) * D;
        const void *q = attn_at(m->c->in[MASS_QKV].data, at, lm_dtype_size(t));
        if (tiles)
            memcpy((uint16_t *)(void *)w->q + r * D, q, (size_t)D * sizeof(uint16_t));
        else
            pack_rows(t, w->q + r * m->ld, m->ld, 1, q, D, 1, D, (float)a->scale);
    }
}

#ifdef MASS_TILES
/* Keys [j0, j1) as columns of tiles: [D / 32][4] of them, zeros behind. */
static void load_key_tiles(const mass_seq *s, int64_t j0, int64_t j1, const mass_scratch *w)
{
    int64_t D = s->a->attention.head_dim;
    uint16_t *rows = (uint16_t *)(void *)w->keys, *to = (uint16_t *)(void *)w->turned;
    for (int64_t j = j0; j < j1; j++)
        memcpy(rows + (j - j0) * D, mass_plain(s, j), (size_t)D * sizeof *rows);
    for (int64_t d = 0; d < D; d += 32)
        for (int64_t k = 0; k < MASS_KEYS_AT_ONCE; k += 16, to += TILE)
            pack_columns(to, rows + k * D, D, d, D, j1 - j0 - k);
}

static void score_tiles(const mass_scratch *w, int64_t D, int64_t n)
{
    for (int64_t r = 0; r < n; r += 16) {
        const uint16_t *q = (const uint16_t *)(const void *)w->q + r * D;
        const uint16_t *k = (const uint16_t *)(const void *)w->turned;
        float *to = w->s + r * MASS_KEYS_AT_ONCE;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t d = 0; d < D; d += 32, k += 4 * TILE) {
            _tile_loadd(4, q + d, D * 2);
            _tile_loadd(5, k, 64);
            _tile_dpbf16ps(0, 4, 5);
            _tile_loadd(6, k + TILE, 64);
            _tile_dpbf16ps(1, 4, 6);
            _tile_loadd(7, k + 2 * TILE, 64);
            _tile_dpbf16ps(2, 4, 7);
            _tile_loadd(5, k + 3 * TILE, 64);
            _tile_dpbf16ps(3, 4, 5);
        }
        _tile_stored(0, to, MASS_KEYS_AT_ONCE * 4);
        _tile_stored(1, to + 16, MASS_KEYS_AT_ONCE * 4);
        _tile_stored(2, to + 32, MASS_KEYS_AT_ONCE * 4);
        _tile_stored(3, to + 48, MASS_KEYS_AT_ONCE * 4);
    }
}
#endif

/* Add the probabilities of a row of scores, of which [from, to) are visible. */
LM_INLINE void add_row(const lm_attention_attr *a, float *s, float scale, int64_t from, int64_t to,
                       float lse, vf sum[MASS_KEYS_AT_ONCE / VF_LANES])
{
    for (int64_t x = 0; x < MASS_KEYS_AT_ONCE && scale != 1; x += VF_LANES)
        vf_store(s + x, vf_load(s + x) * vf_set(scale));
    if (a->soft_cap > 0)
        cap_scores(s, MASS_KEYS_AT_ONCE, (float)a->soft_cap);
    for (int64_t x = 0; x < MASS_KEYS_AT_ONCE; x += VF_LANES) {
        vf p = vf_exp(vf_load(s + x) - vf_set(lse));
        sum[x / VF_LANES] = sum[x / VF_LANES] + keep_range(p, x, from, to, vf_zero());
    }
}

/* Keys [j0, j1) of a head: rows first .. last of the queries see some of them. */
LM_INLINE void weigh_keys(lm_dtype t, const mass_call *m, const mass_seq *s, int64_t j0, int64_t j1,
                          int64_t first, const mass_scratch *w)
{
    const lm_attention_attr *a = &s->a->attention;
    const float *lse = m->c->in[MASS_LSE].data;
    int64_t group = a->heads / a->kv_heads, D = a->head_dim, rows = (s->fresh - first) * group;
    bool coded = m->prepared > 0, few = rows <= MASS_FEW && !coded, tiles = false;
    vf sum[MASS_KEYS_AT_ONCE / VF_LANES];
#ifdef MASS_TILES
    tiles = t == LM_DTYPE_BF16 && !few && !coded && D % 32 == 0;
    if (tiles)
        load_key_tiles(s, j0, j1, w);
#endif
    for (int i = 0; i < MASS_KEYS_AT_ONCE / VF_LANES; i++)
        sum[i] = vf_zero();
    if (coded)
        turn_coded(t, m, s, j0, j1, w);
    else if (!tiles)
        load_keys(t, s, j0, j1, m->ld, w->keys);
    if (!few && !coded && !tiles)
        pack_turned(w->turned, MASS_KEYS_AT_ONCE, w->keys, m->ld, D);
    for (int64_t r0 = 0; r0 < rows; r0 += MASS_ROWS) {
        int64_t n = rows - r0 < MASS_ROWS ? rows - r0 : MASS_ROWS;
        load_queries(t, m, s, first, r0, n, tiles, w);
#ifdef MASS_TILES
        if (tiles)
            score_tiles(w, D, n);
#endif
        if (!tiles)
            score_rows(m, w, D, n, few);
        for (int64_t r = 0; r < n; r++) {
            int64_t i = first + (r0 + r) / group, h = s->kv * group + (r0 + r) % group, from, to;
            visible(&s->mask, i, j0, &from, &to);
            add_row(a, w->s + r * MASS_KEYS_AT_ONCE, tiles ? (float)a->scale : 1, from, to,
                    lse[(s->row + i) * a->heads + h], sum);
        }
    }
    for (int64_t x = 0; x < j1 - j0; x += VF_LANES) {
        int64_t live = j1 - j0 - x < VF_LANES ? j1 - j0 - x : VF_LANES;
        float *to = s->mass + j0 + x;
        vf_store_n(to, vf_load_n(to, live) + sum[x / VF_LANES], live);
    }
}

LM_INLINE void mass_units(lm_dtype t, void *ctx, int64_t begin, int64_t end, int worker)
{
    const mass_call *m = ctx;
    const lm_attention_attr *a = &((const lm_kv_mass_attr *)m->c->attr)->attention;
    mass_scratch w = scratch_of(m, worker);
#ifdef MASS_TILES
    tiles_begin();
#endif
    for (int64_t u = begin; u < end; u++) {
        int64_t bk = u / m->units, j0 = u % m->units * MASS_KEYS_AT_ONCE;
        mass_seq s = mass_seq_of(m->c, bk / a->kv_heads, bk % a->kv_heads);
        int64_t j1 = s.used + s.fresh, first = s.seen;
        if (first < s.fresh && j0 > s.used + first) /* the row of the first key */
            first = j0 - s.used;
        if (first >= s.fresh)
            continue;
        j1 = j1 < j0 + MASS_KEYS_AT_ONCE ? j1 : j0 + MASS_KEYS_AT_ONCE;
        weigh_keys(t, m, &s, j0, j1, first, &w);
    }
#ifdef MASS_TILES
    tiles_end();
#endif
}

static void mass_units_f32(void *ctx, int64_t begin, int64_t end, int worker)
{
    mass_units(LM_DTYPE_F32, ctx, begin, end, worker);
}

static void mass_units_bf16(void *ctx, int64_t begin, int64_t end, int worker)
{
    mass_units(LM_DTYPE_BF16, ctx, begin, end, worker);
}

static void kv_mass(const lm_call *c)
{
    const lm_kv_mass_attr *a = c->attr;
    mass_call m = mass_call_of(c);
    if (m.prepared)
        prepare_side(&c->in[MASS_KEYS], c->work, (char *)c->work + attn_round64(sizeof(kv_levels)));
    lm_par_for(c->par, a->attention.batch * a->attention.kv_heads * m.units, 1,
               c->in[MASS_QKV].dtype == LM_DTYPE_BF16 ? mass_units_bf16 : mass_units_f32, &m);
}

static size_t kv_mass_work(const lm_call *c, int threads)
{
    mass_call m = mass_call_of(c);
    return m.prepared + m.scratch * (size_t)threads;
}

/* ---- rows that stay ---- */

/* A row of a head: `n` rows of x times their weights. */
LM_INLINE void sum_rows(lm_dtype t, const char *x, int64_t n, int64_t D, const float *weight,
                        char *to)
{
    size_t size = lm_dtype_size(t);
    if (!weight) {
        memcpy(to, x, (size_t)D * size);
        return;
    }
    VF_FOR(d, live, D, {
        vf sum = vf_zero();
        for (int64_t j = 0; j < n; j++)
            sum =
                vf_fma(vf_set(weight[j]), vf_get_any(t, x + (size_t)(j * D) * size, d, live), sum);
        vf_put_any(t, to, d, sum, live);
    });
}

LM_INLINE void gather_rows(lm_dtype t, void *ctx, int64_t begin, int64_t end)
{
    const lm_call *c = ctx;
    const lm_kv_gather_attr *a = c->attr;
    int64_t H = a->heads, K = a->kv_heads, D = a->head_dim, M = a->rows, S = c->in[0].dim[2];
    const int32_t *at = c->in[2].data, *count = c->in[3].data, *run = opt_data(c->in, c->n_in, 4);
    const float *weight = opt_data(c->in, c->n_in, 5);
    size_t head = (size_t)D * lm_dtype_size(t), row = (size_t)(H + 2 * K) * head;
    for (int64_t i = begin; i < end; i++) {
        char *y = (char *)c->out[0].data + (size_t)i * row;
        bool live = i % M < count[i / M];
        memset(y, 0, live ? (size_t)H * head : row);
        for (int64_t k = 0; live && k < K; k++) {
            int64_t bk = i / M * K + k, from = at[bk * M + i % M];
            int64_t n = run ? run[bk * M + i % M] : 1;
            for (int side = 0; side < 2; side++)
                sum_rows(t, (const char *)c->in[side].data + (size_t)(bk * S + from) * head, n, D,
                         weight ? weight + bk * S + from : NULL,
                         y + (size_t)(H + side * K + k) * head);
        }
    }
}
VF_TYPED(gather_rows)

static void kv_gather(const lm_call *c)
{
    lm_par_for(c->par, row_count(&c->out[0]), grain_rows(last_dim(&c->out[0])),
               VF_PICK(gather_rows, c->in[0].dtype), (void *)(uintptr_t)c);
}

const lm_kernel LM_TABLE_NAME(kv_keep, LM_SIMD)[] = {
    VF_KERNEL("kv_mass", kv_mass, kv_mass_work),
    VF_KERNEL("kv_gather", kv_gather, NULL),
    VF_KERNEL_END,
};
