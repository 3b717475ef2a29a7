/* SPDX-License-Identifier: Apache-2.0 */
/* virtual_simd.c -- rows of virtual tokens.  They are few: all others are copied, or stay where they are. */
#include "kernels/virtual.h"

#include "kernels/cpu/simd.h"
#include "kernels/cpu/tables.h"

/* Rows [begin, end) of a copy, unless both are one. */
static void copy_rows(const lm_tensor *from, lm_tensor *to, int64_t begin, int64_t end)
{
    size_t row = (size_t)to->dim[1] * lm_dtype_size(to->dtype);
    if (from->data != to->data)
        memcpy((char *)to->data + (size_t)begin * row,
               (const char *)from->data + (size_t)begin * row, (size_t)(end - begin) * row);
}

LM_INLINE void put_some(lm_dtype t, const lm_call *c, int64_t begin, int64_t end)
{
    const lm_virtual_attr *a = c->attr;
    const int32_t *tok = c->in[1].data;
    const float *table = c->in[2].data;
    int64_t wide = c->in[0].dim[1], d = c->in[2].dim[1];
    void *y = c->out[0].data;
    copy_rows(&c->in[0], &c->out[0], begin, end);
    for (int64_t r = begin; r < end; r++) {
        if (tok[r] < a->first)
            continue;
        const float *from = table + (tok[r] - a->first) * d;
        int64_t to = r * wide + a->at;
        VF_FOR(i, n, d, {
            vf v = vf_get_any(LM_DTYPE_F32, from, i, n);
            if (a->add)
                v += vf_get_any(t, y, to + i, n);
            vf_put_any(t, y, to + i, v, n);
        });
    }
}

static void put_rows_f32(void *ctx, int64_t begin, int64_t end, int worker)
{
    (void)worker;
    put_some(LM_DTYPE_F32, ctx, begin, end);
}

static void put_rows_bf16(void *ctx, int64_t begin, int64_t end, int worker)
{
    (void)worker;
    put_some(LM_DTYPE_BF16, ctx, begin, end);
}

static void virtual_rows(const lm_call *c)
{
    lm_par_for(c->par, c->in[0].dim[0], grain_rows(c->in[0].dim[1]),
               VF_PICK(put_rows, c->out[0].dtype), (void *)(uintptr_t)c);
}

static void clear_rows(void *ctx, int64_t begin, int64_t end, int worker)
{
    const lm_call *c = ctx;
    const lm_virtual_attr *a = c->attr;
    const int32_t *tok = c->in[1].data;
    size_t size = lm_dtype_size(c->out[0].dtype);
    (void)worker;
    copy_rows(&c->in[0], &c->out[0], begin, end);
    for (int64_t r = begin; r < end; r++)
        if (!a->add && tok[r] >= a->first)
            memset((char *)c->out[0].data + (size_t)(r * c->out[0].dim[1] + a->at) * size, 0,
                   (size_t)a->width * size);
}

static void virtual_rows_dx(const lm_call *c)
{
    lm_par_for(c->par, c->in[0].dim[0], grain_rows(c->in[0].dim[1]), clear_rows,
               (void *)(uintptr_t)c);
}

/* Rows of the table, each by one thread in the order of the rows of dy. */
LM_INLINE void sum_some(lm_dtype t, const lm_call *c, int64_t begin, int64_t end)
{
    const lm_virtual_attr *a = c->attr;
    const int32_t *tok = c->in[1].data;
    const void *dy = c->in[0].data;
    int64_t wide = c->in[0].dim[1], d = c->out[0].dim[1];
    float *dw = (float *)c->out[0].data;
    if (a->fresh || overwrites(c, a->acc))
        memset(dw + begin * d, 0, (size_t)((end - begin) * d) * sizeof *dw);
    for (int64_t r = 0; r < c->in[0].dim[0]; r++) {
        int64_t p = tok[r] - a->first, from = r * wide + a->at;
        if (p < begin || p >= end)
            continue;
        VF_FOR(i, n, d, {
            vf v = vf_get_any(LM_DTYPE_F32, dw, p * d + i, n) + vf_get_any(t, dy, from + i, n);
            vf_put_any(LM_DTYPE_F32, dw, p * d + i, v, n);
        });
    }
}

static void sum_rows_f32(void *ctx, int64_t begin, int64_t end, int worker)
{
    (void)worker;
    sum_some(LM_DTYPE_F32, ctx, begin, end);
}

static void sum_rows_bf16(void *ctx, int64_t begin, int64_t end, int worker)
{
    (void)worker;
    sum_some(LM_DTYPE_BF16, ctx, begin, end);
}

static void virtual_rows_dw(const lm_call *c)
{
    lm_par_for(c->par, c->out[0].dim[0], 4, VF_PICK(sum_rows, c->in[0].dtype),
               (void *)(uintptr_t)c);
}

const lm_kernel LM_TABLE_NAME(virtual, LM_SIMD)[] = {
    VF_KERNEL("virtual_rows", virtual_rows, NULL),
    VF_KERNEL("virtual_rows_dx", virtual_rows_dx, NULL),
    VF_KERNEL("virtual_rows_dw", virtual_rows_dw, NULL),
    VF_KERNEL_END,
};
