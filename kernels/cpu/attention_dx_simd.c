/* SPDX-License-Identifier: Apache-2.0 */
/* attention_dx_simd.c -- the backward of attention on vectors in F32: FlashAttention-2
 * (arXiv:2307.08691, algorithm 2), keys in the outer loop, queries in the inner one. */
#include "kernels/attention.h"

#include "kernels/cpu/attention_drop.h"
#include "kernels/cpu/attention_simd.h"

typedef struct {
    float p[BR][BC], ds[BR][BC], z[BC];
    float *lse, *delta;   /* [T] of the head */
    float *k, *kt, *vt;   /* [keys][ld], [keys/BC][D][BC], [keys/BC][E][BC] */
    float *dk, *dv;       /* [keys][ld] */
    float *q, *dout, *dq; /* [T][ld]; q times scale */
    float *sums;          /* of ds by distance, key - query + T - 1 [T + keys]; NULL: not wanted */
    int64_t ld, lk, lv;   /* the greater of D and E, D, and E, in whole vectors */
} dx_scratch;

static int64_t pitch_of(const lm_attention_attr *a)
{
    int64_t D = a->head_dim, E = lm_attention_value_dim(a);
    return padded(D > E ? D : E, PAD);
}

static size_t scratch_bytes(const lm_attention_attr *a)
{
    int64_t ld = pitch_of(a), n = padded(a->seq, BC);
    return attn_round64(sizeof(dx_scratch)) +
           (size_t)(2 * n + n * (6 * ld + a->head_dim + lm_attention_value_dim(a))) * sizeof(float);
}

static void place(dx_scratch *w, const lm_attention_attr *a)
{
    int64_t n = padded(a->seq, BC), ld = pitch_of(a);
    w->ld = ld;
    w->lk = padded(a->head_dim, PAD);
    w->lv = padded(lm_attention_value_dim(a), PAD);
    w->lse = (float *)((char *)w + attn_round64(sizeof *w));
    w->delta = w->lse + n;
    w->k = w->delta + n;
    w->dk = w->k + n * ld;
    w->dv = w->dk + n * ld;
    w->q = w->dv + n * ld;
    w->dout = w->q + n * ld;
    w->dq = w->dout + n * ld;
    w->kt = w->dq + n * ld;
    w->vt = w->kt + n * a->head_dim;
    w->sums = NULL;
}

/* Queries and output gradients of head h, D_i = rowsum(dO o) (algorithm 2, line 4), which sums that are not divided do
 * not have. */
LM_INLINE void load_head(lm_dtype t, dx_scratch *w, const attn_dx_view *x, int64_t h)
{
    int64_t D = x->a->head_dim, E = lm_attention_value_dim(x->a), T = x->a->seq, ld = w->ld;
    size_t size = lm_dtype_size(t);
    pack_rows(t, w->q, ld, T, attn_at(x->qkv, h * D, size), x->pitch, T, D, (float)x->a->scale);
    pack_rows(t, w->dout, ld, T, attn_at(x->dout, h * E, size), x->o_pitch, T, E, 1);
    for (int64_t i = 0; i < T; i++) {
        vf sum = vf_zero();
        VF_FOR(d, n, E, {
            vf o = vf_get_any(t, x->o, i * x->o_pitch + h * E + d, n);
            sum = vf_fma(o, vf_load(w->dout + i * ld + d), sum);
        });
        w->delta[i] = x->a->undivided ? 0 : vf_sum(sum);
        float lse = x->lse[h * T + i];
        w->lse[i] = lse == -INFINITY ? 0 : lse;
    }
}

/* p and ds of queries i0 .. i0+n-1 against the keys at j0, from scores and dP in their places. */
LM_INLINE void probabilities(lm_dtype t, dx_scratch *w, const attn_dx_view *x,
                             const attn_drop *drop, uint64_t draw, int64_t h, int64_t i0, int64_t n,
                             int64_t j0, bool capped)
{
    float cap = (float)x->a->soft_cap;
    for (int64_t r = 0; r < n; r++) {
        int64_t from, to;
        visible(&x->mask, i0 + r, j0, &from, &to);
        vf lse = vf_set(w->lse[i0 + r]), delta = vf_set(w->delta[i0 + r]);
        if (drop)
            attn_drop_fill64(drop, draw + (uint64_t)((i0 + r) * attn_drop_pitch(drop) + j0), w->z);
        for (int64_t j = 0; j < BC; j += VF_LANES) {
            vf s = vf_load(&w->p[r][j]), dp = vf_load(&w->ds[r][j]), z = vf_set(1);
            vf slope = vf_set(1);
            if (capped) {
                s = vf_tanh(s * vf_set(1 / cap));
                slope = vf_fnma(s, s, slope);
                s *= vf_set(cap);
            }
            vf p = vf_exp(keep_range(s, j, from, to, vf_set(-INFINITY)) - lse);
            if (drop)
                z = vf_load(w->z + j);
            vf ds = p * (dp * z - delta);
            if (capped)
                ds *= slope;
            vf_store(&w->ds[r][j], ds);
            vf_store(&w->p[r][j], vf_round_to(t, p * z));
        }
        if (x->mask.blocks) {
            attn_hide(&x->mask, h, i0 + r, j0, BC, 0, w->p[r]);
            attn_hide(&x->mask, h, i0 + r, j0, BC, 0, w->ds[r]);
        }
    }
}

/* ds of queries i0 .. i0+n-1 and the keys at j0, added to the sums of their distances; those of keys that are not
 * seen are zeros. */
static void add_distances(dx_scratch *w, int64_t i0, int64_t n, int64_t j0)
{
    for (int64_t r = 0; r < n; r++) {
        float *to = w->sums + j0 - i0 - r;
        for (int64_t j = 0; j < BC; j += VF_LANES)
            vf_store(to + j, vf_load(to + j) + vf_load(&w->ds[r][j]));
    }
}

LM_INLINE void sweep_head(lm_dtype t, dx_scratch *w, const attn_dx_view *x, const attn_dx_job *job,
                          int64_t h)
{
    int64_t D = x->a->head_dim, E = lm_attention_value_dim(x->a), ld = w->ld;
    const attn_drop *drop = job->drop->rate > 0 ? job->drop : NULL;
    uint64_t draw = drop ? lm_attention_draw(&drop->origin, job->b, h, 0) : 0;
    for (int64_t j0 = job->k0; j0 < job->k1; j0 += BC) {
        int64_t width = job->k1 - j0 < BC ? job->k1 - j0 : BC;
        for (int64_t i0 = job->q0; i0 < job->q1; i0 += BR) {
            int64_t n = job->q1 - i0 < BR ? job->q1 - i0 : BR;
            attn_span span = attn_span_of(&x->mask, i0, i0 + n);
            if (span.hi <= j0 || span.lo >= j0 + width ||
                !attn_open(&x->mask, h, i0, i0 + n, j0, j0 + width))
                continue;
            const float *q = w->q + i0 * ld, *dout = w->dout + i0 * ld;
            float *p = w->p[0], *ds = w->ds[0];
            mm(&(mm_args){ n, BC, D, q, ld, 1, w->kt + j0 * D, BC, p, BC, false });
            mm(&(mm_args){ n, BC, E, dout, ld, 1, w->vt + j0 * E, BC, ds, BC, false });
            if (x->bias.table)
                add_biases(w->p, &x->bias, h, i0, n, j0);
            if (x->a->soft_cap > 0)
                probabilities(t, w, x, drop, draw, h, i0, n, j0, true);
            else
                probabilities(t, w, x, drop, draw, h, i0, n, j0, false);
            if (w->sums)
                add_distances(w, i0, n, j0);
            if (job->keys) {
                mm(&(mm_args){ width, w->lv, n, p, 1, BC, dout, ld, w->dv + j0 * ld, ld, true });
                mm(&(mm_args){ width, w->lk, n, ds, 1, BC, q, ld, w->dk + j0 * ld, ld, true });
            }
            if (job->queries)
                mm(&(mm_args){ n, w->lk, width, ds, BC, 1, w->k + j0 * ld, ld, w->dq + i0 * ld, ld,
                               true });
        }
    }
}

LM_INLINE void store_part(lm_dtype t, void *to, int64_t pitch, const float *x, int64_t ld,
                          int64_t r0, int64_t r1, int64_t D, float scale)
{
    for (int64_t r = r0; r < r1; r++)
        VF_FOR(d, n, D,
               { vf_put_any(t, to, r * pitch + d, vf_load(x + r * ld + d) * vf_set(scale), n); });
}

LM_INLINE void run_job(lm_dtype t, const attn_dx_job *job, void *scratch)
{
    dx_scratch *w = scratch;
    attn_dx_view x = attn_dx_view_of(job);
    const lm_attention_attr *a = x.a;
    int64_t D = a->head_dim, E = lm_attention_value_dim(a), T = a->seq, n = padded(T, BC);
    int64_t group = a->heads / a->kv_heads;
    size_t size = lm_dtype_size(t);
    place(w, a);
    pack_rows(t, w->k, w->ld, n, attn_at(x.qkv, x.v_at, size), x.pitch, T, E, 1);
    pack_turned(w->vt, n, w->k, w->ld, E);
    pack_rows(t, w->k, w->ld, n, attn_at(x.qkv, x.k_at, size), x.pitch, T, D, 1);
    pack_turned(w->kt, n, w->k, w->ld, D);
    memset(w->dk, 0, (size_t)(2 * n * w->ld) * sizeof(float));
    for (int64_t h = job->kv * group; h < (job->kv + 1) * group; h++) {
        load_head(t, w, &x, h);
        memset(w->dq, 0, (size_t)(T * w->ld) * sizeof(float));
        sweep_head(t, w, &x, job, h);
        if (job->queries)
            store_part(t, attn_at(x.dqkv, h * D, size), x.pitch, w->dq, w->ld, job->q0, job->q1, D,
                       (float)a->scale);
    }
    if (job->keys) {
        store_part(t, attn_at(x.dqkv, x.k_at, size), x.pitch, w->dk, w->ld, job->k0, job->k1, D, 1);
        store_part(t, attn_at(x.dqkv, x.v_at, size), x.pitch, w->dv, w->ld, job->k0, job->k1, E, 1);
    }
}

static void job_f32(const attn_dx_job *job, void *scratch)
{
    run_job(LM_DTYPE_F32, job, scratch);
}

/* ---- attention_dbias ---- */

/* sum [B*H][Z]: of each sequence, added in their order. */
typedef struct {
    const lm_call *c;
    attn_drop drop;
    double *sum;
    char *scratch;
    size_t bytes; /* of a worker */
} dbias_call;

static size_t dbias_bytes(const lm_attention_attr *a)
{
    int64_t sums = padded(a->seq, BC) + a->seq;
    return attn_round64(scratch_bytes(a) + (size_t)sums * sizeof(float));
}

/* Sums by distance, the first of distance -(T - 1), to those of columns. */
static void fold(const attn_biases *b, const float *sums, int64_t T, double *to)
{
    for (int64_t z = 0; z < b->columns; z++)
        to[z] = 0;
    for (int64_t x = 0; x < 2 * T - 1; x++)
        to[attn_bias_clamp(x - (T - 1) + b->zero, b->columns)] += (double)sums[x];
}

LM_INLINE void dbias_units(lm_dtype t, void *ctx, int64_t begin, int64_t end, int worker)
{
    const dbias_call *d = ctx;
    const lm_attention_attr *a = d->c->attr;
    dx_scratch *w = (dx_scratch *)(void *)(d->scratch + (size_t)worker * d->bytes);
    int64_t D = a->head_dim, E = lm_attention_value_dim(a), T = a->seq, n = padded(T, BC);
    size_t size = lm_dtype_size(t);
    for (int64_t bh = begin; bh < end; bh++) {
        int64_t h = bh % a->heads;
        attn_dx_job job = { .c = d->c,
                            .drop = &d->drop,
                            .b = bh / a->heads,
                            .kv = h / (a->heads / a->kv_heads),
                            .k1 = T,
                            .q1 = T };
        attn_dx_view x = attn_dx_view_of(&job);
        float *sums = (float *)(void *)((char *)w + scratch_bytes(a));
        place(w, a);
        pack_rows(t, w->k, w->ld, n, attn_at(x.qkv, x.v_at, size), x.pitch, T, E, 1);
        pack_turned(w->vt, n, w->k, w->ld, E);
        pack_rows(t, w->k, w->ld, n, attn_at(x.qkv, x.k_at, size), x.pitch, T, D, 1);
        pack_turned(w->kt, n, w->k, w->ld, D);
        load_head(t, w, &x, h);
        memset(sums, 0, (size_t)(n + T) * sizeof *sums);
        w->sums = sums + T - 1;
        sweep_head(t, w, &x, &job, h);
        fold(&x.bias, sums, T, d->sum + bh * x.bias.columns);
    }
}

#define DBIAS(name, type)                                               \
    static void name(void *ctx, int64_t begin, int64_t end, int worker) \
    {                                                                   \
        dbias_units(type, ctx, begin, end, worker);                     \
    }
DBIAS(dbias_f32, LM_DTYPE_F32)
DBIAS(dbias_bf16, LM_DTYPE_BF16)

void attention_dbias_run(const lm_call *c)
{
    const lm_attention_dbias_attr *attr = c->attr;
    const lm_attention_attr *a = &attr->attention;
    int64_t n = a->heads * c->in[6].dim[1];
    float *out = c->out[0].data;
    dbias_call d = { .c = c, .drop = attn_drop_of(c), .sum = c->work, .bytes = dbias_bytes(a) };
    d.scratch = (char *)c->work + attn_round64((size_t)(a->batch * n) * sizeof(double));
    lm_par_for(c->par, a->batch * a->heads, 1,
               c->in[1].dtype == LM_DTYPE_BF16 ? dbias_bf16 : dbias_f32, &d);
    bool add = !overwrites(c, attr->acc);
    for (int64_t i = 0; i < n; i++) {
        double sum = add ? (double)out[i] : 0;
        for (int64_t b = 0; b < a->batch; b++)
            sum += d.sum[b * n + i];
        out[i] = (float)sum;
    }
}

size_t attention_dbias_bytes(const lm_call *c, int threads)
{
    const lm_attention_attr *a = c->attr;
    size_t sums = (size_t)(a->batch * a->heads * c->in[6].dim[1]) * sizeof(double);
    return attn_round64(sums) + (size_t)threads * dbias_bytes(a);
}

static void job_bf16(const attn_dx_job *job, void *scratch)
{
    run_job(LM_DTYPE_BF16, job, scratch);
}

void attention_dx_run(const lm_call *c)
{
    attn_dx_run(c, c->in[1].dtype == LM_DTYPE_BF16 ? job_bf16 : job_f32, scratch_bytes(c->attr));
}

size_t attention_dx_bytes(const lm_call *c, int threads)
{
    return attn_run_work(threads, scratch_bytes(c->attr));
}
