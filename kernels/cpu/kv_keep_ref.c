/* SPDX-License-Identifier: Apache-2.0 */
/* kv_keep_ref.c -- the definitions of kernels/kv_keep.h. */
#include <math.h>
#include <string.h>

#include "kernels/cpu/kv_mass.h"
#include "kernels/cpu/ref.h"
#include "kernels/cpu/tables.h"
#include "numeric/code_rows.h"

/* The score of query head h of new row i with key k. */
static double score(const mass_seq *s, int64_t h, int64_t i, const double *k)
{
    const lm_attention_attr *a = &s->a->attention;
    const lm_tensor *qkv = &s->c->in[MASS_QKV];
    double sum = 0;
    for (int64_t d = 0; d < a->head_dim; d++)
        sum += k[d] * get(qkv, ((s->row + i) * lm_kv_mass_row(s->a) + h) * a->head_dim + d);
    sum *= a->scale;
    return a->soft_cap > 0 ? a->soft_cap * tanh(sum / a->soft_cap) : sum;
}

static void take_key(const mass_seq *s, int64_t j, double *k)
{
    const void *plain = mass_plain(s, j);
    float y[LM_KV_MAX_DIM];
    if (!plain)
        mass_coded(s, j, 1, y);
    for (int64_t d = 0; d < s->a->attention.head_dim; d++)
        k[d] = plain ? lm_get(s->c->in[MASS_QKV].dtype, plain, d) : (double)y[d];
}

static void weigh_token(const mass_seq *s, int64_t j)
{
    const lm_attention_attr *a = &s->a->attention;
    int64_t group = a->heads / a->kv_heads;
    double k[LM_KV_MAX_DIM], sum = 0;
    take_key(s, j, k);
    for (int64_t i = s->seen; i < s->fresh; i++)
        for (int64_t h = s->kv * group; h < (s->kv + 1) * group; h++)
            if (j >= attn_start(&s->mask, i) && j < attn_end(&s->mask, i))
                sum +=
                    exp(score(s, h, i, k) - get(&s->c->in[MASS_LSE], (s->row + i) * a->heads + h));
    lm_tensor *mass = &s->c->out[0];
    int64_t at = (s->slot * mass->dim[1] + s->kv) * mass->dim[2] + j;
    set(mass, at, get(mass, at) + sum);
}

static void kv_mass(const lm_call *c)
{
    const lm_attention_attr *a = &((const lm_kv_mass_attr *)c->attr)->attention;
    for (int64_t bk = 0; bk < a->batch * a->kv_heads; bk++) {
        mass_seq s = mass_seq_of(c, bk / a->kv_heads, bk % a->kv_heads);
        for (int64_t j = 0; s.seen < s.fresh && j < s.used + s.fresh; j++)
            weigh_token(&s, j);
    }
}

/* A row of keys or values of one head: `n` rows of the cache from `from` on, each times its weight. */
static void sum_rows(const lm_call *c, const lm_tensor *x, int64_t bk, int64_t from, int64_t n,
                     int64_t to)
{
    const lm_kv_gather_attr *a = c->attr;
    const lm_tensor *weight = opt_in(c, 5);
    int64_t S = x->dim[2], D = a->head_dim;
    for (int64_t d = 0; d < D; d++) {
        double sum = 0;
        for (int64_t j = from; j < from + n; j++)
            sum += get(x, (bk * S + j) * D + d) * (weight ? get(weight, bk * S + j) : 1);
        set(&c->out[0], to + d, sum);
    }
}

static void kv_gather(const lm_call *c)
{
    const lm_kv_gather_attr *a = c->attr;
    const int32_t *at = c->in[2].data, *count = c->in[3].data;
    const int32_t *run = opt_in(c, 4) ? c->in[4].data : NULL;
    int64_t H = a->heads, K = a->kv_heads, D = a->head_dim, M = a->rows;
    memset(c->out[0].data, 0, lm_stored_bytes(&c->out[0]));
    for (int64_t bk = 0; bk < a->batch * K; bk++)
        for (int64_t i = 0; i < count[bk / K]; i++) {
            int64_t n = run ? run[bk * M + i] : 1, row = (bk / K * M + i) * (H + 2 * K);
            sum_rows(c, &c->in[0], bk, at[bk * M + i], n, (row + H + bk % K) * D);
            sum_rows(c, &c->in[1], bk, at[bk * M + i], n, (row + H + K + bk % K) * D);
        }
}

const lm_kernel lm_kv_keep_ref_kernels[] = {
    { "kv_mass", LM_DTYPE_NONE, LM_CPU_REF, kv_mass, NULL },
    { "kv_gather", LM_DTYPE_NONE, LM_CPU_REF, kv_gather, NULL },
    { 0 },
};
