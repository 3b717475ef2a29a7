/* SPDX-License-Identifier: Apache-2.0 */
/* linear_ref.c -- the definition of the linear layer and of the two halves of its backward. */
#include "kernels/linear.h"

#include "kernels/cpu/ref.h"
#include "kernels/cpu/tables.h"

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

static void linear(const lm_call *c)
{
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

static void linear_dx(const lm_call *c)
{
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
    { "linear", LM_DTYPE_NONE, LM_CPU_REF, linear, NULL },
    { "linear_dx", LM_DTYPE_NONE, LM_CPU_REF, linear_dx, NULL },
    { "linear_dw", LM_DTYPE_NONE, LM_CPU_REF, linear_dw, NULL },
    { .op = NULL },
};
