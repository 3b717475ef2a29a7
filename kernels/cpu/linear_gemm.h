/* SPDX-License-Identifier: Apache-2.0 */
/* linear_gemm.h -- linear, linear_dx and linear_dw as matrix products; included by the file of each
 * level, which only names the level and its table. */
#ifndef LM_KERNELS_CPU_LINEAR_GEMM_H
#define LM_KERNELS_CPU_LINEAR_GEMM_H

#include "kernels/linear.h"

/* While scratch is being planned there is no data: any address, as only its presence counts. */
static inline const void *panels_of(const lm_tensor *w)
{
    return !w->panels ? NULL : w->data ? w->data : w;
}

static inline lm_gemm linear_gemm(const lm_call *c)
{
    const lm_tensor *x = &c->in[0], *w = &c->in[1], *y = &c->out[0];

    return (lm_gemm){
        .m = x->dim[0],
        .n = w->dim[0],
        .k = w->dim[1],
        .ab = x->dtype,
        .cd = y->dtype,
        .tb = true,
        .a = x->data,
        .b = w->codes || w->panels ? NULL : w->data,
        .b_packed = panels_of(w),
        .b_codes = w->codes,
        .c = y->data,
        .lda = x->dim[1],
        .ldb = w->dim[1],
        .ldc = y->dim[1],
        .bias = c->n_in > 2 ? c->in[2].data : NULL,
        .work = c->work,
    };
}

static inline lm_gemm linear_dx_gemm(const lm_call *c)
{
    const lm_tensor *dy = &c->in[0], *w = &c->in[1], *dx = &c->out[0];

    return (lm_gemm){
        .m = dy->dim[0],
        .n = w->dim[1],
        .k = w->dim[0],
        .ab = dy->dtype,
        .cd = dx->dtype,
        .a = dy->data,
        .b = w->codes || w->panels ? NULL : w->data,
        .b_turned = panels_of(w),
        .b_codes = w->codes,
        .c = dx->data,
        .lda = dy->dim[1],
        .ldb = w->dim[1],
        .ldc = dx->dim[1],
        .work = c->work,
    };
}

static inline lm_gemm linear_dw_gemm(const lm_call *c)
{
    const lm_tensor *dy = &c->in[0], *x = &c->in[1], *dw = &c->out[0];
    const lm_linear_attr *attr = c->attr;

    return (lm_gemm){
        .m = dy->dim[1],
        .n = x->dim[1],
        .k = dy->dim[0],
        .ab = dy->dtype,
        .cd = dw->dtype,
        .ta = true,
        .accumulate = lm_acc_adds(attr->acc, c->step),
        .a = dy->data,
        .b = x->data,
        .c = dw->data,
        .lda = dy->dim[1],
        .ldb = x->dim[1],
        .ldc = dw->dim[1],
        .a_sum = c->n_out > 1 ? c->out[1].data : NULL,
        .a_sum_add = lm_acc_adds(attr->acc, c->step),
        .work = c->work,
    };
}

#define LM_LINEAR_KERNELS(LEVEL)                                \
    static void linear(const lm_call *c)                        \
    {                                                           \
        lm_gemm g = linear_gemm(c);                             \
        lm_gemm_run(&g, LEVEL, c->par);                         \
    }                                                           \
    static void linear_dx(const lm_call *c)                     \
    {                                                           \
        lm_gemm g = linear_dx_gemm(c);                          \
        lm_gemm_run(&g, LEVEL, c->par);                         \
    }                                                           \
    static void linear_dw(const lm_call *c)                     \
    {                                                           \
        lm_gemm g = linear_dw_gemm(c);                          \
        lm_gemm_run(&g, LEVEL, c->par);                         \
    }                                                           \
    static size_t linear_work(const lm_call *c, int threads)    \
    {                                                           \
        lm_gemm g = linear_gemm(c);                             \
        return lm_gemm_work(&g, LEVEL, threads);                \
    }                                                           \
    static size_t linear_dx_work(const lm_call *c, int threads) \
    {                                                           \
        lm_gemm g = linear_dx_gemm(c);                          \
        return lm_gemm_work(&g, LEVEL, threads);                \
    }                                                           \
    static size_t linear_dw_work(const lm_call *c, int threads) \
    {                                                           \
        lm_gemm g = linear_dw_gemm(c);                          \
        return lm_gemm_work(&g, LEVEL, threads);                \
    }

#define LM_LINEAR_ROWS(ACT, LEVEL)                              \
    { "linear", ACT, LEVEL, linear, linear_work },              \
        { "linear_dx", ACT, LEVEL, linear_dx, linear_dx_work }, \
    {                                                           \
        "linear_dw", ACT, LEVEL, linear_dw, linear_dw_work      \
    }

#endif
