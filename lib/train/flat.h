/* SPDX-License-Identifier: Apache-2.0 */
/* flat.h -- calling a kernel on flat arrays outside a graph: the optimiser's part of a step.
 *
 * All operands, results and scratch lie in the backend's memory.  Calls go to the main stream: on a
 * device they return before they are done.  Private to lib/train. */
#ifndef LM_TRAIN_FLAT_H
#define LM_TRAIN_FLAT_H

#include "graph/backend.h"
#include "graph/op.h"

/* A 1-D operand; data NULL: absent. */
static inline lm_tensor lm_flat(lm_dtype d, int64_t n, const void *data)
{
    lm_tensor t = lm_shape1(d, n);
    t.data = (void *)(uintptr_t)data;
    return data ? t : (lm_tensor){ .dtype = LM_DTYPE_NONE };
}

/* Run the F32 kernel `op`.  Fails: LM_EBUG if the backend lacks it, or it wants scratch. */
lm_code lm_flat_call(lm_backend *b, const char *op, const void *attr, const lm_tensor *in, int n_in,
                     lm_tensor *out, int n_out, lm_err *e);

/* Sum of squares of n elements into out [1], in double, the same bits for any number of threads.
 * `work`: scratch of lm_sumsq_work(n) bytes. */
size_t lm_sumsq_work(lm_backend *b, int64_t n);
lm_code lm_sumsq(lm_backend *b, const float *x, int64_t n, void *work, double *out, lm_err *e);

/* Sum of n elements into out [1], in double; `more`: added to what is there.  `work`: likewise. */
size_t lm_total_work(lm_backend *b, int64_t n);
lm_code lm_total(lm_backend *b, const float *x, int64_t n, bool more, void *work, double *out,
                 lm_err *e);

/* Elements 0, stride, 2 stride, ... of x into y [m]. */
lm_code lm_strided(lm_backend *b, const float *x, int64_t stride, float *y, int64_t m, lm_err *e);

#endif
