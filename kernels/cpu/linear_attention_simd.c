/* SPDX-License-Identifier: Apache-2.0 */
/* linear_attention_simd.c -- linear attention on vectors in F32, chunk by chunk; a key head of a sequence, with its query
 * heads, is one piece of work.
 *
 * Where these are fewer than threads, there are two passes: the states before all chunks, in which columns of a state are
 * pieces, then the results of chunks, which do not wait for each other.  Both give the bits of one pass. */
#include "kernels/cpu/linear_attention_simd.h"

#include "kernels/cpu/state_rows.h"

/* Scratch of a worker. */
typedef struct {
    la_chunk y;
    float zero[C], by[C], M[C * C];
    float *q, *o, *k, *v, *t; /* [C or query heads][ld] twice, [C][ld] three times */
    float *kt, *S;            /* [D][C], [R][ld] */
} scratch;

static int64_t wide_rows(const lm_linear_attention_attr *a)
{
    int64_t group = a->heads / a->kv_heads;
    return group > C ? group : C;
}

static size_t scratch_bytes(const lm_linear_attention_attr *a)
{
    int64_t ld = padded(a->head_dim, PAD);
    int64_t floats = (2 * wide_rows(a) + 3 * C + a->state_rows) * ld + a->head_dim * C;
    return (sizeof(scratch) + (size_t)floats * sizeof(float) + 63) / 64 * 64;
}

static scratch *scratch_of(const lm_call *c, int worker, const la_view *x)
{
    scratch *w = (void *)((char *)c->work + (size_t)worker * scratch_bytes(x->a));
    memset(w->zero, 0, sizeof w->zero);
    w->q = (float *)(w + 1);
    w->o = w->q + wide_rows(x->a) * x->ld;
    w->k = w->o + wide_rows(x->a) * x->ld;
    w->v = w->k + C * x->ld;
    w->t = w->v + C * x->ld;
    w->kt = w->t + C * x->ld;
    w->S = w->kt + x->a->head_dim * C;
    return w;
}

/* The results of chunk m of a sequence of `rows` rows from `row` on; S: the state before it. */
LM_INLINE void chunk_results(lm_dtype t, const lm_call *c, scratch *w, const la_view *x,
                             int64_t row, int64_t rows, int64_t m, int64_t j, const float *S)
{
    const lm_linear_attention_attr *a = x->a;
    const int64_t D = a->head_dim, ld = x->ld;
    la_chunk *y = &w->y;
    la_chunk_at(x, row, rows, m, y);
    la_keys(t, x, y, j, w->k, w->v);
    chunk_turn(w->kt, C, w->k, y->blocks, ld, D);
    for (int64_t h = j * x->group; h < (j + 1) * x->group; h++) {
        la_queries(t, x, y, h, w->q);
        la_pairs(x, y, w->q, w->kt, w->zero, w->M);
        la_weights(x, y, w->q, w->M, S + D * ld, w->by);
        la_mm(x, &(mm_args){ y->blocks, ld, D, w->q, ld, 1, S, ld, w->o, ld, false });
        chunk_scale(w->o, w->o, y->blocks, ld, y->e);
        la_mix(x, y, w->M, w->v, w->o);
        for (int64_t i = 0; i < y->n; i++)
            VF_FOR(d, n, D, {
                vf_put_any(t, c->out[0].data, ((y->row + i) * a->heads + h) * D + d,
                           vf_load(w->o + i * ld + d) * vf_set(w->by[i]), n);
            });
    }
}

/* The same, and w->S becomes the state behind it. */
LM_INLINE void run_chunk(lm_dtype t, const lm_call *c, scratch *w, const la_view *x, int64_t row,
                         int64_t rows, int64_t m, int64_t j)
{
    chunk_results(t, c, w, x, row, rows, m, j, w->S);
    la_carry(x, &w->y, w->k, w->v, w->t, w->S);
}

LM_INLINE void run_heads(lm_dtype t, const lm_call *c, int64_t begin, int64_t end, int worker)
{
    const la_view x = la_view_of(c, 0, 1);
    scratch *w = scratch_of(c, worker, &x);
    la_begin();
    for (int64_t it = begin; it < end; it++) {
        int64_t b = it / x.a->kv_heads, j = it % x.a->kv_heads;
        memset(w->S, 0, (size_t)x.size * sizeof *w->S);
        la_powers(&x, j, &w->y);
        for (int64_t m = 0; m < lm_linear_chunks(x.a->seq); m++)
            run_chunk(t, c, w, &x, b * x.a->seq, x.a->seq, m, j);
    }
    la_end();
}

static void heads_f32(void *ctx, int64_t begin, int64_t end, int worker)
{
    run_heads(LM_DTYPE_F32, ctx, begin, end, worker);
}

static void heads_bf16(void *ctx, int64_t begin, int64_t end, int worker)
{
    run_heads(LM_DTYPE_BF16, ctx, begin, end, worker);
}

/* ---- two passes ---- */

/* In how many parts the first pass cuts the columns of a state; 0: one pass is enough.  Keys and values are read twice, which
 * pays off where several query heads read them, and otherwise from three threads for a key head on. */
static int64_t parts_of(const lm_linear_attention_attr *a, int64_t threads)
{
    const int64_t heads = a->batch * a->kv_heads, columns = padded(a->head_dim, PAD) / PAD;
    const int64_t least = a->heads > a->kv_heads ? heads + 1 : 3 * heads;
    if (threads < least || lm_linear_chunks(a->seq) < 2)
        return 0;
    return threads / heads < columns ? threads / heads : columns;
}

/* Chunks between two passes: the states before them take little memory, and give each thread some of the work. */
static int64_t chunks_at_once(const lm_linear_attention_attr *a, int64_t threads)
{
    const int64_t heads = a->batch * a->kv_heads, n = (4 * threads + heads - 1) / heads;
    const int64_t all = lm_linear_chunks(a->seq);
    return n < all ? n : all;
}

/* Some chunks of all key heads, in two passes. */
typedef struct {
    const lm_call *c;
    int64_t parts, from, n, most; /* n chunks from number `from` on, of at most `most` */
} passes;

/* The states of a key head before each of these chunks, and behind the last one. */
static float *states_of(const passes *p, const la_view *x, int64_t head)
{
    char *all = (char *)p->c->work + (size_t)lm_par_threads(p->c->par) * scratch_bytes(x->a);
    return (float *)(void *)all + head * (p->most + 1) * x->size;
}

/* A piece: some columns of the states of a key head. */
LM_INLINE void run_states(lm_dtype t, const passes *p, int64_t begin, int64_t end, int worker)
{
    const la_view x = la_view_of(p->c, 0, 1);
    const int64_t K = x.a->kv_heads, T = x.a->seq;
    scratch *w = scratch_of(p->c, worker, &x);
    la_begin();
    for (int64_t it = begin; it < end; it++) {
        const int64_t head = it / p->parts;
        int64_t at, wide = la_part(&x, it % p->parts, p->parts, &at);
        float *S = states_of(p, &x, head);
        la_powers(&x, head % K, &w->y);
        la_copy_columns(&x, wide, p->from ? S + p->most * x.size + at : NULL, S + at);
        la_states(t, &x, &w->y, head / K * T, p->from, p->n, head % K, at, wide, w->k, w->v, w->t,
                  S);
    }
    la_end();
}

/* A piece: a chunk of a key head. */
LM_INLINE void run_results(lm_dtype t, const passes *p, int64_t begin, int64_t end, int worker)
{
    const la_view x = la_view_of(p->c, 0, 1);
    const int64_t K = x.a->kv_heads, T = x.a->seq;
    scratch *w = scratch_of(p->c, worker, &x);
    la_begin();
    for (int64_t it = begin; it < end; it++) {
        const int64_t head = it / p->n, m = it % p->n;
        la_powers(&x, head % K, &w->y);
        chunk_results(t, p->c, w, &x, head / K * T, T, p->from + m, head % K,
                      states_of(p, &x, head) + m * x.size);
    }
    la_end();
}

static void states_f32(void *ctx, int64_t begin, int64_t end, int worker)
{
    run_states(LM_DTYPE_F32, ctx, begin, end, worker);
}

static void states_bf16(void *ctx, int64_t begin, int64_t end, int worker)
{
    run_states(LM_DTYPE_BF16, ctx, begin, end, worker);
}

static void results_f32(void *ctx, int64_t begin, int64_t end, int worker)
{
    run_results(LM_DTYPE_F32, ctx, begin, end, worker);
}

static void results_bf16(void *ctx, int64_t begin, int64_t end, int worker)
{
    run_results(LM_DTYPE_BF16, ctx, begin, end, worker);
}

static void linear_attention(const lm_call *c)
{
    const lm_linear_attention_attr *a = c->attr;
    const int64_t threads = lm_par_threads(c->par), heads = a->batch * a->kv_heads;
    const int64_t all = lm_linear_chunks(a->seq);
    passes p = { .c = c, .parts = parts_of(a, threads), .most = chunks_at_once(a, threads) };
    if (!p.parts) {
        lm_par_for(c->par, heads, 1, VF_PICK(heads, c->in[0].dtype), (void *)(uintptr_t)c);
        return;
    }
    for (; p.from < all; p.from += p.n) {
        p.n = all - p.from < p.most ? all - p.from : p.most;
        lm_par_for(c->par, heads * p.parts, 1, VF_PICK(states, c->in[0].dtype), &p);
        lm_par_for(c->par, heads * p.n, 1, VF_PICK(results, c->in[0].dtype), &p);
    }
}

static size_t linear_attention_work(const lm_call *c, int threads)
{
    const lm_linear_attention_attr *a = c->attr;
    const int64_t state = a->state_rows * padded(a->head_dim, PAD);
    const int64_t states = a->batch * a->kv_heads * (chunks_at_once(a, threads) + 1);
    return (size_t)threads * scratch_bytes(a) +
           (parts_of(a, threads) ? (size_t)(states * state) * sizeof(float) : 0);
}

/* ---- linear_attention_cached ---- */

/* Row d of the state in memory, S [D], after a token: a S + k v; added to the results of the query heads, q of each. */
LM_INLINE void step_row(const la_view *x, scratch *w, float a, int64_t d, float *S)
{
    const int64_t D = x->a->head_dim;
    const vf decay = vf_set(a), k = vf_set(w->k[d]);
    VF_FOR(e, n, D, {
        vf s = vf_fma(k, vf_load(w->v + e), decay * vf_get_any(LM_DTYPE_F32, S, e, n));
        vf_put_any(LM_DTYPE_F32, S, e, s, n);
        vf_store(w->o + e, vf_fma(vf_set(w->q[d]), s, vf_load(w->o + e)));
    });
    for (int64_t g = 1; g < x->group; g++)
        VF_FOR(e, n, D, {
            float *o = w->o + g * x->ld + e;
            vf q = vf_set(w->q[g * x->ld + d]);
            vf_store(o, vf_fma(q, vf_get_any(LM_DTYPE_F32, S, e, n), vf_load(o)));
        });
}

/* z in memory after a token. */
LM_INLINE void step_sums(const la_view *x, scratch *w, float a, float *z)
{
    VF_FOR(d, n, x->a->head_dim, {
        vf now = vf_fma(vf_set(a), vf_get_any(LM_DTYPE_F32, z, d, n), vf_load(w->k + d));
        vf_put_any(LM_DTYPE_F32, z, d, now, n);
    });
}

/* What weighs the results of query head g. */
LM_INLINE float token_weight(const la_view *x, const scratch *w, int64_t g, const float *z)
{
    vf sum = vf_zero();
    if (x->a->feature == LM_FEATURE_IDENTITY)
        return (float)x->a->scale;
    VF_FOR(d, n, x->a->head_dim, {
        sum = vf_fma(vf_load(w->q + g * x->ld + d), vf_get_any(LM_DTYPE_F32, z, d, n), sum);
    });
    return (float)x->a->scale / (vf_sum(sum) + (float)x->a->eps);
}

/* One row: the state in memory, [R][D], as the recurrence has it. */
LM_INLINE void run_token(lm_dtype t, const lm_call *c, scratch *w, const la_view *x,
                         const state_rows *s, int64_t j, float *S)
{
    const lm_linear_attention_attr *at = x->a;
    const int64_t D = at->head_dim, key = (at->heads + j) * D;
    const float a = (float)exp(lm_linear_log_decay(at->decay, j));
    la_rows(t, x, s->row, j * x->group * D, D, x->group, x->group, w->q);
    la_rows(t, x, s->row, key, D, 1, 1, w->k);
    la_rows(t, x, s->row, key + at->kv_heads * D, D, 1, 1, w->v);
    la_features(x, x->group, w->q);
    la_features(x, 1, w->k);
    memset(w->o, 0, (size_t)(x->group * x->ld) * sizeof *w->o);
    if (!s->used)
        memset(S, 0, (size_t)(at->state_rows * D) * sizeof *S);
    for (int64_t d = 0; d < D; d++)
        step_row(x, w, a, d, S + d * D);
    if (at->feature == LM_FEATURE_ELU)
        step_sums(x, w, a, S + D * D);
    for (int64_t g = 0; g < x->group; g++) {
        vf by = vf_set(token_weight(x, w, g, S + D * D));
        VF_FOR(e, n, D, {
            vf_put_any(t, c->out[0].data, (s->row * at->heads + j * x->group + g) * D + e,
                       by * vf_load(w->o + g * x->ld + e), n);
        });
    }
}

LM_INLINE void run_prompt(lm_dtype t, const lm_call *c, scratch *w, const la_view *x,
                          const state_rows *s, int64_t j, float *S)
{
    const int64_t D = x->a->head_dim;
    la_powers(x, j, &w->y);
    memset(w->S, 0, (size_t)x->size * sizeof *w->S);
    for (int64_t d = 0; s->used && d < x->a->state_rows; d++)
        memcpy(w->S + d * x->ld, S + d * D, (size_t)D * sizeof *S);
    for (int64_t m = 0; m < lm_linear_chunks(s->fresh); m++)
        run_chunk(t, c, w, x, s->row, s->fresh, m, j);
    for (int64_t d = 0; d < x->a->state_rows; d++)
        memcpy(S + d * D, w->S + d * x->ld, (size_t)D * sizeof *S);
}

/* A piece of work is a key head of a sequence; those behind the last are of rows without a sequence. */
LM_INLINE void run_cached(lm_dtype t, const lm_call *c, int64_t begin, int64_t end, int worker)
{
    la_view x = la_view_of(c, 0, 1);
    const lm_linear_attention_attr *a = x.a;
    const int64_t K = a->kv_heads, size = a->state_rows * a->head_dim;
    const int64_t wide = x.group * a->head_dim;
    scratch *w = scratch_of(c, worker, &x);
    x.lo = NULL; /* input 1 is another */
    la_begin();
    for (int64_t it = begin; it < end; it++) {
        state_rows s = state_rows_of(c, 1, a->seq, it / K);
        int64_t j = it % K;
        float *S = (float *)c->out[1].data + (s.slot * K + j) * size;
        if (s.fresh && s.token)
            run_token(t, c, w, &x, &s, j, S);
        else if (s.fresh)
            run_prompt(t, c, w, &x, &s, j, S);
        for (int64_t i = s.fresh; i < s.n; i++)
            memset((char *)c->out[0].data +
                       (size_t)(((s.row + i) * K + j) * wide) * lm_dtype_size(t),
                   0, (size_t)wide * lm_dtype_size(t));
    }
    la_end();
}

static void cached_f32(void *ctx, int64_t begin, int64_t end, int worker)
{
    run_cached(LM_DTYPE_F32, ctx, begin, end, worker);
}

static void cached_bf16(void *ctx, int64_t begin, int64_t end, int worker)
{
    run_cached(LM_DTYPE_BF16, ctx, begin, end, worker);
}

static void linear_attention_cached(const lm_call *c)
{
    const lm_linear_attention_attr *a = c->attr;
    lm_par_for(c->par, (a->batch + 1) * a->kv_heads, 1, VF_PICK(cached, c->in[0].dtype),
               (void *)(uintptr_t)c);
}

static size_t work(const lm_call *c, int threads)
{
    return (size_t)threads * scratch_bytes(c->attr);
}

const lm_kernel LM_TABLE_NAME(linear_attention, LM_SIMD)[] = {
    LA_KERNEL("linear_attention", linear_attention, linear_attention_work),
    LA_KERNEL("linear_attention_dx", linear_attention_dx_run, linear_attention_dx_work),
    LA_KERNEL("linear_attention_cached", linear_attention_cached, work),
    VF_KERNEL_END,
};
