/* SPDX-License-Identifier: Apache-2.0 */
/* linear_ref.c -- the definition of the linear layer and of the two halves of its backward. */
#include "kernels/linear.h"

#include "kernels/cpu/ref.h"
#include "kernels/cpu/tables.h"
#include "numeric/code_rows.h"

/* A row of w as numbers, and what makes it. */
static size_t codes_work(const lm_call *c)
{
    int64_t k = c->in[1].dim[1];
    size_t bytes = (size_t)k * sizeof(double) + lm_code_rows_scratch(c->in[1].dtype, k);

    return (bytes + 63) / 64 * 64;
}

static void linear_rows(void *ctx, int64_t begin, int64_t end, int worker)
{
    const lm_call *c = ctx;
    const lm_tensor *x = &c->in[0], *w = &c->in[1], *b = opt_in(c, 2);
    int64_t m = w->dim[0], k = w->dim[1];

    (void)worker;
    for (int64_t i = begin; i < end; i++)
        for (int64_t j = 0; j < m; j++) {
            double s = b ? get(b, j) : 0;
            for (int64_t q = 0; q < k; q++)
                s += get(x, i * k + q) * get(w, j * k + q);
            set(&c->out[0], i * m + j, s);
        }
}

/* Columns of y, each from a row of w that is made numbers of. */
static void linear_codes(void *ctx, int64_t begin, int64_t end, int worker)
{
    const lm_call *c = ctx;
    const lm_tensor *x = &c->in[0], *w = &c->in[1], *b = opt_in(c, 2);
    int64_t m = w->dim[0], k = w->dim[1];
    char *row = (char *)c->work + (size_t)worker * codes_work(c);
    lm_tensor at = { .data = row, .dtype = w->dtype };

    for (int64_t j = begin; j < end; j++) {
        lm_code_rows_numbers(w->codes, j, 1, k, w->dtype, NULL, row,
                             row + (size_t)k * sizeof(double));
        for (int64_t i = 0; i < x->dim[0]; i++) {
            double s = b ? get(b, j) : 0;
            for (int64_t q = 0; q < k; q++)
                s += get(x, i * k + q) * get(&at, q);
            set(&c->out[0], i * m + j, s);
        }
    }
}

static size_t linear_work(const lm_call *c, int threads)
{
    return c->in[1].codes ? (size_t)threads * codes_work(c) : 0;
}

static void linear(const lm_call *c)
{
    if (c->in[1].codes) {
        lm_par_for(c->par, c->in[1].dim[0], 1, linear_codes, (void *)c);
        return;
    }
    lm_par_for(c->par, c->in[0].dim[0], 1, linear_rows, (void *)c);
}

static void dx_rows(void *ctx, int64_t begin, int64_t end, int worker)
{
    const lm_call *c = ctx;
    const lm_tensor *dy = &c->in[0], *w = &c->in[1];
    int64_t m = w->dim[0], k = w->dim[1];

    (void)worker;
    for (int64_t i = begin; i < end; i++)
        for (int64_t q = 0; q < k; q++) {
            double s = 0;
            for (int64_t j = 0; j < m; j++)
                s += get(dy, i * m + j) * get(w, j * k + q);
            set(&c->out[0], i * k + q, s);
        }
}

/* All of w as numbers, and what makes them. */
static size_t dx_work(const lm_call *c, int threads)
{
    const lm_tensor *w = &c->in[1];

    (void)threads;
    return w->codes ? (size_t)lm_tensor_count(w) * sizeof(double) +
                          lm_code_rows_scratch(w->dtype, w->dim[1])
                    : 0;
}

static void dx_codes(const lm_call *c)
{
    const lm_tensor *w = &c->in[1];
    lm_tensor in[2] = { c->in[0], *w };
    lm_call plain = *c;

    lm_code_rows_numbers(w->codes, 0, w->dim[0], w->dim[1], w->dtype, NULL, c->work,
                         (char *)c->work + (size_t)lm_tensor_count(w) * sizeof(double));
    in[1].codes = NULL;
    in[1].data = c->work;
    plain.in = in;
    lm_par_for(c->par, c->in[0].dim[0], 1, dx_rows, &plain);
}

static void linear_dx(const lm_call *c)
{
    if (c->in[1].codes) {
        dx_codes(c);
        return;
    }
    lm_par_for(c->par, c->in[0].dim[0], 1, dx_rows, (void *)c);
}

static void dw_rows(void *ctx, int64_t begin, int64_t end, int worker)
{
    const lm_call *c = ctx;
    const lm_linear_attr *attr = c->attr;
    const lm_tensor *dy = &c->in[0], *x = &c->in[1];
    lm_tensor *db = opt_out(c, 1);
    int64_t n = dy->dim[0], m = dy->dim[1], k = x->dim[1];

    (void)worker;
    for (int64_t j = begin; j < end; j++) {
        for (int64_t q = 0; q < k; q++) {
            double s = 0;
            for (int64_t i = 0; i < n; i++)
                s += get(dy, i * m + j) * get(x, i * k + q);
            accumulate(c, attr->acc, &c->out[0], j * k + q, s);
        }
        if (db) {
            double s = 0;
            for (int64_t i = 0; i < n; i++)
                s += get(dy, i * m + j);
            accumulate(c, attr->acc, db, j, s);
        }
    }
}

static void linear_dw(const lm_call *c)
{
    lm_par_for(c->par, c->in[0].dim[1], 1, dw_rows, (void *)c);
}

const lm_kernel lm_linear_ref_kernels[] = {
    { "linear", LM_DTYPE_NONE, LM_CPU_REF, linear, linear_work },
    { "linear_dx", LM_DTYPE_NONE, LM_CPU_REF, linear_dx, dx_work },
    { "linear_dw", LM_DTYPE_NONE, LM_CPU_REF, linear_dw, NULL },
    { .op = NULL },
};
