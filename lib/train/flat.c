/* flat.c -- kernels on flat arrays. */
#include "train/flat.h"

static lm_code find(lm_backend *b, const char *op, const lm_kernel **k, lm_err *e)
{
    *k = b->kernel(b, op, LM_DTYPE_F32);
    return *k ? LM_OK : lm_fail(e, LM_EBUG, op, NULL, "no %s kernel", b->name);
}

lm_code lm_flat_call(lm_backend *b, const char *op, const void *attr, const lm_tensor *in, int n_in,
                     lm_tensor *out, int n_out, lm_err *e)
{
    const lm_kernel *k;
    lm_call c = { .attr = attr, .in = in, .n_in = n_in, .out = out, .n_out = n_out, .par = b->par };
    if (find(b, op, &k, e))
        return e->code;
    if (k->work && k->work(&c, b->threads))
        return lm_fail(e, LM_EBUG, op, NULL, "wants scratch, which flat calls do not give");
    k->run(&c);
    return LM_OK;
}

static lm_call sumsq_call(lm_backend *b, lm_tensor *in, lm_tensor *out)
{
    return (lm_call){ .in = in, .n_in = 1, .out = out, .n_out = 1, .par = b->par };
}

size_t lm_sumsq_work(lm_backend *b, int64_t n)
{
    lm_tensor in = lm_shape1(LM_DTYPE_F32, n), out = lm_shape1(LM_DTYPE_F64, 1);
    lm_call c = sumsq_call(b, &in, &out);
    const lm_kernel *k = b->kernel(b, "sumsq", LM_DTYPE_F32);
    return k && k->work ? k->work(&c, b->threads) : 0;
}

lm_code lm_sumsq(lm_backend *b, const float *x, int64_t n, void *work, double *out, lm_err *e)
{
    lm_tensor in = lm_flat(LM_DTYPE_F32, n, x), o = lm_flat(LM_DTYPE_F64, 1, out);
    lm_call c = sumsq_call(b, &in, &o);
    const lm_kernel *k;
    if (find(b, "sumsq", &k, e))
        return e->code;
    c.work = work;
    k->run(&c);
    return LM_OK;
}
