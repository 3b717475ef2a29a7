/* SPDX-License-Identifier: Apache-2.0 */
/* matmul_ref.c -- the definition of the matmul family (kernels/matmul.h). */
#include "kernels/matmul.h"

#include <math.h>

#include "kernels/cpu/invert.h"
#include "kernels/cpu/ref.h"
#include "kernels/cpu/tables.h"

static void matmul(const lm_call *c)
{
    const lm_matmul_attr *attr = c->attr;
    lm_matmul_sizes s = lm_matmul_sizes_of(attr, &c->in[0], &c->in[1]);
    for (int64_t i = 0; i < s.batch * s.m * s.n; i++) {
        int64_t batch = i / (s.m * s.n), row = i / s.n % s.m, col = i % s.n;
        int64_t a = batch * s.stride_a + (attr->turn_a ? row : row * s.k);
        int64_t b = batch * s.stride_b + (attr->turn_b ? col * s.k : col);
        double sum = 0;
        for (int64_t k = 0; k < s.k; k++)
            sum += get(&c->in[0], a + k * (attr->turn_a ? s.m : 1)) *
                   get(&c->in[1], b + k * (attr->turn_b ? 1 : s.n));
        set(&c->out[0], i, sum);
    }
}

static void inverse(const lm_call *c)
{
    int64_t n = c->in[0].dim[c->in[0].ndim - 1], count = lm_tensor_count(&c->in[0]);
    double *x = c->work, *y = x + n * n;
    for (int64_t at = 0; at < count; at += n * n) {
        for (int64_t i = 0; i < n * n; i++)
            x[i] = get(&c->in[0], at + i);
        lm_invert(x, y, n);
        for (int64_t i = 0; i < n * n; i++)
            set(&c->out[0], at + i, y[i]);
    }
}

static size_t inverse_work(const lm_call *c, int threads)
{
    int64_t n = c->in[0].dim[c->in[0].ndim - 1];
    (void)threads;
    return (size_t)(2 * n * n) * sizeof(double);
}

const lm_kernel lm_matmul_ref_kernels[] = {
    { "matmul", LM_DTYPE_NONE, LM_CPU_REF, matmul, NULL },
    { "inverse", LM_DTYPE_NONE, LM_CPU_REF, inverse, inverse_work },
    { NULL, LM_DTYPE_NONE, LM_CPU_REF, NULL, NULL },
};
