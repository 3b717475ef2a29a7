/* SPDX-License-Identifier: Apache-2.0 */
/* attention_decode_simd.c -- attention of a few new rows over a long cache (one token a sequence
 * when generating).  Bound by reading the cache: each block of 256 keys is read once for all query
 * heads that share it, and the blocks of one sequence are spread over the threads.  Partial results
 * are merged in the order of the blocks, so the bits do not depend on threads. */
#include "kernels/attention.h"

#include "kernels/cpu/attention_simd.h"

enum { DECODE_BLOCK = 256 };

/* One partial result: maximum, sum, weighted values (ld floats). */
typedef struct {
    const lm_call *c;
    const lm_attention_attr *a;
    int64_t blocks, group, rows, ld, S; /* rows: of partial results a block = T * group */
    float *partial;                     /* [B*K][blocks][rows][ld + PAD] */
    float *scratch;                     /* [threads][PAD_Q: rows*ld + DECODE_BLOCK] */
} decode;

static decode decode_of(const lm_call *c)
{
    const lm_attention_attr *a = c->attr;
    decode d = { .c = c, .a = a, .S = c->out[1].dim[2] };
    d.blocks = padded(d.S, DECODE_BLOCK) / DECODE_BLOCK;
    d.group = a->heads / a->kv_heads;
    d.rows = a->seq * d.group;
    d.ld = padded(a->head_dim, PAD);
    d.partial = c->work;
    if (c->work)
        d.scratch = d.partial + a->batch * a->kv_heads * d.blocks * d.rows * (d.ld + PAD);
    return d;
}

static int64_t scratch_floats(const decode *d)
{
    return d->ld + DECODE_BLOCK;
}

LM_INLINE float *partial_at(const decode *d, int64_t bk, int64_t block, int64_t row)
{
    return d->partial + ((bk * d->blocks + block) * d->rows + row) * (d->ld + PAD);
}

LM_INLINE vf row_part(lm_dtype t, const void *x, int64_t at, int64_t d, int64_t D)
{
    return d + VF_LANES <= D ? vf_get(t, x, at + d) : vf_get_n(t, x, at + d, D - d);
}

/* Scores of keys [from, to) for one query row q (padded, scaled) into s. */
LM_INLINE void score_keys(lm_dtype t, const float *q, const void *k, int64_t from, int64_t to,
                          int64_t D, float *s)
{
    for (int64_t j = from; j < to; j++) {
        vf x = vf_zero(), y = vf_zero();
        int64_t d = 0;
        for (; d + PAD <= D; d += PAD) {
            x = vf_fma(vf_load(q + d), vf_get(t, k, j * D + d), x);
            y = vf_fma(vf_load(q + d + VF_LANES), vf_get(t, k, j * D + d + VF_LANES), y);
        }
        for (; d < D; d += VF_LANES)
            x = vf_fma(vf_load(q + d), row_part(t, k, j * D, d, D), x);
        s[j] = vf_sum(x + y);
    }
}

/* acc = sum over keys [from, to) of p[j] v[j] */
LM_INLINE void weigh_keys(lm_dtype t, const float *p, const void *v, int64_t from, int64_t to,
                          int64_t D, float *acc)
{
    int64_t d = 0;
    for (; d + 4 * VF_LANES <= D; d += 4 * VF_LANES) {
        vf x[4] = { vf_zero(), vf_zero(), vf_zero(), vf_zero() };
        for (int64_t j = from; j < to; j++) {
            vf w = vf_set(p[j]);
            for (int i = 0; i < 4; i++)
                x[i] = vf_fma(w, vf_get(t, v, j * D + d + i * VF_LANES), x[i]);
        }
        for (int i = 0; i < 4; i++)
            vf_store(acc + d + i * VF_LANES, x[i]);
    }
    for (; d < D; d += VF_LANES) {
        vf x = vf_zero();
        for (int64_t j = from; j < to; j++)
            x = vf_fma(vf_set(p[j]), row_part(t, v, j * D, d, D), x);
        vf_store(acc + d, x);
    }
}

/* Softmax numerators of s[from..to) in place; returns their sum. */
LM_INLINE float exp_keys(lm_dtype t, float *s, int64_t from, int64_t to, float *max)
{
    vf top = vf_set(-INFINITY), l = vf_zero();
    VF_FOR(j, n, to - from, {
        vf v = vf_get_any(LM_DTYPE_F32, s + from, j, n);
        top = vf_max(top, n < VF_LANES ? vf_keep_n(v, n, top) : v);
    });
    *max = vf_top(top);
    VF_FOR(j, n, to - from, {
        vf p = vf_exp(vf_get_any(LM_DTYPE_F32, s + from, j, n) - vf_set(*max));
        l += n < VF_LANES ? vf_keep_n(p, n, vf_zero()) : p;
        vf_put_any(LM_DTYPE_F32, s + from, j, vf_round_to(t, p), n);
    });
    return vf_sum(l);
}

LM_INLINE void decode_units(lm_dtype t, void *ctx, int64_t begin, int64_t end, int worker)
{
    const decode *d = ctx;
    const lm_attention_attr *a = d->a;
    int64_t D = a->head_dim, H = a->heads, K = a->kv_heads, pitch = (H + 2 * K) * D;
    size_t size = lm_dtype_size(t);
    float *q = d->scratch + worker * scratch_floats(d), *s = q + d->ld;
    for (int64_t u = begin; u < end; u++) {
        int64_t bk = u / d->blocks, block = u % d->blocks, b = bk / K, kv = bk % K;
        int64_t fresh = attn_i32(d->c, 2)[b], j0 = block * DECODE_BLOCK;
        attn_mask m = attn_cached_mask(a, attn_i32(d->c, 1)[b], fresh);
        const void *k = attn_at(d->c->out[1].data, (bk * d->S + j0) * D, size);
        const void *v = attn_at(d->c->out[2].data, (bk * d->S + j0) * D, size);
        for (int64_t row = 0; row < d->rows; row++) {
            int64_t i = row / d->group, h = kv * d->group + row % d->group;
            float *part = partial_at(d, bk, block, row);
            int64_t from = attn_start(&m, i) - j0, to = attn_end(&m, i) - j0;
            from = from < 0 ? 0 : from;
            to = i >= fresh ? 0 : to > DECODE_BLOCK ? DECODE_BLOCK : to;
            part[0] = -INFINITY;
            part[1] = 0;
            if (from >= to)
                continue;
            pack_rows(t, q, d->ld, 1,
                      attn_at(d->c->in[0].data, (b * a->seq + i) * pitch + h * D, size), 0, 1, D,
                      (float)a->scale);
            score_keys(t, q, k, from, to, D, s);
            if (a->soft_cap > 0) { /* whole vectors: the block has room for them */
                int64_t first = from / VF_LANES * VF_LANES;
                cap_scores(s + first, padded(to, VF_LANES) - first, (float)a->soft_cap);
            }
            part[1] = exp_keys(t, s, from, to, &part[0]);
            weigh_keys(t, s, v, from, to, D, part + PAD);
        }
    }
}

/* Merge the blocks of output rows [begin, end), numbered (b*K + kv)*rows + row. */
LM_INLINE void merge_rows(lm_dtype t, void *ctx, int64_t begin, int64_t end)
{
    const decode *d = ctx;
    const lm_attention_attr *a = d->a;
    int64_t D = a->head_dim;
    for (int64_t u = begin; u < end; u++) {
        int64_t bk = u / d->rows, row = u % d->rows, b = bk / a->kv_heads;
        int64_t h = bk % a->kv_heads * d->group + row % d->group, i = row / d->group;
        float m = -INFINITY, l = 0;
        for (int64_t n = 0; n < d->blocks; n++)
            m = fmaxf(m, partial_at(d, bk, n, row)[0]);
        for (int64_t n = 0; n < d->blocks; n++) {
            float *p = partial_at(d, bk, n, row);
            p[0] = p[1] > 0 ? expf(p[0] - m) : 0.0f; /* from here on: the factor of the block */
            l += p[0] * p[1];
        }
        int64_t at = ((b * a->seq + i) * a->heads + h) * D;
        VF_FOR(x, live, D, {
            vf sum = vf_zero();
            for (int64_t n = 0; n < d->blocks; n++) {
                const float *p = partial_at(d, bk, n, row);
                if (p[0] > 0)
                    sum = vf_fma(vf_set(p[0]), vf_load(p + PAD + x), sum);
            }
            vf_put_any(t, d->c->out[0].data, at + x, sum * vf_set(l > 0 ? 1 / l : 0.0f), live);
        });
    }
}
VF_TYPED(merge_rows)

static void decode_f32(void *ctx, int64_t begin, int64_t end, int worker)
{
    decode_units(LM_DTYPE_F32, ctx, begin, end, worker);
}

static void decode_bf16(void *ctx, int64_t begin, int64_t end, int worker)
{
    decode_units(LM_DTYPE_BF16, ctx, begin, end, worker);
}

void attention_decode_run(const lm_call *c)
{
    decode d = decode_of(c);
    lm_dtype t = c->in[0].dtype;
    int64_t units = d.a->batch * d.a->kv_heads;
    lm_par_for(c->par, units * d.blocks, 1, t == LM_DTYPE_BF16 ? decode_bf16 : decode_f32, &d);
    lm_par_for(c->par, units * d.rows, 8, VF_PICK(merge_rows, t), &d);
}

size_t attention_decode_bytes(const lm_call *c, int threads)
{
    decode d = decode_of(&(lm_call){ .attr = c->attr, .out = c->out });
    int64_t n = d.a->batch * d.a->kv_heads * d.blocks * d.rows * (d.ld + PAD);
    return (size_t)(n + threads * scratch_floats(&d)) * sizeof(float);
}
