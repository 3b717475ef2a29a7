/* SPDX-License-Identifier: Apache-2.0 */
/* attention_ref.c -- the definition of the attention family (kernels/attention.h): two passes over
 * the scores of one row, everything in double. */
#include "kernels/attention.h"

#include <math.h>

#include "kernels/cpu/attention_bias.h"
#include "kernels/cpu/attention_pages.h"
#include "kernels/cpu/ref.h"
#include "kernels/cpu/tables.h"

/* One query row against keys and values that may live in qkv or in a cache. */
typedef struct {
    const lm_attention_attr *a;
    const lm_tensor *q, *k, *v;
    int64_t q_at, k_at, v_at; /* first element of the row, of key 0 and of value 0 */
    int64_t k_pitch, v_pitch; /* elements between keys and between values          */
    int64_t start, end;       /* visible keys, unless blocks hide them, */
    int64_t origin;           /* which are counted from this key */
    const double *sink;       /* NULL: none */
    const lm_tensor *bias;    /* NULL: none; by distance, */
    int64_t h, at;            /* of head h, from the position of the query */
    const attn_seqs *pages;   /* NULL, or those of the caches k and v, for sequence b and head kv */
    int64_t b, kv;
} row_view;

/* The first element of key j, or of value j with the place and pitch of values; those of a cache with pages begin at
 * their rows. */
static int64_t line_of(const row_view *r, int64_t at, int64_t pitch, int64_t j)
{
    if (!r->pages)
        return at + j * pitch;
    return attn_cache_row(r->pages, r->a->kv_heads, r->kv, r->b, j, NULL) * pitch;
}

/* False if blocks hide key j. */
static bool sees(const row_view *r, int64_t j)
{
    const lm_attention_blocks *b = &r->a->blocks;
    if (!b->size)
        return true;
    int64_t query = (r->at - r->origin) / b->size, key = (j - r->origin) / b->size;
    if (query - key < b->local || key < b->global)
        return true;
    return b->stride > 0 && (key + lm_attention_offset(b, r->a->heads, r->h)) % b->stride == 0;
}

static double score(const row_view *r, int64_t j)
{
    double s = 0;
    int64_t key = line_of(r, r->k_at, r->k_pitch, j);
    for (int64_t d = 0; d < r->a->head_dim; d++)
        s += get(r->q, r->q_at + d) * get(r->k, key + d);
    s = s * r->a->scale + attn_bias(r->a, r->bias, r->h, j - r->at);
    return r->a->soft_cap > 0 ? r->a->soft_cap * tanh(s / r->a->soft_cap) : s;
}

/* Derivative of a score with respect to scale * q.k. */
static double score_slope(const lm_attention_attr *a, double s)
{
    double t = a->soft_cap > 0 ? s / a->soft_cap : 0;
    return 1 - t * t;
}

/* Probabilities p[start..end) of the row; returns its lse (-inf when it sees nothing).  *by: the factor of the sum of
 * values. */
static double softmax_row(const row_view *r, double *p, double *by)
{
    double max = r->sink ? *r->sink : (double)-INFINITY, sum = r->sink ? 1 : 0;
    for (int64_t j = r->start; j < r->end; j++) {
        p[j] = sees(r, j) ? score(r, j) : (double)-INFINITY;
        max = fmax(max, p[j]);
    }
    if (r->sink && max > -INFINITY)
        sum = exp(*r->sink - max);
    for (int64_t j = r->start; j < r->end; j++)
        sum += p[j] = exp(p[j] - max);
    *by = r->a->undivided ? exp(max) : 1;
    if (r->a->undivided)
        return r->start < r->end ? 0 : -INFINITY;
    for (int64_t j = r->start; j < r->end; j++)
        p[j] /= sum;
    return r->start < r->end || r->sink ? max + log(sum) : -INFINITY;
}

/* o = by times the sum over j of round(p[j] * z[j]) v[j] */
static void weigh_values(const row_view *r, const double *p, double by, const float *z,
                         lm_tensor *o, int64_t at)
{
    for (int64_t d = 0; d < lm_attention_value_dim(r->a); d++) {
        double sum = 0;
        for (int64_t j = r->start; j < r->end; j++)
            if (sees(r, j))
                sum += rounded(o->dtype, p[j] * (z ? (double)z[j] : 1)) *
                       get(r->v, line_of(r, r->v_at, r->v_pitch, j) + d);
        set(o, at + d, sum * by);
    }
}

/* The row of query i of (b, h) in a packed qkv tensor. */
static row_view view_of(const lm_attention_attr *a, const lm_tensor *qkv, const attn_mask *m,
                        int64_t b, int64_t h, int64_t i)
{
    int64_t D = a->head_dim, pitch = lm_attention_row(a, true);
    int64_t kv = h / (a->heads / a->kv_heads), first = b * a->seq * pitch;
    return (row_view){ .a = a,
                       .q = qkv,
                       .k = qkv,
                       .v = qkv,
                       .q_at = first + i * pitch + h * D,
                       .k_at = first + (a->heads + kv) * D,
                       .v_at =
                           first + (a->heads + a->kv_heads) * D + kv * lm_attention_value_dim(a),
                       .k_pitch = pitch,
                       .v_pitch = pitch,
                       .h = h,
                       .at = i,
                       .origin = m->lo && m->lo[i] > 0 ? m->lo[i] : 0,
                       .start = attn_start(m, i),
                       .end = attn_end(m, i) };
}

/* Multipliers of a row's dropout into z, or NULL when there is none. */
static const float *drop_row(const attn_drop *d, const row_view *r, int64_t b, int64_t i, float *z)
{
    if (d->rate <= 0)
        return NULL;
    if (r->start < r->end)
        attn_drop_fill(d, lm_attention_draw(&d->origin, b, r->h, i), r->start, r->end - r->start,
                       z + r->start);
    return z;
}

static void attention(const lm_call *c)
{
    const lm_attention_attr *a = c->attr;
    const lm_tensor *qkv = &c->in[0], *sinks = opt_in(c, 3);
    attn_drop drop = attn_drop_of(c);
    double *p = c->work;
    float *z = (float *)(p + a->seq);
    for (int64_t b = 0; b < a->batch; b++) {
        attn_mask m = attn_mask_of(a, attn_i32(c, 1), attn_i32(c, 2), b);
        for (int64_t h = 0; h < a->heads; h++) {
            for (int64_t i = 0; i < a->seq; i++) {
                int64_t bh = b * a->heads + h;
                row_view r = view_of(a, qkv, &m, b, h, i);
                double sink = sinks ? get(sinks, h) : 0, by;
                r.sink = sinks ? &sink : NULL;
                r.bias = opt_in(c, 4);
                set(&c->out[1], bh * a->seq + i, softmax_row(&r, p, &by));
                weigh_values(&r, p, by, drop_row(&drop, &r, b, i, z), &c->out[0],
                             ((b * a->seq + i) * a->heads + h) * lm_attention_value_dim(a));
            }
        }
    }
}

static size_t attention_work(const lm_call *c, int threads)
{
    (void)threads;
    const lm_attention_attr *a = c->attr;
    return (size_t)a->seq * (sizeof(double) + sizeof(float));
}

/* The gradient of a score before its soft cap; dp: of its probability. */
static double score_dx(const row_view *r, int64_t j, double lse, double dp, double delta)
{
    double s = score(r, j);
    return exp(s - lse) * (dp - delta) * score_slope(r->a, s);
}

/* Gradients of one query row: adds to dk [T,D], dv [T,E] and writes dq into dqkv. */
static void row_dx(const lm_call *c, const row_view *r, const float *z, int64_t o_at, double lse,
                   double *dk, double *dv)
{
    const lm_tensor *dout = &c->in[0], *o = &c->in[2];
    int64_t D = r->a->head_dim, E = lm_attention_value_dim(r->a);
    double delta = 0, *dq = dv + r->a->seq * E;
    for (int64_t d = 0; d < E && !r->a->undivided; d++)
        delta += get(dout, o_at + d) * get(o, o_at + d);
    for (int64_t d = 0; d < D; d++)
        dq[d] = 0;
    for (int64_t j = r->start; j < r->end; j++) {
        if (!sees(r, j))
            continue;
        double p = exp(score(r, j) - lse), keep = z ? (double)z[j] : 1, dp = 0;
        double p_act = rounded(dout->dtype, p * keep);
        for (int64_t d = 0; d < E; d++) {
            dp += get(dout, o_at + d) * get(r->v, r->v_at + j * r->v_pitch + d);
            dv[j * E + d] += p_act * get(dout, o_at + d);
        }
        double ds = score_dx(r, j, lse, dp * keep, delta) * r->a->scale;
        for (int64_t d = 0; d < D; d++) {
            dq[d] += ds * get(r->k, r->k_at + j * r->k_pitch + d);
            dk[j * D + d] += ds * get(r->q, r->q_at + d);
        }
    }
    for (int64_t d = 0; d < D; d++)
        set(&c->out[0], r->q_at + d, dq[d]);
}

static void attention_dx(const lm_call *c)
{
    const lm_attention_attr *a = c->attr;
    const lm_tensor *qkv = &c->in[1];
    int64_t T = a->seq, D = a->head_dim, E = lm_attention_value_dim(a);
    int64_t group = a->heads / a->kv_heads;
    attn_drop drop = attn_drop_of(c);
    double *dk = c->work, *dv = dk + T * D;
    float *z = (float *)(dv + T * E + D);
    for (int64_t bk = 0; bk < a->batch * a->kv_heads; bk++) {
        int64_t b = bk / a->kv_heads, kv = bk % a->kv_heads;
        attn_mask m = attn_mask_of(a, attn_i32(c, 4), attn_i32(c, 5), b);
        row_view r = view_of(a, qkv, &m, b, kv * group, 0);
        for (int64_t i = 0; i < T * (D + E); i++)
            dk[i] = 0;
        for (int64_t h = kv * group; h < (kv + 1) * group; h++) {
            for (int64_t i = 0; i < T; i++) {
                int64_t bh = b * a->heads + h;
                r = view_of(a, qkv, &m, b, h, i);
                r.bias = opt_in(c, 6);
                row_dx(c, &r, drop_row(&drop, &r, b, i, z), ((b * T + i) * a->heads + h) * E,
                       get(&c->in[3], bh * T + i), dk, dv);
            }
        }
        for (int64_t j = 0; j < T; j++) {
            for (int64_t d = 0; d < D; d++)
                set(&c->out[0], r.k_at + j * r.k_pitch + d, dk[j * D + d]);
            for (int64_t d = 0; d < E; d++)
                set(&c->out[0], r.v_at + j * r.v_pitch + d, dv[j * E + d]);
        }
    }
}

static size_t attention_dx_work(const lm_call *c, int threads)
{
    (void)threads;
    const lm_attention_attr *a = c->attr;
    size_t T = (size_t)a->seq, D = (size_t)a->head_dim, E = (size_t)lm_attention_value_dim(a);
    return (T * (D + E) + D) * sizeof(double) + T * sizeof(float);
}

/* Adds the gradients of the scores of a row to those of the columns, sum [Z]. */
static void row_dbias(const lm_call *c, const row_view *r, const float *z, int64_t o_at, double lse,
                      double *sum)
{
    const lm_tensor *dout = &c->in[0], *o = &c->in[2];
    int64_t E = lm_attention_value_dim(r->a);
    double delta = 0;
    for (int64_t d = 0; d < E && !r->a->undivided; d++)
        delta += get(dout, o_at + d) * get(o, o_at + d);
    for (int64_t j = r->start; j < r->end; j++) {
        double dp = 0;
        for (int64_t d = 0; d < E; d++)
            dp += get(dout, o_at + d) * get(r->v, r->v_at + j * r->v_pitch + d);
        sum[attn_bias_column(r->a, r->bias, j - r->at)] +=
            score_dx(r, j, lse, dp * (z ? (double)z[j] : 1), delta);
    }
}

static void attention_dbias(const lm_call *c)
{
    const lm_attention_dbias_attr *attr = c->attr;
    const lm_attention_attr *a = &attr->attention;
    int64_t T = a->seq, E = lm_attention_value_dim(a), Z = c->in[6].dim[1];
    attn_drop drop = attn_drop_of(c);
    double *sum = c->work;
    float *z = (float *)(sum + Z);
    for (int64_t h = 0; h < a->heads; h++) {
        for (int64_t x = 0; x < Z; x++)
            sum[x] = 0;
        for (int64_t b = 0; b < a->batch; b++) {
            attn_mask m = attn_mask_of(a, attn_i32(c, 4), attn_i32(c, 5), b);
            for (int64_t i = 0, bh = b * a->heads + h; i < T; i++) {
                row_view r = view_of(a, &c->in[1], &m, b, h, i);
                r.bias = &c->in[6];
                row_dbias(c, &r, drop_row(&drop, &r, b, i, z), ((b * T + i) * a->heads + h) * E,
                          get(&c->in[3], bh * T + i), sum);
            }
        }
        for (int64_t x = 0; x < Z; x++)
            accumulate(c, attr->acc, &c->out[0], h * Z + x, sum[x]);
    }
}

static size_t attention_dbias_work(const lm_call *c, int threads)
{
    (void)threads;
    const lm_attention_attr *a = c->attr;
    return (size_t)c->in[6].dim[1] * sizeof(double) + (size_t)a->seq * sizeof(float);
}

/* Copy the fresh keys and values of (b, kv) behind those that the cache holds. */
static void append(const lm_call *c, const attn_seqs *s, int64_t b, int64_t kv)
{
    const lm_attention_attr *a = c->attr;
    int64_t D = a->head_dim, E = lm_attention_value_dim(a), K = a->kv_heads;
    for (int64_t i = 0; i < s->fresh[b]; i++) {
        int64_t to = attn_cache_row(s, K, kv, b, s->used[b] + i, NULL);
        int64_t row = (attn_first(s, b) + i) * s->pitch;
        for (int64_t d = 0; d < D; d++)
            set(&c->out[1], to * D + d, get(&c->in[0], row + (a->heads + kv) * D + d));
        for (int64_t d = 0; s->values && d < E; d++)
            set(&c->out[2], to * E + d, get(&c->in[0], row + (a->heads + K) * D + kv * E + d));
    }
}

/* Head h of row i of sequence b; a row that is not real sees nothing. */
static void cached_row(const lm_call *c, const attn_seqs *s, int64_t b, int64_t h, int64_t i)
{
    const lm_attention_attr *a = c->attr;
    int64_t D = a->head_dim, E = lm_attention_value_dim(a), K = a->kv_heads;
    int64_t row = attn_first(s, b) + i, kv = h / (a->heads / K);
    attn_mask m = attn_cached_mask(a, s->used[b], s->fresh[b]);
    row_view r = { .a = a,
                   .q = &c->in[0],
                   .k = &c->out[1],
                   .v = &c->out[s->values ? 2 : 1],
                   .k_pitch = D,
                   .v_pitch = s->values ? E : D,
                   .q_at = row * s->pitch + h * D,
                   .pages = s,
                   .b = b,
                   .kv = kv,
                   .bias = opt_in(c, 7),
                   .h = h,
                   .at = s->used[b] + i };
    const lm_tensor *sinks = opt_in(c, 6);
    double sink = sinks ? get(sinks, h) : 0, by;
    if (i < s->fresh[b]) {
        r.sink = sinks ? &sink : NULL;
        r.start = attn_start(&m, i);
        r.end = attn_end(&m, i);
    }
    double lse = softmax_row(&r, c->work, &by);
    if (c->n_out > 3 && c->out[3].data)
        set(&c->out[3], row * a->heads + h, lse);
    weigh_values(&r, c->work, by, NULL, &c->out[0], (row * a->heads + h) * E);
}

static void attention_cached(const lm_call *c)
{
    const lm_attention_attr *a = c->attr;
    attn_seqs s = attn_seqs_of(c);
    for (int64_t b = 0; b < a->batch; b++) {
        int64_t rows = (b + 1 < a->batch ? attn_first(&s, b + 1) : s.rows) - attn_first(&s, b);
        for (int64_t kv = 0; !a->reads && kv < a->kv_heads; kv++)
            append(c, &s, b, kv);
        for (int64_t h = 0; h < a->heads; h++)
            for (int64_t i = 0; i < rows; i++)
                cached_row(c, &s, b, h, i);
    }
}

static size_t attention_cached_work(const lm_call *c, int threads)
{
    (void)threads;
    attn_seqs s = attn_seqs_of(c);
    return (size_t)attn_room(&s) * sizeof(double);
}

const lm_kernel lm_attention_ref_kernels[] = {
    { "attention", LM_DTYPE_NONE, LM_CPU_REF, attention, attention_work },
    { "attention_dx", LM_DTYPE_NONE, LM_CPU_REF, attention_dx, attention_dx_work },
    { "attention_dbias", LM_DTYPE_NONE, LM_CPU_REF, attention_dbias, attention_dbias_work },
    { "attention_cached", LM_DTYPE_NONE, LM_CPU_REF, attention_cached, attention_cached_work },
    { 0 },
};
