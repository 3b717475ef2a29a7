/* SPDX-License-Identifier: Apache-2.0 */
/* delta_simd.c -- the delta rule on vectors in F32, chunk by chunk; a value head of a sequence is one piece of work. */
#include "kernels/cpu/delta_simd.h"

#include "kernels/cpu/state_rows.h"
#include "kernels/kv_code.h"

#define CODE_PASTE(level) lm_kv_code_##level
#define CODE(level)       CODE_PASTE(level)

/* Scratch of a worker. */
typedef struct {
    delta_decay y;
    float r[C], G[C * C], M[C * C], less[C * C];
    float *q, *k, *kt, *v, *X, *o, *S; /* [C][ldd] twice, [D][C], [C][lde] three times, [D][lde] */
    float *own;                        /* [D][E]: a state that is kept as codes */
} delta_scratch;

static int64_t scratch_floats(const lm_delta_attr *a)
{
    int64_t ldd = padded(a->key_dim, PAD), lde = padded(a->value_dim, PAD);
    return C * (2 * ldd + a->key_dim + 3 * lde) + 2 * a->key_dim * lde;
}

static size_t scratch_bytes(const lm_delta_attr *a)
{
    return (sizeof(delta_scratch) + (size_t)scratch_floats(a) * sizeof(float) + 63) / 64 * 64;
}

static void place(delta_scratch *w, const delta_view *x)
{
    w->q = (float *)(w + 1);
    w->k = w->q + C * x->ldd;
    w->v = w->k + C * x->ldd;
    w->X = w->v + C * x->lde;
    w->o = w->X + C * x->lde;
    w->kt = w->o + C * x->lde;
    w->S = w->kt + C * x->a->key_dim;
    w->own = w->S + x->a->key_dim * x->lde;
}

/* The results of chunk m of a sequence of `rows` rows from `row` on in w->o, and S behind it. */
LM_INLINE void run_chunk(lm_dtype t, delta_scratch *w, const delta_view *x, int64_t row,
                         int64_t rows, int64_t m, int64_t h)
{
    const lm_delta_attr *a = x->a;
    delta_decay *y = &w->y;
    int64_t D = a->key_dim, ldd = x->ldd, lde = x->lde, head = h / (a->heads / a->key_heads);
    delta_decays(x, row, rows, m, h, y);
    delta_directions(t, x, y->row, y->n, head, 0, (float)a->scale, w->q, w->r);
    delta_directions(t, x, y->row, y->n, head, 1, 1, w->k, w->r);
    delta_values(t, x, y->row, y->n, h, w->v);
    chunk_turn(w->kt, C, w->k, C, ldd, D);
    delta_between(y, w->G);
    mm(&(mm_args){ C, C, D, w->q, ldd, 1, w->kt, C, w->M, C, false });
    delta_times(w->M, w->M, w->G, NULL, false);
    mm(&(mm_args){ C, C, D, w->k, ldd, 1, w->kt, C, w->less, C, false });
    for (int64_t i = 0; i < C; i++)
        y->beta[i] = -y->beta[i];
    delta_times(w->less, w->less, w->G, y->beta, true);
    for (int64_t i = 0; i < C; i++)
        y->beta[i] = -y->beta[i];
    mm(&(mm_args){ C, lde, D, w->k, ldd, 1, w->S, lde, w->X, lde, false });
    delta_misses(y, w->v, w->X, w->v, lde);
    delta_solve(w->less, false, w->v, lde);
    mm(&(mm_args){ C, lde, D, w->q, ldd, 1, w->S, lde, w->o, lde, false });
    chunk_scale(w->o, w->o, C, lde, y->e);
    mm(&(mm_args){ C, lde, C, w->M, C, 1, w->v, lde, w->o, lde, true });
    for (int64_t i = 0; i < D * lde; i += VF_LANES)
        vf_store(w->S + i, vf_load(w->S + i) * vf_set(y->e_last));
    chunk_scale(w->k, w->k, C, ldd, y->d);
    mm(&(mm_args){ D, lde, C, w->k, 1, ldd, w->v, lde, w->S, lde, true });
}

LM_INLINE void put_chunk(lm_dtype t, const lm_call *c, const delta_scratch *w, const delta_view *x,
                         int64_t h)
{
    int64_t E = x->a->value_dim;
    for (int64_t i = 0; i < w->y.n; i++)
        VF_FOR(e, n, E, {
            vf_put_any(t, c->out[0].data, ((w->y.row + i) * x->a->heads + h) * E + e,
                       vf_load(w->o + i * x->lde + e), n);
        });
}

LM_INLINE void run_heads(lm_dtype t, const lm_call *c, int64_t begin, int64_t end, int worker)
{
    delta_view x = delta_view_of(c, 0);
    const lm_delta_attr *a = x.a;
    int64_t D = a->key_dim, E = a->value_dim, H = a->heads;
    delta_scratch *w = (void *)((char *)c->work + (size_t)worker * scratch_bytes(a));
    float *states = opt_data(c->out, c->n_out, 1);
    place(w, &x);
    for (int64_t it = begin; it < end; it++) {
        int64_t b = it / H, h = it % H;
        memset(w->S, 0, (size_t)(D * x.lde) * sizeof *w->S);
        for (int64_t m = 0; m < a->chunks; m++) {
            float *keep = states ? states + ((b * a->chunks + m) * H + h) * D * E : NULL;
            for (int64_t d = 0; keep && d < D; d++)
                memcpy(keep + d * E, w->S + d * x.lde, (size_t)E * sizeof *keep);
            run_chunk(t, w, &x, b * a->seq, a->seq, m, h);
            put_chunk(t, c, w, &x, h);
        }
    }
}

static void heads_f32(void *ctx, int64_t begin, int64_t end, int worker)
{
    run_heads(LM_DTYPE_F32, ctx, begin, end, worker);
}

static void heads_bf16(void *ctx, int64_t begin, int64_t end, int worker)
{
    run_heads(LM_DTYPE_BF16, ctx, begin, end, worker);
}

static void delta(const lm_call *c)
{
    const lm_delta_attr *a = c->attr;
    lm_par_for(c->par, a->batch * a->heads, 1, VF_PICK(heads, c->in[0].dtype),
               (void *)(uintptr_t)c);
}

/* ---- delta_cached ---- */

/* One row: the state in memory, [D][E], as the recurrence has it.  q [D] and k [D] are in w. */
LM_INLINE void run_token(lm_dtype t, const lm_call *c, delta_scratch *w, const delta_view *x,
                         const state_rows *s, int64_t h, float *S)
{
    const lm_delta_attr *a = x->a;
    int64_t D = a->key_dim, E = a->value_dim, cell = s->row * a->heads + h;
    int64_t head = h / (a->heads / a->key_heads), v = s->row * x->pitch + (x->pitch - a->heads * E);
    vf decay = vf_set(s->used ? expf(x->g[cell]) : 0), beta = vf_set(x->beta[cell]);
    delta_direction(t, x, s->row, head, 0, (float)a->scale, w->q);
    delta_direction(t, x, s->row, head, 1, 1, w->k);
    if (!s->used)
        memset(S, 0, (size_t)(D * E) * sizeof *S);
    VF_FOR(e, n, E, {
        vf seen = vf_zero();
        vf o = vf_zero();
        for (int64_t d = 0; d < D; d++)
            seen = vf_fma(vf_set(w->k[d]), vf_get_any(LM_DTYPE_F32, S, d * E + e, n), seen);
        vf fix = beta * vf_fnma(decay, seen, vf_get_any(t, x->qkv, v + h * E + e, n));
        for (int64_t d = 0; d < D; d++) {
            vf now =
                vf_fma(vf_set(w->k[d]), fix, decay * vf_get_any(LM_DTYPE_F32, S, d * E + e, n));
            vf_put_any(LM_DTYPE_F32, S, d * E + e, now, n);
            o = vf_fma(vf_set(w->q[d]), now, o);
        }
        vf_put_any(t, c->out[0].data, cell * E + e, o, n);
    });
}

LM_INLINE void run_prompt(lm_dtype t, const lm_call *c, delta_scratch *w, const delta_view *x,
                          const state_rows *s, int64_t h, float *S)
{
    int64_t D = x->a->key_dim, E = x->a->value_dim;
    memset(w->S, 0, (size_t)(D * x->lde) * sizeof *w->S);
    for (int64_t d = 0; s->used && d < D; d++)
        memcpy(w->S + d * x->lde, S + d * E, (size_t)E * sizeof *S);
    for (int64_t m = 0; m < lm_delta_chunks(s->fresh); m++) {
        run_chunk(t, w, x, s->row, s->fresh, m, h);
        put_chunk(t, c, w, x, h);
    }
    for (int64_t d = 0; d < D; d++)
        memcpy(S + d * E, w->S + d * x->lde, (size_t)E * sizeof *S);
}

/* A piece of work is a value head of a sequence; those behind the last are of rows without a sequence. */
LM_INLINE void run_cached(lm_dtype t, const lm_call *c, int64_t begin, int64_t end, int worker)
{
    delta_view x = delta_view_of(c, 0);
    const lm_delta_attr *a = x.a;
    const lm_kv_format *f = c->out[1].kv;
    int64_t D = a->key_dim, E = a->value_dim, H = a->heads;
    const size_t state = f ? lm_kv_page_bytes(f, D, E) : (size_t)(D * E) * sizeof(float);
    delta_scratch *w = (void *)((char *)c->work + (size_t)worker * scratch_bytes(a));
    x.lo = NULL;
    place(w, &x);
    for (int64_t it = begin; it < end; it++) {
        state_rows s = state_rows_of(c, 3, a->seq, it / H);
        int64_t h = it % H;
        char *kept = (char *)c->out[1].data + (size_t)(s.slot * H + h) * state;
        float *S = f ? w->own : (float *)(void *)kept;
        if (f && s.fresh && s.used)
            CODE(LM_SIMD).decode(f, D, E, h, kept, 0, D, S, E);
        if (s.fresh && s.token)
            run_token(t, c, w, &x, &s, h, S);
        else if (s.fresh)
            run_prompt(t, c, w, &x, &s, h, S);
        if (f && s.fresh)
            CODE(LM_SIMD).encode(f, D, E, h, S, E, 0, D, NULL, kept);
        for (int64_t i = s.fresh; i < s.n; i++)
            memset((char *)c->out[0].data + (size_t)(((s.row + i) * H + h) * E) * lm_dtype_size(t),
                   0, (size_t)E * lm_dtype_size(t));
    }
}

static void cached_f32(void *ctx, int64_t begin, int64_t end, int worker)
{
    run_cached(LM_DTYPE_F32, ctx, begin, end, worker);
}

static void cached_bf16(void *ctx, int64_t begin, int64_t end, int worker)
{
    run_cached(LM_DTYPE_BF16, ctx, begin, end, worker);
}

static void delta_cached(const lm_call *c)
{
    const lm_delta_attr *a = c->attr;
    lm_par_for(c->par, (a->batch + 1) * a->heads, 1, VF_PICK(cached, c->in[0].dtype),
               (void *)(uintptr_t)c);
}

static size_t delta_work(const lm_call *c, int threads)
{
    return (size_t)threads * scratch_bytes(c->attr);
}

const lm_kernel LM_TABLE_NAME(delta, LM_SIMD)[] = {
    VF_KERNEL("delta", delta, delta_work),
    VF_KERNEL("delta_dx", delta_dx_run, delta_dx_bytes),
    VF_KERNEL("delta_cached", delta_cached, delta_work),
    VF_KERNEL_END,
};
