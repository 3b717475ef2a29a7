/* SPDX-License-Identifier: Apache-2.0 */
/* ref.h -- helpers of the reference kernels: elements of a tensor of any float dtype as doubles,
 * one rounding at each store. */
#ifndef LM_KERNELS_CPU_REF_H
#define LM_KERNELS_CPU_REF_H

#include "kernels/kernel.h"

static inline double get(const lm_tensor *t, int64_t i)
{
    return lm_get(t->dtype, t->data, i);
}

static inline void set(lm_tensor *t, int64_t i, double v)
{
    lm_set(t->dtype, t->data, i, v);
}

/* v as it would be read back from a tensor of type d. */
static inline double rounded(lm_dtype d, double v)
{
    double cell;
    lm_set(d, &cell, 0, v);
    return lm_get(d, &cell, 0);
}

/* Numbers at to at + n - 1 as F32: where they are, or converted into room [n]. */
static inline const float *as_f32(lm_dtype d, const void *x, int64_t at, int64_t n, float *room)
{
    const void *from = (const char *)x + (size_t)at * lm_dtype_size(d);
    if (d == LM_DTYPE_F32)
        return (const float *)from;
    lm_convert(d, from, LM_DTYPE_F32, room, n);
    return room;
}

/* Operand i, or NULL when it is absent. */
static inline const lm_tensor *opt_in(const lm_call *c, int i)
{
    return i < c->n_in && c->in[i].data ? &c->in[i] : NULL;
}

static inline lm_tensor *opt_out(const lm_call *c, int i)
{
    return i < c->n_out && c->out[i].data ? &c->out[i] : NULL;
}

static inline int64_t width(const lm_tensor *t)
{
    return t->ndim ? t->dim[t->ndim - 1] : 1;
}

static inline int64_t rows_of(const lm_tensor *t)
{
    int64_t w = width(t);
    return w ? lm_tensor_count(t) / w : 0;
}

/* True if a weight gradient is replaced, false if it is added to. */
static inline bool overwrites(const lm_call *c, lm_acc acc)
{
    return !lm_acc_adds(acc, c->step);
}

static inline void accumulate(const lm_call *c, lm_acc acc, lm_tensor *t, int64_t i, double v)
{
    set(t, i, overwrites(c, acc) ? v : get(t, i) + v);
}

#endif
