/* SPDX-License-Identifier: Apache-2.0 */
/* arrange_ref.c -- the definition of the arrange family (kernels/arrange.h). */
#include "kernels/arrange.h"

#include "kernels/cpu/ref.h"
#include "kernels/cpu/tables.h"
#include "numeric/code_rows.h"

static void permute(const lm_call *c)
{
    const lm_permute_attr *a = c->attr;
    int64_t pitch[LM_PERMUTE_DIMS] = { 0 }, step = 1;
    for (int i = a->ndim - 1; i >= 0; i--) {
        pitch[i] = step;
        step *= a->dim[i];
    }
    for (int64_t i = 0; i < lm_tensor_count(&c->out[0]); i++) {
        int64_t left = i, from = 0;
        for (int d = a->ndim - 1; d >= 0; d--) {
            from += left % a->dim[a->perm[d]] * pitch[a->perm[d]];
            left /= a->dim[a->perm[d]];
        }
        set(&c->out[0], i, get(&c->in[0], from));
    }
}

static void window(const lm_call *c)
{
    const lm_window_attr *a = c->attr;
    const lm_tensor *x = &c->in[0];
    for (int64_t i = 0; i < a->rows; i++)
        for (int64_t j = 0; j < a->cols; j++) {
            int64_t row = a->row + i, col = a->col + j;
            bool inside = row >= 0 && row < x->dim[0] && col >= 0 && col < x->dim[1];
            set(&c->out[0], i * a->cols + j, inside ? get(x, row * x->dim[1] + col) : 0);
        }
}

static void join(const lm_call *c)
{
    bool rows = ((const lm_join_attr *)c->attr)->rows;
    int64_t at = 0, pitch = c->out[0].dim[1];
    for (int k = 0; k < LM_JOIN_PARTS; k++) {
        const lm_tensor *x = opt_in(c, k);
        if (!x)
            continue;
        for (int64_t i = 0; i < x->dim[0]; i++)
            for (int64_t j = 0; j < x->dim[1]; j++)
                set(&c->out[0], i * pitch + at + j, get(x, i * x->dim[1] + j));
        at += rows ? x->dim[0] * pitch : x->dim[1];
    }
}

static void gather(const lm_call *c)
{
    const int32_t *id = c->in[1].data;
    for (int64_t i = 0; i < lm_tensor_count(&c->out[0]); i++)
        set(&c->out[0], i, id[i] < 0 ? 0 : get(&c->in[0], id[i]));
}

static void scatter(const lm_call *c)
{
    const int32_t *id = c->in[1].data;
    double *sum = c->work;
    int64_t count = lm_tensor_count(&c->out[0]);
    for (int64_t i = 0; i < count; i++)
        sum[i] = 0;
    for (int64_t i = 0; i < lm_tensor_count(&c->in[0]); i++)
        if (id[i] >= 0)
            sum[id[i]] += get(&c->in[0], i);
    for (int64_t i = 0; i < count; i++)
        set(&c->out[0], i, sum[i]);
}

static size_t scatter_work(const lm_call *c, int threads)
{
    (void)threads;
    return (size_t)lm_tensor_count(&c->out[0]) * sizeof(double);
}

static void copy(const lm_call *c)
{
    for (int64_t i = 0; i < lm_tensor_count(&c->out[0]); i++)
        set(&c->out[0], i, get(&c->in[0], i));
}

static void widen(const lm_call *c)
{
    const lm_tensor *w = &c->in[0];
    if (!w->codes) {
        copy(c);
        return;
    }
    for (int64_t i = 0; i < w->dim[0]; i++) {
        void *row =
            (char *)c->out[0].data + (size_t)(i * w->dim[1]) * lm_dtype_size(c->out[0].dtype);
        lm_code_rows_numbers(w->codes, i, 1, w->dim[1], c->out[0].dtype, NULL, row, c->work);
    }
}

static size_t widen_work(const lm_call *c, int threads)
{
    const lm_tensor *w = &c->in[0];
    (void)threads;
    return w->codes ? lm_code_rows_scratch(c->out[0].dtype, w->dim[1]) : 0;
}

static void accumulate_value(const lm_call *c)
{
    const lm_accumulate_attr *a = c->attr;
    for (int64_t i = 0; i < lm_tensor_count(&c->out[0]); i++)
        accumulate(c, a->acc, &c->out[0], i, get(&c->in[0], i));
}

const lm_kernel lm_arrange_ref_kernels[] = {
    { "permute", LM_DTYPE_NONE, LM_CPU_REF, permute, NULL },
    { "window", LM_DTYPE_NONE, LM_CPU_REF, window, NULL },
    { "join", LM_DTYPE_NONE, LM_CPU_REF, join, NULL },
    { "gather", LM_DTYPE_NONE, LM_CPU_REF, gather, NULL },
    { "scatter", LM_DTYPE_NONE, LM_CPU_REF, scatter, scatter_work },
    { "widen", LM_DTYPE_NONE, LM_CPU_REF, widen, widen_work },
    { "stop", LM_DTYPE_NONE, LM_CPU_REF, copy, NULL },
    { "accumulate", LM_DTYPE_NONE, LM_CPU_REF, accumulate_value, NULL },
    { NULL, LM_DTYPE_NONE, LM_CPU_REF, NULL, NULL },
};
