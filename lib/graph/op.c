/* SPDX-License-Identifier: Apache-2.0 */
/* op.c -- helpers of the operators' rules.  Operands' dimensions: dims.c. */
#include "graph/op.h"

#include "numeric/code_rows.h"

#include <stdio.h>

const char *const lm_acc_words[] = { "first", "add", "fresh" };

int lm_op_ins(const lm_op *op)
{
    int n = 0;
    while (n < LM_MAX_IN && op->in[n].name)
        n++;
    return n;
}

int lm_op_outs(const lm_op *op)
{
    int n = 0;
    while (n < LM_MAX_OUT && op->out[n].name)
        n++;
    return n;
}

lm_dtype lm_op_act(const lm_op *op, const lm_call *c)
{
    for (int i = 0; i < c->n_in; i++)
        if ((op->in[i].is & LM_ACT_TYPE) && !lm_absent(&c->in[i]))
            return c->in[i].dtype;
    for (int i = 0; i < c->n_out; i++)
        if (!lm_absent(&c->out[i]) && lm_dtype_is_float(c->out[i].dtype) &&
            !(op->out[i].is & LM_DOUBLE))
            return c->out[i].dtype;
    for (int i = 0; i < c->n_in; i++)
        if (!lm_absent(&c->in[i]) && lm_dtype_is_float(c->in[i].dtype) &&
            !(op->in[i].is & (LM_DOUBLE | LM_ANY_TYPE)))
            return lm_wide(c->in[i].dtype);
    return LM_DTYPE_F32;
}

lm_tensor lm_shape1(lm_dtype d, int64_t a)
{
    return (lm_tensor){ .dtype = d, .ndim = 1, .dim = { a } };
}

lm_tensor lm_shape2(lm_dtype d, int64_t a, int64_t b)
{
    return (lm_tensor){ .dtype = d, .ndim = 2, .dim = { a, b } };
}

lm_tensor lm_shape3(lm_dtype d, int64_t a, int64_t b, int64_t c)
{
    return (lm_tensor){ .dtype = d, .ndim = 3, .dim = { a, b, c } };
}

bool lm_same_shape(const lm_tensor *a, const lm_tensor *b)
{
    if (a->ndim != b->ndim)
        return false;
    for (int i = 0; i < a->ndim; i++)
        if (a->dim[i] != b->dim[i])
            return false;
    return true;
}

double lm_call_bytes(const lm_call *c)
{
    double sum = 0;
    for (int i = 0; i < c->n_in; i++)
        if (!lm_absent(&c->in[i]))
            sum += (double)lm_stored_bytes(&c->in[i]);
    for (int i = 0; i < c->n_out; i++)
        if (!lm_absent(&c->out[i]))
            sum += (double)lm_stored_bytes(&c->out[i]);
    return sum;
}

lm_code lm_expect(bool ok, const char *op, lm_err *e, const char *what, ...)
{
    if (ok)
        return LM_OK;
    char text[256];
    va_list ap;
    va_start(ap, what);
    vsnprintf(text, sizeof text, what, ap);
    va_end(ap);
    return lm_fail(e, LM_EUSAGE, op, NULL, "%s", text);
}
