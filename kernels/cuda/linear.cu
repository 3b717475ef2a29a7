/* SPDX-License-Identifier: Apache-2.0 */
/* linear.cu -- kernels of the linear family: products by gemm.cuh. */
#include "kernels/cuda/gemm.cuh"

extern "C" {
#include "kernels/linear.h"
}

/* ---- which products ---- */

static gemm_call forward(const lm_call *c)
{
    const lm_tensor *x = &c->in[0], *w = &c->in[1];
    gemm_call g = {};

    g.m = x->dim[0], g.n = w->dim[0], g.k = w->dim[1];
    g.ab = x->dtype, g.cd = c->out[0].dtype;
    g.tb = true;
    g.a = x->data, g.b = w->data, g.c = c->out[0].data;
    g.lda = g.k, g.ldb = g.k, g.ldc = g.n;
    g.bias = in_ptr<float>(c, 2);
    g.b_codes = w->codes;
    g.work = c->work;
    return g;
}

static gemm_call backward_x(const lm_call *c)
{
    const lm_tensor *dy = &c->in[0], *w = &c->in[1];
    gemm_call g = {};

    g.m = dy->dim[0], g.n = w->dim[1], g.k = w->dim[0];
    g.ab = dy->dtype, g.cd = c->out[0].dtype;
    g.a = dy->data, g.b = w->data, g.c = c->out[0].data;
    g.lda = g.k, g.ldb = g.n, g.ldc = g.n;
    g.b_codes = w->codes;
    g.work = c->work;
    return g;
}

static gemm_call act_forward(const lm_call *c)
{
    gemm_call g = forward(c);

    g.act = ((const lm_linear_act_attr *)c->attr)->act;
    g.z = out_ptr<void>(c, 1);
    return g;
}

static gemm_call act_backward(const lm_call *c)
{
    gemm_call g = backward_x(c);

    g.act = ((const lm_linear_act_attr *)c->attr)->act;
    g.slope = true;
    g.z = c->in[2].data;
    return g;
}

static gemm_call backward_w(const lm_call *c)
{
    const lm_tensor *dy = &c->in[0], *x = &c->in[1];
    const lm_linear_attr *attr = (const lm_linear_attr *)c->attr;
    gemm_call g = {};

    g.m = dy->dim[1], g.n = x->dim[1], g.k = dy->dim[0];
    g.ab = dy->dtype, g.cd = LM_DTYPE_F32;
    g.ta = true;
    g.accumulate = !overwrites(c, attr->acc);
    g.a = dy->data, g.b = x->data, g.c = c->out[0].data;
    g.lda = g.m, g.ldb = g.n, g.ldc = g.n;
    g.a_sum = out_ptr<float>(c, 1);
    g.work = c->work;
    return g;
}

/* ---- the family ---- */

template <class T> static void linear(const lm_call *c)
{
    gemm_call g = forward(c);
    gemm_run(&g, c->stream);
}
static size_t linear_work(const lm_call *c, int)
{
    gemm_call g = forward(c);
    return gemm_work(&g, c->stream);
}

template <class T> static void linear_dx(const lm_call *c)
{
    gemm_call g = backward_x(c);
    gemm_run(&g, c->stream);
}
static size_t linear_dx_work(const lm_call *c, int)
{
    gemm_call g = backward_x(c);
    return gemm_work(&g, c->stream);
}

template <class T> static void linear_dw(const lm_call *c)
{
    gemm_call g = backward_w(c);
    gemm_run(&g, c->stream);
}
static size_t linear_dw_work(const lm_call *c, int)
{
    static float wanted; /* operands have no memory yet */
    gemm_call g = backward_w(c);
    g.a_sum = c->n_out > 1 && c->out[1].ndim > 0 ? &wanted : nullptr;
    return gemm_work(&g, c->stream);
}

template <class T> static void linear_act(const lm_call *c)
{
    gemm_call g = act_forward(c);
    gemm_run(&g, c->stream);
}
/* Joined forms read numbers alone. */
static size_t linear_act_work(const lm_call *c, int)
{
    gemm_call g = act_forward(c);
    return g.b_codes ? SIZE_MAX : gemm_work(&g, c->stream);
}

template <class T> static void linear_act_dx(const lm_call *c)
{
    gemm_call g = act_backward(c);
    gemm_run(&g, c->stream);
}
static size_t linear_act_dx_work(const lm_call *c, int)
{
    gemm_call g = act_backward(c);
    return g.b_codes ? SIZE_MAX : gemm_work(&g, c->stream);
}

extern "C" const lm_kernel lm_linear_cuda_kernels[] = {
    LM_CUDA_ROWS("linear", linear, linear_work),
    LM_CUDA_ROWS("linear_dx", linear_dx, linear_dx_work),
    LM_CUDA_ROWS("linear_dw", linear_dw, linear_dw_work),
    LM_CUDA_ROWS("linear_act", linear_act, linear_act_work),
    LM_CUDA_ROWS("linear_act_dx", linear_act_dx, linear_act_dx_work),
    LM_CUDA_END,
};
