/* SPDX-License-Identifier: Apache-2.0 */
/* lora_sum.c -- adds an adapter's tensor to that of its base: W + s B A; with DoRA each output is
 * scaled to its magnitude. */
#include <math.h>
#include <string.h>

#include "base/mem.h"
#include "merge/lora_impl.h"
#include "numeric/format.h"

enum { SPAN = 512 };

lm_dtype lm_lora_dtype(lm_dtype of)
{
    return of == LM_DTYPE_F64 ? LM_DTYPE_F64 : LM_DTYPE_F32;
}

static void store(const lm_lora_sum *s, int64_t at, int64_t n, const double *v)
{
    lm_tune_round(v, s->into, s->out + (size_t)at * (s->into == LM_DTYPE_F64 ? 8 : 4), n);
}

/* Elements j .. j + n - 1 of row i of W + s L R. */
static void add_span(const lm_lora_sum *s, int64_t i, int64_t j, int64_t n, double *acc)
{
    double w[SPAN];
    int64_t at = i * s->m + j;

    memset(acc, 0, SPAN * sizeof *acc);
    for (int64_t k = 0; k < s->rank; k++) {
        const double *r = s->r + k * s->m + j;
        double c = s->l[i * s->rank + k];

        for (int64_t x = 0; x < n; x++)
            acc[x] += c * r[x];
    }
    lm_convert(s->from, s->w + (size_t)at * lm_dtype_size(s->from), LM_DTYPE_F64, w, n);
    for (int64_t x = 0; x < n; x++)
        acc[x] = w[x] + s->scale * acc[x];
}

static int64_t span_of(const lm_lora_sum *s, int64_t j)
{
    return s->m - j < SPAN ? s->m - j : SPAN;
}

static void rows(void *ctx, int64_t begin, int64_t end, int worker)
{
    const lm_lora_sum *s = ctx;
    double acc[SPAN];

    (void)worker;
    for (int64_t i = begin; i < end; i++) {
        for (int64_t j = 0; j < s->m; j += SPAN) {
            int64_t n = span_of(s, j);

            add_span(s, i, j, n, acc);
            for (int64_t x = 0; s->factor && x < n; x++)
                acc[x] *= s->factor[s->by_column ? j + x : i];
            store(s, i * s->m + j, n, acc);
        }
    }
}

void lm_lora_sum_rows(const lm_lora_sum *s, int64_t n, lm_par *par)
{
    lm_par_for(par, n, s->m < 65536 ? 65536 / s->m : 1, rows, (void *)(uintptr_t)s);
}

/* ---- DoRA ---- */

/* A vector of length zero has no direction: it remains zero. */
static double factor_of(double magnitude, double squares)
{
    return squares > 0 ? magnitude / sqrt(squares) : 0;
}

static void row_factors(void *ctx, int64_t begin, int64_t end, int worker)
{
    const lm_lora_sum *s = ctx;
    double acc[SPAN];

    (void)worker;
    for (int64_t i = begin; i < end; i++) {
        double squares = 0;

        for (int64_t j = 0; j < s->m; j += SPAN) {
            int64_t n = span_of(s, j);

            add_span(s, i, j, n, acc);
            for (int64_t x = 0; x < n; x++)
                squares += acc[x] * acc[x];
        }
        s->factor[i] = factor_of(s->factor[i], squares);
    }
}

typedef struct {
    const lm_lora_sum *of;
    int64_t n; /* rows */
} columns;

static void column_factors(void *ctx, int64_t begin, int64_t end, int worker)
{
    const columns *c = ctx;
    const lm_lora_sum *s = c->of;
    double acc[SPAN], squares[SPAN];

    (void)worker;
    for (int64_t j = begin; j < end; j += SPAN) { /* begin is a multiple of SPAN */
        int64_t n = span_of(s, j);

        memset(squares, 0, sizeof squares);
        for (int64_t i = 0; i < c->n; i++) {
            add_span(s, i, j, n, acc);
            for (int64_t x = 0; x < n; x++)
                squares[x] += acc[x] * acc[x];
        }
        for (int64_t x = 0; x < n; x++)
            s->factor[j + x] = factor_of(s->factor[j + x], squares[x]);
    }
}

/* ---- One tensor ---- */

/* A tensor [rows, cols] of the adapter as doubles, transposed on request. */
static lm_code load(const lm_lora *l, const lm_st_tensor *t, bool turn, double **out, lm_err *e)
{
    double *v = NULL, *turned = NULL;
    lm_code rc = lm_alloc_n(&v, (size_t)t->count, sizeof *v, "adapter", e);

    if (!rc)
        rc = lm_st_load(l->st, t, LM_DTYPE_F64, v, e);
    if (!rc && turn) {
        rc = lm_alloc_n(&turned, (size_t)t->count, sizeof *v, "adapter", e);
        for (int64_t i = 0; !rc && i < t->dim[0]; i++)
            for (int64_t j = 0; j < t->dim[1]; j++)
                turned[j * t->dim[0] + i] = v[i * t->dim[1] + j];
        lm_free(v);
        v = turned;
    }
    if (rc) {
        lm_free(v);
        v = NULL;
    }
    *out = v;
    return rc;
}

uint64_t lm_lora_bytes(const lm_lora *l, const lm_st_tensor *t)
{
    const lm_lora_change *c = lm_lora_change_on(l, t);
    uint64_t parts;

    if (lm_lora_effect_on(l, t) != LM_LORA_ADDED)
        return 0;
    if (c->part)
        return lm_plain_bytes(lm_lora_dtype(t->dtype), t->count) +
               (c->of_bias ? 3 * 8 * (uint64_t)t->count
                           : 2 * 8 * (uint64_t)t->count + lm_tune_apply_bytes(&c->part->module));
    if (c->param)
        return lm_plain_bytes(lm_lora_dtype(t->dtype), t->count) + c->param->a->bytes +
               c->param->b->bytes +
               2 * 8 * (uint64_t)((c->param->stack.out + c->param->stack.in) * c->param->rank);
    parts = c->bias ? (uint64_t)c->bias->count : (uint64_t)c->a->count + (uint64_t)c->b->count;
    return lm_plain_bytes(lm_lora_dtype(t->dtype), t->count) + 2 * 8 * parts;
}

/* The factors of L and R, and with DoRA the magnitudes. */
static lm_code load_parts(const lm_lora *l, const lm_lora_change *c, double **left, double **right,
                          double **magnitude, lm_err *e)
{
    lm_code rc = load(l, c->turned ? c->a : c->b, c->turned, left, e);

    if (!rc)
        rc = load(l, c->turned ? c->b : c->a, c->turned, right, e);
    if (!rc && c->magnitude)
        rc = load(l, c->magnitude, false, magnitude, e);
    return rc;
}

lm_code lm_lora_add(const lm_lora *l, const lm_st_tensor *t, const void *w, void *out, lm_par *par,
                    lm_err *e)
{
    const lm_lora_change *c = lm_lora_change_on(l, t);
    double *left = NULL, *right = NULL, *magnitude = NULL, one = 1;
    lm_lora_sum s = { .scale = c->scale, .w = w, .from = t->dtype, .into = t->dtype, .out = out };
    columns by_column = { &s, 0 };
    int64_t n, step;
    lm_code rc;

    if (c->param)
        return lm_lora_add_param(l, c, t, w, out, par, e);
    if (c->part)
        return lm_lora_add_part(l, c, t, w, out, par, e);

    if (c->whole) { /* peft saves the embedding that it adapts */
        s.w = c->whole_data;
        s.from = c->whole->dtype;
    }
    if (c->bias) { /* one row: 1 x bias */
        rc = load(l, c->bias, false, &right, e);
        s.l = &one;
        s.rank = 1;
        s.m = t->count;
    } else {
        rc = load_parts(l, c, &left, &right, &magnitude, e);
        s.l = left;
        s.rank = c->a->dim[0];
        s.m = t->dim[1];
    }
    s.r = right;
    s.factor = magnitude;
    s.by_column = c->turned;
    if (!rc && t->count) {
        by_column.n = n = t->count / s.m;
        step = s.m < 65536 ? 65536 / s.m : 1;
        if (s.factor && s.by_column)
            lm_par_for(par, s.m, SPAN, column_factors, &by_column);
        else if (s.factor)
            lm_par_for(par, n, step, row_factors, &s);
        lm_lora_sum_rows(&s, n, par);
    }
    lm_free(left);
    lm_free(right);
    lm_free(magnitude);
    return rc;
}
