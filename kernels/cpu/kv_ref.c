/* SPDX-License-Identifier: Apache-2.0 */
/* kv_ref.c -- the definition of attention over coded caches (kernels/kv.h): keys and values of a head are decoded, then
 * two passes over the scores of each row, in double. */
#include <math.h>
#include <string.h>

#include "kernels/cpu/attention_bias.h"
#include "kernels/cpu/kv_seq.h"
#include "kernels/cpu/ref.h"
#include "kernels/cpu/tables.h"

/* The numbers of token j. */
static void take_row(const kv_seq *s, const kv_side *x, lm_dtype act, int64_t j, double *to)
{
    const void *plain = kv_plain(s, x, j);
    float y[LM_KV_MAX_DIM];
    if (!plain)
        lm_kv_decode(x->f, s->T, s->D, s->kv, kv_page(s, x, j), j % s->T, 1, y, s->D);
    for (int64_t d = 0; d < s->D; d++)
        to[d] = plain ? lm_get(act, plain, d) : (double)y[d];
}

/* Rotate cached key j (kernels/rope.h). */
static void rotate(const lm_call *c, const kv_seq *s, int64_t j, double *k)
{
    const lm_tensor *rope = &c->in[KV_ROPE];
    int64_t R = rope->dim[1], half = R / 2, row = (s->place ? s->place[j] : j) * R;
    for (int64_t d = 0; d < half; d++) {
        double cs = get(rope, row + d), sn = get(rope, row + half + d), u = k[d], v = k[half + d];
        k[d] = u * cs - v * sn;
        k[half + d] = v * cs + u * sn;
    }
}

/* bias: of the key's distance. */
static double score(const lm_attention_attr *a, const double *q, const double *k, double bias)
{
    double s = 0;
    for (int64_t d = 0; d < a->head_dim; d++)
        s += q[d] * k[d];
    s = s * a->scale + bias;
    return a->soft_cap > 0 ? a->soft_cap * tanh(s / a->soft_cap) : s;
}

/* Query head h of new row i; k, v: numbers of all tokens, D apart; p: room for a number each. */
static void attend(const lm_call *c, const kv_seq *s, int64_t h, int64_t i, const double *k,
                   const double *v, double *p)
{
    const lm_attention_attr *a = &((const lm_kv_attr *)c->attr)->attention;
    int64_t D = s->D, E = lm_attention_value_dim(a), row = s->row + i,
            from = attn_start(&s->mask, i), to = attn_end(&s->mask, i);
    const lm_tensor *sinks = opt_in(c, KV_SINKS);
    double q[LM_KV_MAX_DIM], max = sinks ? get(sinks, h) : (double)-INFINITY, sum = 0;
    for (int64_t d = 0; d < D; d++)
        q[d] = get(&c->in[KV_QKV], row * lm_kv_row_heads(c->attr) + h * D + d);
    for (int64_t j = from; j < to; j++) {
        p[j] = score(a, q, k + j * D, attn_bias(a, opt_in(c, KV_BIAS), h, j - s->used - i));
        max = fmax(max, p[j]);
    }
    for (int64_t j = from; j < to; j++)
        sum += p[j] = exp(p[j] - max);
    if (sinks)
        sum += exp(get(sinks, h) - max);
    for (int64_t d = 0; d < E; d++) {
        double y = 0;
        for (int64_t j = from; j < to; j++)
            y += rounded(c->out[0].dtype, p[j] / sum) * v[j * D + d];
        set(&c->out[0], (row * a->heads + h) * E + d, y);
    }
    if (opt_out(c, 1))
        set(&c->out[1], row * a->heads + h, max + log(sum));
}

/* Numbers of token j, of a latent its two parts. */
static void take_token(const lm_call *c, const kv_seq *s, int64_t j, double *k, double *v)
{
    const lm_dtype act = c->in[KV_QKV].dtype;
    if (((const lm_kv_attr *)c->attr)->latent) {
        kv_seq content = kv_part_of(c, s, 0), rest = kv_part_of(c, s, 1);
        take_row(&content, &content.k, act, j, k);
        take_row(&rest, &rest.k, act, j, k + content.D);
        return;
    }
    take_row(s, &s->k, act, j, k);
    if (kv_has_rope(c) && j < s->used)
        rotate(c, s, j, k);
    take_row(s, &s->v, act, j, v);
}

static void kv_attention(const lm_call *c)
{
    const lm_attention_attr *a = &((const lm_kv_attr *)c->attr)->attention;
    const bool latent = ((const lm_kv_attr *)c->attr)->latent;
    int64_t D = a->head_dim, group = a->heads / a->kv_heads;
    int64_t room = c->in[KV_TABLE].dim[1] * c->in[KV_KEYS].dim[2] + c->in[KV_QKV].dim[0];
    double *k = c->work, *v = k + room * D, *p = v + room * D;
    lm_kv_clear_rows(c);
    for (int64_t bk = 0; bk < a->batch * a->kv_heads; bk++) {
        kv_seq s = kv_seq_of(c, bk / a->kv_heads, bk % a->kv_heads);
        for (int64_t j = 0; s.fresh > 0 && j < kv_held(c, s.b); j++)
            take_token(c, &s, j, k + j * D, v + j * D);
        for (int64_t h = s.kv * group; h < (s.kv + 1) * group; h++)
            for (int64_t i = 0; i < s.fresh; i++)
                attend(c, &s, h, i, k, latent ? k : v, p);
    }
}

static size_t kv_attention_work(const lm_call *c, int threads)
{
    const lm_kv_attr *a = c->attr;
    int64_t room = c->in[KV_TABLE].dim[1] * c->in[KV_KEYS].dim[2] + c->in[KV_QKV].dim[0];
    (void)threads;
    return (size_t)(room * (2 * a->attention.head_dim + 1)) * sizeof(double);
}

void lm_kv_clear_rows(const lm_call *c)
{
    const lm_kv_attr *a = c->attr;
    lm_tensor *o = &c->out[0], *lse = opt_out(c, 1);
    int64_t H = a->attention.heads, B = a->attention.batch, N = o->dim[0], at = 0;
    size_t row = (size_t)(H * lm_attention_value_dim(&a->attention)) * lm_dtype_size(o->dtype);
    for (int64_t b = 0; b <= B; b++) { /* from the end of the rows of one sequence to the next */
        int64_t next = b < B ? kv_first(c, b) : N;
        memset((char *)o->data + (size_t)at * row, 0, (size_t)(next - at) * row);
        for (int64_t i = at * H; lse && i < next * H; i++)
            set(lse, i, (double)-INFINITY);
        at = b < B ? next + attn_i32(c, KV_FRESH)[b] : N;
    }
}

const lm_kernel lm_kv_ref_kernels[] = {
    { "kv_attention", LM_DTYPE_NONE, LM_CPU_REF, kv_attention, kv_attention_work },
    { 0 },
};
