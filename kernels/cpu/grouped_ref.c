/* SPDX-License-Identifier: Apache-2.0 */
/* grouped_ref.c -- the definition of grouped linear layers and of their backward. */
#include "kernels/grouped.h"

#include "kernels/cpu/ref.h"
#include "kernels/cpu/tables.h"
#include "numeric/code_rows.h"

/* out [N,n] = in [N,k] times the group's weights, whose element (j, q) is j * at_j + q * at_q. */
static void rows_by_group(const lm_call *c, int64_t n, int64_t k, int64_t at_j, int64_t at_q)
{
    const lm_tensor *x = &c->in[0], *w = &c->in[1];
    const int32_t *offsets = c->in[2].data;
    lm_tensor one = { .data = c->work, .dtype = w->dtype }; /* of a group, if w is in codes */

    for (int64_t g = 0; g + 1 < c->in[2].dim[0]; g++) {
        int64_t rows = w->dim[0] / (c->in[2].dim[0] - 1), first = w->codes ? 0 : g * n * k;
        if (w->codes)
            lm_code_rows_numbers(w->codes, g * rows, rows, w->dim[1], w->dtype, NULL, c->work,
                                 (double *)c->work + n * k);
        for (int64_t i = offsets[g]; i < offsets[g + 1]; i++)
            for (int64_t j = 0; j < n; j++) {
                double s = 0;
                for (int64_t q = 0; q < k; q++)
                    s += get(x, i * k + q) * get(w->codes ? &one : w, first + j * at_j + q * at_q);
                set(&c->out[0], i * n + j, s);
            }
    }
    for (int64_t i = offsets[c->in[2].dim[0] - 1] * n; i < x->dim[0] * n; i++)
        set(&c->out[0], i, 0);
}

static size_t rows_work(const lm_call *c, int threads)
{
    const lm_tensor *w = &c->in[1];
    (void)threads;
    return w->codes ? (size_t)(lm_tensor_count(w) / (c->in[2].dim[0] - 1)) * sizeof(double) +
                          lm_code_rows_scratch(w->dtype, w->dim[1])
                    : 0;
}

static void grouped_linear(const lm_call *c)
{
    int64_t m = c->out[0].dim[1], k = c->in[0].dim[1];
    rows_by_group(c, m, k, k, 1);
}

static void grouped_linear_dx(const lm_call *c)
{
    int64_t m = c->in[0].dim[1], k = c->out[0].dim[1];
    rows_by_group(c, k, m, 1, k);
}

static void grouped_linear_dw(const lm_call *c)
{
    const lm_grouped_attr *attr = c->attr;
    const lm_tensor *dy = &c->in[0], *x = &c->in[1];
    const int32_t *offsets = c->in[2].data;
    int64_t m = dy->dim[1], k = x->dim[1];

    for (int64_t g = 0; g + 1 < c->in[2].dim[0]; g++)
        for (int64_t j = 0; j < m; j++)
            for (int64_t q = 0; q < k; q++) {
                double s = 0;
                for (int64_t i = offsets[g]; i < offsets[g + 1]; i++)
                    s += get(dy, i * m + j) * get(x, i * k + q);
                accumulate(c, attr->acc, &c->out[0], (g * m + j) * k + q, s);
            }
}

const lm_kernel lm_grouped_ref_kernels[] = {
    { "grouped_linear", LM_DTYPE_NONE, LM_CPU_REF, grouped_linear, rows_work },
    { "grouped_linear_dx", LM_DTYPE_NONE, LM_CPU_REF, grouped_linear_dx, rows_work },
    { "grouped_linear_dw", LM_DTYPE_NONE, LM_CPU_REF, grouped_linear_dw, NULL },
    { .op = NULL },
};
