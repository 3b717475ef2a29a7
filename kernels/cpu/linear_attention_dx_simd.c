/* SPDX-License-Identifier: Apache-2.0 */
/* linear_attention_dx_simd.c -- the backward of linear attention on vectors in F32: chunks in reverse, each from the state
 * that entered it, which a pass forward computed again.  A key head of a sequence with its query heads, whose gradients of
 * keys and values add up, is one piece of work.
 *
 * With the names of kernels/linear_attention.h, Q and K of features, N = do times the weights of rows, c = minus <do,o>
 * divided by the denominator (0 without one), A = (N V^T + c 1^T) W by element, and dS, dz of the state that leaves:
 *     dQ = A K + e (N S^T + c z^T)    dK = A^T Q + d (V dS^T + 1 dz^T)    dV = M^T N + d K dS
 *     dS <- e_last dS + (e Q)^T N     dz <- e_last dz + (e Q)^T c */
#include "kernels/cpu/linear_attention_simd.h"

typedef struct {
    la_chunk y;
    float zero[C], by[C], c[C], ec[C], M[C * C], A[C * C];
    float *q, *k, *v, *dout, *dq, *dk, *dv, *t; /* [C][ld] */
    float *kt, *vt;                             /* [D][C] */
    float *st, *dst;                            /* [D][ld]: S and dS transposed */
    float *dS;                                  /* [R][ld] */
} scratch;

static size_t scratch_bytes(const lm_linear_attention_attr *a)
{
    int64_t D = a->head_dim, ld = padded(D, PAD);
    int64_t floats = (8 * C + 2 * D + a->state_rows) * ld + 2 * D * C;
    return (sizeof(scratch) + (size_t)floats * sizeof(float) + 63) / 64 * 64;
}

/* The states before each chunk of one piece of work. */
static size_t states_bytes(const lm_linear_attention_attr *a)
{
    int64_t ld = padded(a->head_dim, PAD);
    return (size_t)(lm_linear_chunks(a->seq) * a->state_rows * ld) * sizeof(float);
}

/* How many such arrays there are: one of a piece, or of a worker if these are fewer. */
static int64_t states_count(const lm_linear_attention_attr *a, int64_t threads)
{
    int64_t pieces = a->batch * a->kv_heads;
    return pieces < threads ? pieces : threads;
}

static scratch *scratch_of(const lm_call *call, int worker, const la_view *x)
{
    scratch *w = (void *)((char *)call->work + (size_t)worker * scratch_bytes(x->a));
    float **wide[] = { &w->q, &w->k, &w->v, &w->dout, &w->dq, &w->dk, &w->dv, &w->t };
    float *at = (float *)(w + 1);
    for (size_t i = 0; i < sizeof wide / sizeof *wide; i++, at += C * x->ld)
        *wide[i] = at;
    w->kt = at;
    w->vt = w->kt + x->a->head_dim * C;
    w->st = w->vt + x->a->head_dim * C;
    w->dst = w->st + x->a->head_dim * x->ld;
    w->dS = w->dst + x->a->head_dim * x->ld;
    memset(w->zero, 0, sizeof w->zero);
    return w;
}

/* The states before all chunks. */
LM_INLINE void run_forward(lm_dtype t, scratch *w, const la_view *x, int64_t row, int64_t j,
                           float *S)
{
    const size_t bytes = (size_t)x->size * sizeof *S;
    memset(S, 0, bytes);
    for (int64_t m = 0; m + 1 < lm_linear_chunks(x->a->seq); m++, S += x->size) {
        la_chunk_at(x, row, x->a->seq, m, &w->y);
        la_keys(t, x, &w->y, j, w->k, w->v);
        memcpy(S + x->size, S, bytes);
        la_carry(x, &w->y, w->k, w->v, w->t, S + x->size);
    }
}

/* Parts of dK and dV that come through the state that leaves, and what passes it by. */
static void from_state(scratch *w, const la_view *x)
{
    const int64_t D = x->a->head_dim, ld = x->ld, n = w->y.blocks;
    chunk_turn(w->dst, ld, w->dS, D, ld, D);
    la_mm(x, &(mm_args){ n, ld, D, w->v, ld, 1, w->dst, ld, w->dk, ld, false });
    la_mm(x, &(mm_args){ n, ld, D, w->k, ld, 1, w->dS, ld, w->dv, ld, false });
    for (int64_t i = 0; x->a->feature == LM_FEATURE_ELU && i < w->y.n; i++)
        for (int64_t d = 0; d < ld; d += VF_LANES)
            vf_store(w->dk + i * ld + d, vf_load(w->dk + i * ld + d) + vf_load(w->dS + D * ld + d));
    chunk_scale(w->dk, w->dk, n, ld, w->y.d);
    chunk_scale(w->dv, w->dv, n, ld, w->y.d);
    la_scale_state(x, w->y.e_last, ld, w->dS);
}

/* N in w->dout, and c, of query head h. */
LM_INLINE void read_results(lm_dtype t, const lm_call *call, scratch *w, const la_view *x,
                            int64_t h)
{
    const int64_t D = x->a->head_dim, ld = x->ld, wide = x->a->heads * D;
    const int64_t at = (w->y.row * wide + h * D) * (int64_t)lm_dtype_size(t);
    const bool divided = x->a->feature == LM_FEATURE_ELU;
    pack_rows(t, w->dout, ld, w->y.blocks, (const char *)call->in[0].data + at, wide, w->y.n, D, 1);
    if (divided)
        pack_rows(t, w->t, ld, w->y.blocks, (const char *)call->in[2].data + at, wide, w->y.n, D,
                  1);
    for (int64_t i = 0; i < w->y.blocks; i++) {
        w->c[i] = divided ? -chunk_dot(w->dout + i * ld, w->t + i * ld, ld) * w->by[i] /
                                (float)x->a->scale
                          : 0;
        w->ec[i] = w->y.e[i] * w->c[i];
    }
    chunk_scale(w->dout, w->dout, w->y.blocks, ld, w->by);
}

/* n rows of a head: gradients of its features become its own, and are stored from column `at` on. */
LM_INLINE void put_features(lm_dtype t, const lm_call *call, const scratch *w, const la_view *x,
                            int64_t at, const float *y, const float *dy)
{
    const bool identity = x->a->feature == LM_FEATURE_IDENTITY;
    for (int64_t i = 0; i < w->y.n; i++)
        VF_FOR(d, n, x->a->head_dim, {
            vf v = vf_load(dy + i * x->ld + d);
            if (!identity)
                v = v * vf_min(vf_set(1), vf_load(y + i * x->ld + d));
            vf_put_any(t, call->out[0].data, (w->y.row + i) * x->pitch + at + d, v, n);
        });
}

LM_INLINE void run_head(lm_dtype t, const lm_call *call, scratch *w, const la_view *x,
                        const float *S, int64_t h)
{
    const int64_t D = x->a->head_dim, ld = x->ld, n = w->y.blocks;
    const float *z = S + D * ld;
    la_chunk *y = &w->y;
    la_queries(t, x, y, h, w->q);
    la_pairs(x, y, w->q, w->kt, w->zero, w->M);
    la_weights(x, y, w->q, w->M, z, w->by);
    read_results(t, call, w, x, h);
    la_pairs(x, y, w->dout, w->vt, w->c, w->A);
    la_mm(x, &(mm_args){ n, ld, D, w->dout, ld, 1, w->st, ld, w->dq, ld, false });
    chunk_scale(w->dq, w->dq, n, ld, y->e);
    for (int64_t i = 0; x->a->feature == LM_FEATURE_ELU && i < y->n; i++)
        for (int64_t d = 0; d < ld; d += VF_LANES)
            vf_store(w->dq + i * ld + d,
                     vf_fma(vf_set(w->ec[i]), vf_load(z + d), vf_load(w->dq + i * ld + d)));
    la_mix(x, y, w->A, w->k, w->dq);
    la_mix_back(x, y, w->A, w->q, w->dk);
    la_mix_back(x, y, w->M, w->dout, w->dv);
    put_features(t, call, w, x, h * D, w->q, w->dq);
    if (x->a->feature == LM_FEATURE_ELU)
        la_add_rows(x, y, 0, ld, w->q, w->ec, w->dS + D * ld);
    chunk_scale(w->q, w->q, n, ld, y->e);
    la_mm(x, &(mm_args){ D, ld, y->n, w->q, 1, ld, w->dout, ld, w->dS, ld, true });
}

LM_INLINE void run_chunk(lm_dtype t, const lm_call *call, scratch *w, const la_view *x, int64_t row,
                         int64_t m, int64_t j, const float *S)
{
    const lm_linear_attention_attr *a = x->a;
    const int64_t D = a->head_dim, ld = x->ld, key = (a->heads + j) * D;
    la_chunk_at(x, row, a->seq, m, &w->y);
    la_keys(t, x, &w->y, j, w->k, w->v);
    chunk_turn(w->kt, C, w->k, w->y.blocks, ld, D);
    chunk_turn(w->vt, C, w->v, w->y.blocks, ld, D);
    chunk_turn(w->st, ld, S, D, ld, D);
    from_state(w, x);
    for (int64_t h = j * x->group; h < (j + 1) * x->group; h++)
        run_head(t, call, w, x, S, h);
    put_features(t, call, w, x, key, w->k, w->dk);
    for (int64_t i = 0; i < w->y.n; i++)
        VF_FOR(d, n, D, {
            vf_put_any(t, call->out[0].data, (w->y.row + i) * x->pitch + key + a->kv_heads * D + d,
                       vf_load(w->dv + i * ld + d), n);
        });
}

LM_INLINE void run_keys(lm_dtype t, const lm_call *call, int64_t begin, int64_t end, int worker)
{
    const la_view x = la_view_of(call, 1, 3);
    const lm_linear_attention_attr *a = x.a;
    const int64_t threads = lm_par_threads(call->par);
    char *states = (char *)call->work + (size_t)threads * scratch_bytes(a);
    scratch *w = scratch_of(call, worker, &x);
    la_begin();
    for (int64_t it = begin; it < end; it++) {
        int64_t j = it % a->kv_heads, row = it / a->kv_heads * a->seq;
        int64_t own = a->batch * a->kv_heads < threads ? it : worker;
        float *S = (float *)(states + (size_t)own * states_bytes(a));
        la_powers(&x, j, &w->y);
        run_forward(t, w, &x, row, j, S);
        memset(w->dS, 0, (size_t)x.size * sizeof *w->dS);
        for (int64_t m = lm_linear_chunks(a->seq) - 1; m >= 0; m--)
            run_chunk(t, call, w, &x, row, m, j, S + m * x.size);
    }
    la_end();
}

static void keys_f32(void *ctx, int64_t begin, int64_t end, int worker)
{
    run_keys(LM_DTYPE_F32, ctx, begin, end, worker);
}

static void keys_bf16(void *ctx, int64_t begin, int64_t end, int worker)
{
    run_keys(LM_DTYPE_BF16, ctx, begin, end, worker);
}

void linear_attention_dx_run(const lm_call *c)
{
    const lm_linear_attention_attr *a = c->attr;
    lm_par_for(c->par, a->batch * a->kv_heads, 1, VF_PICK(keys, c->in[1].dtype),
               (void *)(uintptr_t)c);
}

size_t linear_attention_dx_work(const lm_call *c, int threads)
{
    const lm_linear_attention_attr *a = c->attr;
    return (size_t)threads * scratch_bytes(a) + (size_t)states_count(a, threads) * states_bytes(a);
}
