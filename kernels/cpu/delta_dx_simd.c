/* SPDX-License-Identifier: Apache-2.0 */
/* delta_dx_simd.c -- the backward of the delta rule on vectors in F32: chunks in reverse, each from the state that
 * entered it.  A key head of a sequence with its value heads, whose gradients of queries and keys add up, is one
 * piece of work.
 *
 * With the names of kernels/delta.h, X = K S, M = scale Q K^T G and (I + L) V' = R = beta (V - e X):
 *     dV' = M^T dO + (d K) dS        dR = (I + L)^-T dV'       dM = dO V'^T       dL = -dR V'^T
 * and all else follows by the product rule; the gradient of each decay is a sum of products that are there
 * already, as d exp(x) = exp(x) dx. */
#include "kernels/cpu/delta_simd.h"

typedef struct {
    delta_decay y;
    double dgamma[C]; /* terms of one decay cancel */
    float rq[C], rk[C], dbeta[C], by[C];
    float G[C * C], P[C * C], KK[C * C], M[C * C], less[C * C], dM[C * C], N[C * C];
    float *q, *k, *dq, *dk, *t;        /* [C][ldd] */
    float *kt;                         /* [D][C] */
    float *v, *X, *V, *QS, *dout, *dV; /* [C][lde]; V: V', dV: dV', then dR */
    float *vt;                         /* [E][C] */
    float *S;                          /* [D][lde] */
    float *st;                         /* [E][ldd] */
    float *dS;                         /* [heads of the group][D][lde] */
} dx_scratch;

static int64_t group_of(const lm_delta_attr *a)
{
    return a->heads / a->key_heads;
}

static size_t scratch_bytes(const lm_delta_attr *a)
{
    int64_t D = a->key_dim, E = a->value_dim, ldd = padded(D, PAD), lde = padded(E, PAD);
    int64_t floats = C * (5 * ldd + D + 6 * lde + E) + D * lde * (1 + group_of(a)) + E * ldd;
    return (sizeof(dx_scratch) + (size_t)floats * sizeof(float) + 63) / 64 * 64;
}

static void place(dx_scratch *w, const delta_view *x)
{
    int64_t D = x->a->key_dim, E = x->a->value_dim;
    float **wide[] = { &w->q, &w->k, &w->dq, &w->dk, &w->t };
    float **deep[] = { &w->v, &w->X, &w->V, &w->QS, &w->dout, &w->dV };
    float *at = (float *)(w + 1);
    for (size_t i = 0; i < sizeof wide / sizeof *wide; i++, at += C * x->ldd)
        *wide[i] = at;
    for (size_t i = 0; i < sizeof deep / sizeof *deep; i++, at += C * x->lde)
        *deep[i] = at;
    w->kt = at;
    w->vt = w->kt + D * C;
    w->S = w->vt + E * C;
    w->st = w->S + D * x->lde;
    w->dS = w->st + E * x->ldd;
}

/* dgamma from gradients A [C][C] of numbers that have a factor G_ij: A holds gradient times number, which on the
 * diagonal do not depend on the decay. */
static void add_between(dx_scratch *w, const float *A)
{
    for (int64_t i = 0; i < C; i++)
        for (int64_t j = 0; j < i; j++) {
            w->dgamma[i] += A[i * C + j];
            w->dgamma[j] -= A[i * C + j];
        }
}

/* Corrections V' and what they are made from; `h` within the call. */
LM_INLINE void forward_again(lm_dtype t, dx_scratch *w, const delta_view *x, int64_t h)
{
    delta_decay *y = &w->y;
    int64_t D = x->a->key_dim, ldd = x->ldd, lde = x->lde;
    delta_values(t, x, y->row, y->n, h, w->v);
    delta_between(y, w->G);
    delta_times(w->M, w->P, w->G, NULL, false);
    for (int64_t i = 0; i < C; i++)
        w->by[i] = -y->beta[i];
    delta_times(w->less, w->KK, w->G, w->by, true);
    mm(&(mm_args){ C, lde, D, w->k, ldd, 1, w->S, lde, w->X, lde, false });
    mm(&(mm_args){ C, lde, D, w->q, ldd, 1, w->S, lde, w->QS, lde, false });
    delta_misses(y, w->v, w->X, w->V, lde);
    delta_solve(w->less, false, w->V, lde);
}

/* Gradients through o and through the state that leaves: dV', and parts of dq, dk and dgamma. */
static void from_results(dx_scratch *w, const delta_view *x, float *dS)
{
    delta_decay *y = &w->y;
    int64_t D = x->a->key_dim, E = x->a->value_dim, ldd = x->ldd, lde = x->lde;
    chunk_scale(w->t, w->k, C, ldd, y->d);
    mm(&(mm_args){ C, lde, C, w->M, 1, C, w->dout, lde, w->dV, lde, false });
    mm(&(mm_args){ C, lde, D, w->t, ldd, 1, dS, lde, w->dV, lde, true });
    chunk_turn(w->vt, C, w->V, C, lde, E);
    mm(&(mm_args){ C, C, E, w->dout, lde, 1, w->vt, C, w->dM, C, false });
    delta_times(w->N, w->dM, w->M, NULL, false);
    add_between(w, w->N);
    delta_times(w->dM, w->dM, w->G, NULL, false);
    mm(&(mm_args){ C, ldd, C, w->dM, C, 1, w->k, ldd, w->dq, ldd, true });
    mm(&(mm_args){ C, ldd, C, w->dM, 1, C, w->q, ldd, w->dk, ldd, true });
    for (int64_t i = 0; i < y->n; i++)
        w->dgamma[i] += y->e[i] * chunk_dot(w->QS + i * lde, w->dout + i * lde, lde);
    chunk_turn(w->st, ldd, dS, D, lde, E);
    mm(&(mm_args){ C, ldd, E, w->V, lde, 1, w->st, ldd, w->t, ldd, false });
    for (int64_t j = 0; j < y->n; j++) {
        float along = y->d[j] * chunk_dot(w->k + j * ldd, w->t + j * ldd, ldd);
        w->dgamma[y->last] += along;
        w->dgamma[j] -= along;
        for (int64_t d = 0; d < ldd; d += VF_LANES) {
            float *to = w->dk + j * ldd + d;
            vf_store(to, vf_fma(vf_load(w->t + j * ldd + d), vf_set(y->d[j]), vf_load(to)));
        }
    }
    w->dgamma[y->last] += y->e_last * chunk_dot(w->S, dS, D * lde);
}

/* The rest: gradients through the corrections, and of the state that entered. */
static void from_corrections(dx_scratch *w, const delta_view *x, float *dS)
{
    delta_decay *y = &w->y;
    int64_t D = x->a->key_dim, E = x->a->value_dim, ldd = x->ldd, lde = x->lde;
    delta_solve(w->less, true, w->dV, lde);
    mm(&(mm_args){ C, C, E, w->dV, lde, 1, w->vt, C, w->N, C, false });
    delta_times(w->dM, w->N, w->less, NULL, true); /* (-dL) (-L) */
    add_between(w, w->dM);
    for (int64_t i = 0; i < C; i++)
        w->by[i] = -1;
    delta_times(w->N, w->N, w->G, w->by, true);
    for (int64_t i = 0; i < y->n; i++) {
        float miss = -y->e[i] * chunk_dot(w->dV + i * lde, w->X + i * lde, lde);
        w->dbeta[i] = chunk_dot(w->N + i * C, w->KK + i * C, C) + miss +
                      chunk_dot(w->dV + i * lde, w->v + i * lde, lde);
        w->dgamma[i] += y->beta[i] * miss;
    }
    chunk_scale(w->N, w->N, C, C, y->beta);
    mm(&(mm_args){ C, ldd, C, w->N, C, 1, w->k, ldd, w->dk, ldd, true });
    mm(&(mm_args){ C, ldd, C, w->N, 1, C, w->k, ldd, w->dk, ldd, true });
    chunk_turn(w->st, ldd, w->S, D, lde, E);
    chunk_scale(w->X, w->dout, C, lde, y->e);
    mm(&(mm_args){ C, ldd, E, w->X, lde, 1, w->st, ldd, w->dq, ldd, true });
    for (int64_t i = 0; i < D * lde; i += VF_LANES)
        vf_store(dS + i, vf_load(dS + i) * vf_set(y->e_last));
    mm(&(mm_args){ D, lde, C, w->q, 1, ldd, w->X, lde, dS, lde, true });
    chunk_scale(w->dV, w->dV, C, lde, y->beta); /* dv */
    for (int64_t i = 0; i < C; i++)
        w->by[i] = -y->e[i];
    chunk_scale(w->X, w->dV, C, lde, w->by);
    mm(&(mm_args){ C, ldd, E, w->X, lde, 1, w->st, ldd, w->dk, ldd, true });
    mm(&(mm_args){ D, lde, C, w->k, 1, ldd, w->X, lde, dS, lde, true });
}

/* Gradients of g: sums from each row to the last; none where a document begins. */
static void put_decays(const lm_call *c, dx_scratch *w, const delta_view *x, int64_t m, int64_t h)
{
    delta_decay *y = &w->y;
    float *dg = c->out[1].data, *dbeta = c->out[2].data;
    double sum = 0;
    for (int64_t i = y->last; i >= 0; i--) {
        int64_t cell = (y->row + i) * x->a->heads + h, start = x->lo ? x->lo[y->row + i] : 0;
        sum += w->dgamma[i];
        dg[cell] = start == m * C + i ? 0 : (float)sum;
        dbeta[cell] = w->dbeta[i];
    }
}

LM_INLINE void run_head(lm_dtype t, const lm_call *c, dx_scratch *w, const delta_view *x, int64_t b,
                        int64_t m, int64_t h)
{
    const lm_delta_attr *a = x->a;
    int64_t D = a->key_dim, E = a->value_dim, H = a->heads, lde = x->lde;
    size_t size = lm_dtype_size(t);
    const float *state = (const float *)c->in[4].data + ((b * a->chunks + m) * H + h) * D * E;
    float *dS = w->dS + h % group_of(a) * D * lde;
    delta_decays(x, b * x->a->seq, x->a->seq, m, h, &w->y);
    pack_rows(LM_DTYPE_F32, w->S, lde, D, state, E, D, E, 1);
    pack_rows(t, w->dout, lde, C,
              (const char *)c->in[0].data + (w->y.row * H + h) * E * (int64_t)size, H * E, w->y.n,
              E, 1);
    memset(w->dgamma, 0, sizeof w->dgamma);
    forward_again(t, w, x, h);
    from_results(w, x, dS);
    from_corrections(w, x, dS);
    put_decays(c, w, x, m, h);
    for (int64_t i = 0; i < w->y.n; i++)
        VF_FOR(e, n, E, {
            int64_t at = (w->y.row + i) * x->pitch + 2 * a->key_heads * D + h * E + e;
            vf_put_any(t, c->out[0].data, at, vf_load(w->dV + i * lde + e), n);
        });
}

/* The gradient of x from that of its direction y = x r, times scale: r (dy - y <y,dy>); y holds scale y. */
LM_INLINE void put_directions(lm_dtype t, const lm_call *c, const dx_scratch *w,
                              const delta_view *x, int64_t head, int part, float scale)
{
    const float *y = part ? w->k : w->q, *dy = part ? w->dk : w->dq, *r = part ? w->rk : w->rq;
    int64_t D = x->a->key_dim;
    for (int64_t i = 0; i < w->y.n; i++) {
        int64_t at = (w->y.row + i) * x->pitch + (part * x->a->key_heads + head) * D;
        vf along = vf_set(chunk_dot(y + i * x->ldd, dy + i * x->ldd, x->ldd) / scale);
        VF_FOR(d, n, D, {
            vf v = vf_load(dy + i * x->ldd + d) * vf_set(scale);
            v = vf_fnma(vf_load(y + i * x->ldd + d), along, v) * vf_set(r[i]);
            vf_put_any(t, c->out[0].data, at + d, v, n);
        });
    }
}

LM_INLINE void run_keys(lm_dtype t, const lm_call *c, int64_t begin, int64_t end, int worker)
{
    delta_view x = delta_view_of(c, 1);
    const lm_delta_attr *a = x.a;
    int64_t D = a->key_dim, group = group_of(a);
    float scale = (float)a->scale;
    dx_scratch *w = (void *)((char *)c->work + (size_t)worker * scratch_bytes(a));
    place(w, &x);
    for (int64_t it = begin; it < end; it++) {
        int64_t b = it / a->key_heads, head = it % a->key_heads;
        memset(w->dS, 0, (size_t)(group * D * x.lde) * sizeof *w->dS);
        for (int64_t m = a->chunks - 1; m >= 0; m--) {
            int64_t row = b * a->seq + m * C, n = a->seq - m * C < C ? a->seq - m * C : C;
            delta_directions(t, &x, row, n, head, 0, scale, w->q, w->rq);
            delta_directions(t, &x, row, n, head, 1, 1, w->k, w->rk);
            chunk_turn(w->kt, C, w->k, C, x.ldd, D);
            mm(&(mm_args){ C, C, D, w->q, x.ldd, 1, w->kt, C, w->P, C, false });
            mm(&(mm_args){ C, C, D, w->k, x.ldd, 1, w->kt, C, w->KK, C, false });
            memset(w->dq, 0, (size_t)(2 * C * x.ldd) * sizeof *w->dq);
            for (int64_t h = head * group; h < (head + 1) * group; h++)
                run_head(t, c, w, &x, b, m, h);
            put_directions(t, c, w, &x, head, 0, scale);
            put_directions(t, c, w, &x, head, 1, 1);
        }
    }
}

static void keys_f32(void *ctx, int64_t begin, int64_t end, int worker)
{
    run_keys(LM_DTYPE_F32, ctx, begin, end, worker);
}

static void keys_bf16(void *ctx, int64_t begin, int64_t end, int worker)
{
    run_keys(LM_DTYPE_BF16, ctx, begin, end, worker);
}

void delta_dx_run(const lm_call *c)
{
    const lm_delta_attr *a = c->attr;
    lm_par_for(c->par, a->batch * a->key_heads, 1, VF_PICK(keys, c->in[1].dtype),
               (void *)(uintptr_t)c);
}

size_t delta_dx_bytes(const lm_call *c, int threads)
{
    return (size_t)threads * scratch_bytes(c->attr);
}
