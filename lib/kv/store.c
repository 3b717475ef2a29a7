/* SPDX-License-Identifier: Apache-2.0 */
/* store.c -- what a cache returns, and the error of attention. */
#include "kv/store.h"

#include <math.h>
#include <string.h>

#include "kernels/kv_code.h"

void lm_kv_rotate(int64_t D, float *x)
{
    lm_kv_code_ref.store(LM_DTYPE_F32, true, D, x, 1, x);
}

/* ---- storing ---- */

typedef struct {
    const lm_kv_side *s;
    int64_t page, heads, D, n;
    float *range; /* [n,2], or NULL */
    char *data;   /* a page of one head */
    size_t bytes;
} storing;

static void rotate_rows(const storing *st, float *x, int64_t n)
{
    for (int64_t i = 0; i < n * st->heads && st->s->rotate; i++)
        lm_kv_rotate(st->D, x + i * st->D);
}

/* Tokens [from, to) of one page, rotated, through their codes in place. */
static void code_page(const storing *st, float *x, int64_t from, int64_t to)
{
    const lm_kv_format *f = st->s->format;
    int64_t C = st->heads * st->D, T = st->page;
    for (int64_t h = 0; h < st->heads; h++) {
        float *rows = x + from * C + h * st->D;
        memset(st->data, 0, st->bytes);
        lm_kv_encode(f, T, st->D, h, rows, C, 0, to - from, st->range ? st->range + 2 * from : NULL,
                     st->data);
        lm_kv_decode(f, T, st->D, h, st->data, 0, to - from, rows, C);
    }
}

static void set_ranges(const storing *st, const float *x, float *work)
{
    int64_t C = st->heads * st->D;
    for (int64_t i = 0; i < st->n; i++)
        lm_kv_token_range(st->s->outliers, x + i * C, C, st->range + 2 * i, work);
}

static void round_plain(lm_dtype d, const float *x, int64_t n, float *y)
{
    for (int64_t i = 0; i < n; i++) {
        double cell;
        lm_set(d, &cell, 0, (double)x[i]);
        y[i] = (float)lm_get(d, &cell, 0);
    }
}

lm_code lm_kv_store(const lm_kv_side *s, int64_t page, int64_t kv_heads, int64_t head_dim,
                    const float *x, int64_t n, float *y, lm_err *e)
{
    int64_t C = kv_heads * head_dim, coded = lm_kv_side_coded(s, n);
    storing st = { .s = s, .page = page, .heads = kv_heads, .D = head_dim, .n = n };
    float *work = NULL;
    if (!s->format) {
        round_plain(s->plain, x, n * C, y);
        return LM_OK;
    }
    st.bytes = lm_kv_page_bytes(s->format, page, head_dim);
    lm_code rc = lm_alloc_n(&st.data, st.bytes, 1, "a page", e);
    if (!rc && s->outliers >= 0)
        rc = lm_alloc_n(&st.range, 2 * (size_t)n, sizeof *st.range, "ranges", e);
    if (!rc && s->outliers >= 0)
        rc = lm_alloc_n(&work, (size_t)C, sizeof *work, "a token", e);
    if (!rc) {
        memcpy(y, x, (size_t)(coded * C) * sizeof *y);
        if (s->outliers >= 0)
            set_ranges(&st, x, work);
        rotate_rows(&st, y, coded);
        for (int64_t from = 0; from < coded; from += page)
            code_page(&st, y, from, from + page < coded ? from + page : coded);
        rotate_rows(&st, y, coded);
        memcpy(y + coded * C, x + coded * C, (size_t)((n - coded) * C) * sizeof *y);
        int64_t plain = s->sinks < n ? s->sinks : n;
        memcpy(y, x, (size_t)(plain * C) * sizeof *y);
    }
    lm_free(st.data);
    lm_free(st.range);
    lm_free(work);
    return rc;
}

/* ---- attention ---- */

/* The probabilities p [to] that one query gives to rows [from, to) of k. */
static void weigh(const lm_kv_attention *a, const float *q, const float *k, int64_t from,
                  int64_t to, double *p)
{
    int64_t D = a->head_dim, C = a->kv_heads * D;
    double most = -(double)INFINITY, sum = 0;
    for (int64_t j = from; j < to; j++) {
        double s = 0;
        for (int64_t d = 0; d < D; d++)
            s += (double)q[d] * (double)k[j * C + d];
        p[j] = a->soft_cap > 0 ? a->soft_cap * tanh(s * a->scale / a->soft_cap) : s * a->scale;
        most = fmax(most, p[j]);
    }
    for (int64_t j = from; j < to; j++)
        sum += p[j] = exp(p[j] - most);
    for (int64_t j = from; j < to; j++)
        p[j] /= sum;
}

/* One row of one head: out [D] of rows [from, to) of k and v. */
static void attend(const lm_kv_attention *a, const float *q, const float *k, const float *v,
                   int64_t from, int64_t to, double *p, double *out)
{
    int64_t D = a->head_dim, C = a->kv_heads * D;
    weigh(a, q, k, from, to, p);
    for (int64_t d = 0; d < D; d++)
        out[d] = 0;
    for (int64_t j = from; j < to; j++)
        for (int64_t d = 0; d < D; d++)
            out[d] += p[j] * (double)v[j * C + d];
}

/* The first row that row i sees. */
static int64_t first_seen(const lm_kv_attention *a, int64_t i)
{
    return a->window && i >= a->window ? i + 1 - a->window : 0;
}

lm_code lm_kv_attention_error(const lm_kv_attention *a, int64_t n, const float *q, const float *k,
                              const float *v, const float *k2, const float *v2, double *error,
                              double *norm, lm_err *e)
{
    int64_t D = a->head_dim, group = a->heads / a->kv_heads;
    double *work;
    *error = *norm = 0;
    if (lm_alloc_n(&work, (size_t)n + 2 * (size_t)D, sizeof *work, "a row of attention", e))
        return e->code;
    double *one = work + n, *two = one + D;
    for (int64_t i = 0; i < n; i++)
        for (int64_t h = 0; h < a->heads; h++) {
            const float *row = q + (i * a->heads + h) * D;
            int64_t at = h / group * D, from = first_seen(a, i);
            attend(a, row, k + at, v + at, from, i + 1, work, one);
            attend(a, row, k2 + at, v2 + at, from, i + 1, work, two);
            for (int64_t d = 0; d < D; d++) {
                *error += (one[d] - two[d]) * (one[d] - two[d]);
                *norm += one[d] * one[d];
            }
        }
    lm_free(work);
    return LM_OK;
}

lm_code lm_kv_masses(const lm_kv_attention *a, int64_t n, int64_t from, const float *q,
                     const float *k, float *mass, lm_err *e)
{
    int64_t D = a->head_dim, group = a->heads / a->kv_heads;
    double *p;
    if (lm_alloc_n(&p, 2 * (size_t)n, sizeof *p, "masses of tokens", e))
        return e->code;
    double *sum = p + n;
    for (int64_t kv = 0; kv < a->kv_heads; kv++) {
        for (int64_t j = 0; j < n; j++)
            sum[j] = 0;
        for (int64_t i = from; i < n; i++)
            for (int64_t h = kv * group; h < (kv + 1) * group; h++) {
                weigh(a, q + (i * a->heads + h) * D, k + kv * D, first_seen(a, i), i + 1, p);
                for (int64_t j = first_seen(a, i); j <= i; j++)
                    sum[j] += p[j];
            }
        for (int64_t j = 0; j < n; j++)
            mass[kv * n + j] = (float)sum[j];
    }
    lm_free(p);
    return LM_OK;
}
