/* SPDX-License-Identifier: Apache-2.0 */
/* flat.c -- kernels on flat arrays. */
#include "train/flat.h"

#include "kernels/optim.h"

static lm_code find(lm_backend *b, const char *op, const lm_kernel **k, lm_err *e)
{
    *k = b->kernel(b, op, LM_DTYPE_F32);
    return *k ? LM_OK : lm_fail(e, LM_EBUG, op, NULL, "no %s kernel", b->name);
}

static lm_call call_of(lm_backend *b, const void *attr, const lm_tensor *in, int n_in,
                       lm_tensor *out, int n_out)
{
    return (lm_call){ .attr = attr,
                      .in = in,
                      .n_in = n_in,
                      .out = out,
                      .n_out = n_out,
                      .par = b->par,
                      .stream = b->main };
}

lm_code lm_flat_call(lm_backend *b, const char *op, const void *attr, const lm_tensor *in, int n_in,
                     lm_tensor *out, int n_out, lm_err *e)
{
    static const lm_step none;
    const lm_kernel *k;
    lm_call c = call_of(b, attr, in, n_in, out, n_out);
    c.step = &none;
    if (find(b, op, &k, e))
        return e->code;
    if (k->work && k->work(&c, b->threads))
        return lm_fail(e, LM_EBUG, op, NULL, "wants scratch, which flat calls do not give");
    k->run(&c);
    return LM_OK;
}

/* Reductions of n elements to one number. */

static size_t reduce_work(lm_backend *b, const char *op, int64_t n)
{
    lm_tensor in = lm_shape1(LM_DTYPE_F32, n), out = lm_shape1(LM_DTYPE_F64, 1);
    lm_call c = call_of(b, NULL, &in, 1, &out, 1);
    const lm_kernel *k = b->kernel(b, op, LM_DTYPE_F32);
    return k && k->work ? k->work(&c, b->threads) : 0;
}

static lm_code reduce(lm_backend *b, const char *op, const float *x, int64_t n, bool more,
                      void *work, double *out, lm_err *e)
{
    lm_tensor in = lm_flat(LM_DTYPE_F32, n, x), o = lm_flat(LM_DTYPE_F64, 1, out);
    lm_step step = { .more = more };
    lm_call c = call_of(b, NULL, &in, 1, &o, 1);
    const lm_kernel *k;
    if (find(b, op, &k, e))
        return e->code;
    c.work = work;
    c.step = &step;
    k->run(&c);
    return LM_OK;
}

size_t lm_sumsq_work(lm_backend *b, int64_t n)
{
    return reduce_work(b, "sumsq", n);
}

lm_code lm_sumsq(lm_backend *b, const float *x, int64_t n, void *work, double *out, lm_err *e)
{
    return reduce(b, "sumsq", x, n, false, work, out, e);
}

size_t lm_total_work(lm_backend *b, int64_t n)
{
    return reduce_work(b, "total", n);
}

lm_code lm_total(lm_backend *b, const float *x, int64_t n, bool more, void *work, double *out,
                 lm_err *e)
{
    return reduce(b, "total", x, n, more, work, out, e);
}

lm_code lm_strided(lm_backend *b, const float *x, int64_t stride, float *y, int64_t m, lm_err *e)
{
    lm_strided_attr a = { .stride = stride };
    lm_tensor in = lm_flat(LM_DTYPE_F32, (m - 1) * stride + 1, x),
              out = lm_flat(LM_DTYPE_F32, m, y);
    return lm_flat_call(b, "strided", &a, &in, 1, &out, 1, e);
}
