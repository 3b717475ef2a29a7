/* SPDX-License-Identifier: Apache-2.0 */
/* linear_attention_dx_simd.c -- the backward of linear attention on vectors in F32: chunks in reverse, each from the state
 * that entered it, which a pass forward computed again.  A key head of a sequence with its query heads, whose gradients of
 * keys and values add up, is one piece of work.
 *
 * With the names of kernels/linear_attention.h, Q and K of features, N = do times the weights of rows, c = minus <do,o>
 * divided by the denominator (0 without one), A = (N V^T + c 1^T) W by element, and dS, dz of the state that leaves:
 *     dQ = A K + e (N S^T + c z^T)    dK = A^T Q + d (V dS^T + 1 dz^T)    dV = M^T N + d K dS
 *     dS <- e_last dS + (e Q)^T N     dz <- e_last dz + (e Q)^T c
 *
 * Where pieces are fewer than threads, these share the chunks: the states before all chunks, in which columns are pieces; then,
 * for some chunks at a time from the last on, what a chunk has without dS (dQ, A^T Q, M^T N and what it adds to dS), the dS of
 * each in turn, in which rows are pieces, and what dS adds to dK and dV.  Both ways give the same bits. */
#include "kernels/cpu/linear_attention_simd.h"

typedef struct {
    la_chunk y;
    float zero[C], by[C], c[C], ec[C], M[C * C], A[C * C];
    float *q, *k, *v, *dout, *dq, *dk, *dv, *t; /* [C][ld] */
    float *kt, *vt;                             /* [D][C] */
    float *st, *dst;                            /* [D][ld]: S and dS transposed */
    float *dS, *G;                              /* [R][ld]: of the state that leaves; added to it */
} scratch;

static size_t scratch_bytes(const lm_linear_attention_attr *a)
{
    int64_t D = a->head_dim, ld = padded(D, PAD);
    int64_t floats = (8 * C + 2 * D + 2 * a->state_rows) * ld + 2 * D * C;
    return (sizeof(scratch) + (size_t)floats * sizeof(float) + 63) / 64 * 64;
}

/* The states before each chunk of one piece of work. */
static size_t states_bytes(const lm_linear_attention_attr *a)
{
    int64_t ld = padded(a->head_dim, PAD);
    return (size_t)(lm_linear_chunks(a->seq) * a->state_rows * ld) * sizeof(float);
}

/* Chunks of each piece between two passes, which bounds what they keep; 0: a thread has whole pieces, of which there are
 * enough.  Chunks that threads share read their keys three times. */
static int64_t chunks_at_once(const lm_linear_attention_attr *a, int64_t threads)
{
    const int64_t pieces = a->batch * a->kv_heads, n = (4 * threads + pieces - 1) / pieces;
    const int64_t all = lm_linear_chunks(a->seq);
    if (all < 2 || pieces >= threads)
        return 0;
    return n < all ? n : all;
}

/* Gradients of a chunk: G, then dk and dv. */
static int64_t kept_floats(const lm_linear_attention_attr *a)
{
    return (a->state_rows + 2 * C) * padded(a->head_dim, PAD);
}

/* How many arrays of states there are: one of a piece, or of a worker if these are fewer. */
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
    w->G = w->dS + x->size;
    memset(w->zero, 0, sizeof w->zero);
    return w;
}

/* Add to dk and dv of the chunk what comes through the state that leaves, of gradient dS. */
static void add_from_state(scratch *w, const la_view *x, const float *dS, float *dk, float *dv)
{
    const int64_t D = x->a->head_dim, ld = x->ld, n = w->y.blocks;
    const float *dz = x->a->feature == LM_FEATURE_ELU ? dS + D * ld : NULL;
    chunk_turn(w->dst, ld, dS, D, ld, D);
    la_mm(x, &(mm_args){ n, ld, D, w->v, ld, 1, w->dst, ld, w->t, ld, false });
    for (int64_t i = 0; i < n; i++)
        for (int64_t d = 0; d < ld; d += VF_LANES) {
            vf t = vf_load(w->t + i * ld + d);
            if (dz)
                t = t + vf_load(dz + d);
            vf_store(dk + i * ld + d, vf_fma(vf_set(w->y.d[i]), t, vf_load(dk + i * ld + d)));
        }
    la_mm(x, &(mm_args){ n, ld, D, w->k, ld, 1, dS, ld, w->t, ld, false });
    for (int64_t i = 0; i < n; i++)
        for (int64_t d = 0; d < ld; d += VF_LANES)
            vf_store(dv + i * ld + d, vf_fma(vf_set(w->y.d[i]), vf_load(w->t + i * ld + d),
                                             vf_load(dv + i * ld + d)));
}

/* Rows [from, to) of the gradient of the state that leaves a chunk become those of the one that entered it. */
static void pass_state(const la_view *x, const la_chunk *y, const float *G, int64_t from,
                       int64_t to, float *dS)
{
    for (int64_t i = from * x->ld; i < to * x->ld; i += VF_LANES) {
        vf past = vf_zero();
        if (y->e_last > 0)
            past = vf_load(dS + i) * vf_set(y->e_last);
        vf_store(dS + i, past + vf_load(G + i));
    }
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

/* A query head of the chunk: its dQ is stored, and what it gives is added to G, dk and dv. */
LM_INLINE void run_head(lm_dtype t, const lm_call *call, scratch *w, const la_view *x,
                        const float *S, int64_t h, float *G, float *dk, float *dv)
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
    la_mix_back(x, y, w->A, w->q, dk);
    la_mix_back(x, y, w->M, w->dout, dv);
    put_features(t, call, w, x, h * D, w->q, w->dq);
    if (x->a->feature == LM_FEATURE_ELU)
        la_add_rows(x, y, 0, ld, w->q, w->ec, G + D * ld);
    chunk_scale(w->q, w->q, n, ld, y->e);
    la_mm(x, &(mm_args){ D, ld, y->n, w->q, 1, ld, w->dout, ld, G, ld, true });
}

/* Keys and values of chunk m of key head j. */
LM_INLINE void begin_chunk(lm_dtype t, scratch *w, const la_view *x, int64_t row, int64_t m,
                           int64_t j)
{
    la_chunk_at(x, row, x->a->seq, m, &w->y);
    la_keys(t, x, &w->y, j, w->k, w->v);
}

/* What the chunk has without dS: dQ, and in zeroed memory G and the parts of dk and dv. */
LM_INLINE void chunk_alone(lm_dtype t, const lm_call *call, scratch *w, const la_view *x, int64_t j,
                           const float *S, float *G, float *dk, float *dv)
{
    const int64_t D = x->a->head_dim, ld = x->ld;
    chunk_turn(w->kt, C, w->k, w->y.blocks, ld, D);
    chunk_turn(w->vt, C, w->v, w->y.blocks, ld, D);
    chunk_turn(w->st, ld, S, D, ld, D);
    memset(G, 0, (size_t)x->size * sizeof *G);
    memset(dk, 0, (size_t)(C * ld) * sizeof *dk);
    memset(dv, 0, (size_t)(C * ld) * sizeof *dv);
    for (int64_t h = j * x->group; h < (j + 1) * x->group; h++)
        run_head(t, call, w, x, S, h, G, dk, dv);
}

/* With dS the gradients of keys and values are whole, and are stored. */
LM_INLINE void chunk_whole(lm_dtype t, const lm_call *call, scratch *w, const la_view *x, int64_t j,
                           const float *dS, float *dk, float *dv)
{
    const lm_linear_attention_attr *a = x->a;
    const int64_t D = a->head_dim, key = (a->heads + j) * D;
    add_from_state(w, x, dS, dk, dv);
    put_features(t, call, w, x, key, w->k, dk);
    for (int64_t i = 0; i < w->y.n; i++)
        VF_FOR(d, n, D, {
            vf_put_any(t, call->out[0].data, (w->y.row + i) * x->pitch + key + a->kv_heads * D + d,
                       vf_load(dv + i * x->ld + d), n);
        });
}

/* ---- a piece by one thread ---- */

static char *states_of(const lm_call *call)
{
    return (char *)call->work + (size_t)lm_par_threads(call->par) * scratch_bytes(call->attr);
}

LM_INLINE void run_keys(lm_dtype t, const lm_call *call, int64_t begin, int64_t end, int worker)
{
    const la_view x = la_view_of(call, 1, 3);
    const lm_linear_attention_attr *a = x.a;
    const int64_t all = lm_linear_chunks(a->seq);
    scratch *w = scratch_of(call, worker, &x);
    la_begin();
    for (int64_t it = begin; it < end; it++) {
        int64_t j = it % a->kv_heads, row = it / a->kv_heads * a->seq;
        int64_t own = a->batch * a->kv_heads < lm_par_threads(call->par) ? it : worker;
        float *S = (float *)(void *)(states_of(call) + (size_t)own * states_bytes(a));
        la_powers(&x, j, &w->y);
        la_copy_columns(&x, x.ld, NULL, S);
        la_states(t, &x, &w->y, row, 0, all - 1, j, 0, x.ld, w->k, w->v, w->t, S);
        memset(w->dS, 0, (size_t)x.size * sizeof *w->dS);
        for (int64_t m = all - 1; m >= 0; m--) {
            begin_chunk(t, w, &x, row, m, j);
            chunk_alone(t, call, w, &x, j, S + m * x.size, w->G, w->dk, w->dv);
            chunk_whole(t, call, w, &x, j, w->dS, w->dk, w->dv);
            pass_state(&x, &w->y, w->G, 0, a->state_rows, w->dS);
        }
    }
    la_end();
}

/* ---- pieces whose chunks threads share ---- */

typedef struct {
    const lm_call *c;
    int64_t parts; /* of the columns of a state */
    int64_t from, n, most;
    char *states,
        *kept; /* S of all chunks of each piece; of each dS behind the chunks at hand, and what is kept of these */
} shared_chunks;

static shared_chunks shared_of(const lm_call *c)
{
    const lm_linear_attention_attr *a = c->attr;
    const int64_t pieces = a->batch * a->kv_heads, threads = lm_par_threads(c->par),
                  columns = padded(a->head_dim, PAD) / PAD;
    shared_chunks s = { .c = c, .most = chunks_at_once(a, threads), .states = states_of(c) };
    s.parts = threads / pieces < columns ? threads / pieces : columns;
    s.kept = s.states + (size_t)pieces * states_bytes(a);
    return s;
}

static float *states_before(const shared_chunks *s, int64_t piece, const la_view *x, int64_t m)
{
    return (float *)(void *)(s->states + (size_t)piece * states_bytes(x->a)) + m * x->size;
}

/* dS behind the chunks at hand. */
static float *last_gradient(const shared_chunks *s, int64_t piece, const la_view *x)
{
    return (float *)(void *)s->kept + piece * (x->size + s->most * kept_floats(x->a));
}

/* Of number i of the chunks at hand: G, which becomes dS, and dk and dv behind it. */
static float *kept_of(const shared_chunks *s, int64_t piece, const la_view *x, int64_t i)
{
    return last_gradient(s, piece, x) + x->size + i * kept_floats(x->a);
}

/* A piece: some columns of the states of a key head. */
LM_INLINE void run_states(lm_dtype t, const shared_chunks *s, int64_t begin, int64_t end,
                          int worker)
{
    const la_view x = la_view_of(s->c, 1, 3);
    const int64_t K = x.a->kv_heads, T = x.a->seq;
    scratch *w = scratch_of(s->c, worker, &x);
    la_begin();
    for (int64_t it = begin; it < end; it++) {
        const int64_t piece = it / s->parts;
        int64_t at, wide = la_part(&x, it % s->parts, s->parts, &at);
        float *S = states_before(s, piece, &x, 0);
        la_powers(&x, piece % K, &w->y);
        la_copy_columns(&x, wide, NULL, S + at);
        la_copy_columns(&x, wide, NULL, last_gradient(s, piece, &x) + at);
        la_states(t, &x, &w->y, piece / K * T, 0, lm_linear_chunks(T) - 1, piece % K, at, wide,
                  w->k, w->v, w->t, S);
    }
    la_end();
}

/* A piece: a chunk of a key head; whole: with its dS. */
LM_INLINE void run_chunks(lm_dtype t, const shared_chunks *s, bool whole, int64_t begin,
                          int64_t end, int worker)
{
    const la_view x = la_view_of(s->c, 1, 3);
    const int64_t K = x.a->kv_heads, T = x.a->seq;
    scratch *w = scratch_of(s->c, worker, &x);
    la_begin();
    for (int64_t it = begin; it < end; it++) {
        const int64_t piece = it / s->n, i = it % s->n, j = piece % K;
        float *G = kept_of(s, piece, &x, i), *dk = G + x.size, *dv = dk + C * x.ld;
        la_powers(&x, j, &w->y);
        begin_chunk(t, w, &x, piece / K * T, s->from + i, j);
        if (whole)
            chunk_whole(t, s->c, w, &x, j, G, dk, dv);
        else
            chunk_alone(t, s->c, w, &x, j, states_before(s, piece, &x, s->from + i), G, dk, dv);
    }
    la_end();
}

/* A piece: a row of the gradients of a key head's states, from chunk to chunk: G of each is read, and dS takes its place. */
static void run_gradients(void *ctx, int64_t begin, int64_t end, int worker)
{
    const shared_chunks *s = ctx;
    const la_view x = la_view_of(s->c, 1, 3);
    const int64_t K = x.a->kv_heads, T = x.a->seq, R = x.a->state_rows;
    scratch *w = scratch_of(s->c, worker, &x);
    for (int64_t it = begin; it < end; it++) {
        const int64_t piece = it / R, row = it % R;
        const size_t bytes = (size_t)x.ld * sizeof(float);
        float *dS = last_gradient(s, piece, &x) + row * x.ld;
        la_powers(&x, piece % K, &w->y);
        for (int64_t i = s->n - 1; i >= 0; i--) {
            float *G = kept_of(s, piece, &x, i) + row * x.ld;
            la_chunk_at(&x, piece / K * T, T, s->from + i, &w->y);
            memcpy(w->t, dS, bytes);
            pass_state(&x, &w->y, G, 0, 1, dS);
            memcpy(G, w->t, bytes);
        }
    }
}

#define LA_PASS(name, call)                                                    \
    static void name##_f32(void *ctx, int64_t begin, int64_t end, int worker)  \
    {                                                                          \
        const lm_dtype t = LM_DTYPE_F32;                                       \
        call;                                                                  \
    }                                                                          \
    static void name##_bf16(void *ctx, int64_t begin, int64_t end, int worker) \
    {                                                                          \
        const lm_dtype t = LM_DTYPE_BF16;                                      \
        call;                                                                  \
    }
LA_PASS(keys, run_keys(t, ctx, begin, end, worker))
LA_PASS(states, run_states(t, ctx, begin, end, worker))
LA_PASS(alone, run_chunks(t, ctx, false, begin, end, worker))
LA_PASS(whole, run_chunks(t, ctx, true, begin, end, worker))

static void run_shared(const lm_call *c)
{
    const lm_linear_attention_attr *a = c->attr;
    const int64_t pieces = a->batch * a->kv_heads;
    shared_chunks s = shared_of(c);
    lm_par_for(c->par, pieces * s.parts, 1, VF_PICK(states, c->in[1].dtype), &s);
    for (int64_t end = lm_linear_chunks(a->seq); end > 0; end = s.from) {
        s.n = end < s.most ? end : s.most;
        s.from = end - s.n;
        lm_par_for(c->par, pieces * s.n, 1, VF_PICK(alone, c->in[1].dtype), &s);
        lm_par_for(c->par, pieces * a->state_rows, 8, run_gradients, &s);
        lm_par_for(c->par, pieces * s.n, 1, VF_PICK(whole, c->in[1].dtype), &s);
    }
}

void linear_attention_dx_run(const lm_call *c)
{
    const lm_linear_attention_attr *a = c->attr;
    if (chunks_at_once(a, lm_par_threads(c->par)))
        run_shared(c);
    else
        lm_par_for(c->par, a->batch * a->kv_heads, 1, VF_PICK(keys, c->in[1].dtype),
                   (void *)(uintptr_t)c);
}

size_t linear_attention_dx_work(const lm_call *c, int threads)
{
    const lm_linear_attention_attr *a = c->attr;
    const int64_t n = chunks_at_once(a, threads),
                  each = a->state_rows * padded(a->head_dim, PAD) + n * kept_floats(a);
    return (size_t)threads * scratch_bytes(a) + (size_t)states_count(a, threads) * states_bytes(a) +
           (n ? (size_t)(a->batch * a->kv_heads * each) * sizeof(float) : 0);
}
