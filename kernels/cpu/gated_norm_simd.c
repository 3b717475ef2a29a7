/* SPDX-License-Identifier: Apache-2.0 */
/* gated_norm_simd.c -- the gated norm on vectors, a head of a row at a time. */
#include "kernels/gated_norm.h"

#include <math.h>

#include "kernels/cpu/simd.h"
#include "kernels/cpu/tables.h"

enum { DW_ROWS = 512 /* heads of rows whose parts of dw are added up by themselves */ };

LM_INLINE void norm_rows(lm_dtype t, void *ctx, int64_t begin, int64_t end)
{
    const lm_call *c = ctx;
    const lm_gated_norm_attr *a = c->attr;
    const void *x = c->in[0].data, *z = c->in[1].data;
    const float *w = c->in[2].data;
    float *stat = opt_data(c->out, c->n_out, 1);
    int64_t E = a->head_dim;
    for (int64_t i = begin * a->heads; i < end * a->heads; i++) {
        vf sum = vf_zero();
        VF_FOR(e, n, E, {
            vf v = vf_get_any(t, x, i * E + e, n);
            sum = vf_fma(v, v, sum);
        });
        float r = 1 / sqrtf(vf_sum(sum) / (float)E + (float)a->eps);
        VF_FOR(e, n, E, {
            vf xh = vf_round_to(t, vf_get_any(t, x, i * E + e, n) * vf_set(r));
            vf g = vf_get_any(t, z, i * E + e, n);
            vf y = xh * vf_get_any(LM_DTYPE_F32, w, e, n) * g * vf_sigmoid(g);
            vf_put_any(t, c->out[0].data, i * E + e, y, n);
        });
        if (stat)
            stat[i] = r;
    }
}
VF_TYPED(norm_rows)

LM_INLINE void dx_rows(lm_dtype t, void *ctx, int64_t begin, int64_t end)
{
    const lm_call *c = ctx;
    const lm_gated_norm_attr *a = c->attr;
    const void *dy = c->in[0].data, *x = c->in[1].data, *z = c->in[2].data;
    const float *w = c->in[3].data, *stat = c->in[4].data;
    void *dx = opt_data(c->out, c->n_out, 0), *dz = opt_data(c->out, c->n_out, 1);
    int64_t E = a->head_dim;
    for (int64_t i = begin * a->heads; i < end * a->heads; i++) {
        vf sum = vf_zero(), r = vf_set(stat[i]);
        VF_FOR(e, n, E, {
            vf g = vf_get_any(t, z, i * E + e, n);
            vf d = vf_get_any(t, dy, i * E + e, n) * vf_get_any(LM_DTYPE_F32, w, e, n);
            sum = vf_fma(d * g * vf_sigmoid(g), vf_get_any(t, x, i * E + e, n), sum);
        });
        vf along = vf_set(vf_sum(sum) * stat[i] / (float)E);
        VF_FOR(e, n, E, {
            vf g = vf_get_any(t, z, i * E + e, n), p = vf_sigmoid(g);
            vf d = vf_get_any(t, dy, i * E + e, n) * vf_get_any(LM_DTYPE_F32, w, e, n);
            vf xh = vf_get_any(t, x, i * E + e, n) * r;
            if (dx)
                vf_put_any(t, dx, i * E + e, r * vf_fnma(xh, along, d * g * p), n);
            if (dz)
                vf_put_any(t, dz, i * E + e,
                           d * vf_round_to(t, xh) * p * vf_fma(g, vf_set(1) - p, vf_set(1)), n);
        });
    }
}
VF_TYPED(dx_rows)

LM_INLINE void dw_parts(lm_dtype t, void *ctx, int64_t begin, int64_t end)
{
    const lm_call *c = ctx;
    const lm_gated_norm_attr *a = c->attr;
    const void *dy = c->in[0].data, *x = c->in[1].data, *z = c->in[2].data;
    const float *stat = c->in[3].data;
    int64_t E = a->head_dim, all = row_count(&c->in[0]) * a->heads;
    for (int64_t k = begin; k < end; k++) {
        float *sum = (float *)c->work + k * E;
        int64_t last = (k + 1) * DW_ROWS < all ? (k + 1) * DW_ROWS : all;
        memset(sum, 0, (size_t)E * sizeof *sum);
        for (int64_t i = k * DW_ROWS; i < last; i++)
            VF_FOR(e, n, E, {
                vf g = vf_get_any(t, z, i * E + e, n);
                vf xh = vf_round_to(t, vf_get_any(t, x, i * E + e, n) * vf_set(stat[i]));
                vf d = vf_get_any(t, dy, i * E + e, n) * g * vf_sigmoid(g);
                vf_put_any(LM_DTYPE_F32, sum, e, vf_fma(d, xh, vf_get_any(LM_DTYPE_F32, sum, e, n)),
                           n);
            });
    }
}
VF_TYPED(dw_parts)

static void gated_norm(const lm_call *c)
{
    lm_par_for(c->par, row_count(&c->in[0]), grain_rows(last_dim(&c->in[0])),
               VF_PICK(norm_rows, c->in[0].dtype), (void *)(uintptr_t)c);
}

static void gated_norm_dx(const lm_call *c)
{
    lm_par_for(c->par, row_count(&c->in[0]), grain_rows(last_dim(&c->in[0])),
               VF_PICK(dx_rows, c->in[0].dtype), (void *)(uintptr_t)c);
}

static int64_t dw_count(const lm_call *c)
{
    const lm_gated_norm_attr *a = c->attr;
    return (row_count(&c->in[0]) * a->heads + DW_ROWS - 1) / DW_ROWS;
}

static void gated_norm_dw(const lm_call *c)
{
    const lm_gated_norm_attr *a = c->attr;
    int64_t E = a->head_dim, parts = dw_count(c);
    float *dw = c->out[0].data;
    lm_par_for(c->par, parts, 1, VF_PICK(dw_parts, c->in[0].dtype), (void *)(uintptr_t)c);
    for (int64_t e = 0; e < E; e++) {
        float sum = overwrites(c, a->acc) ? 0 : dw[e];
        for (int64_t k = 0; k < parts; k++)
            sum += ((const float *)c->work)[k * E + e];
        dw[e] = sum;
    }
}

static size_t dw_work(const lm_call *c, int threads)
{
    const lm_gated_norm_attr *a = c->attr;
    (void)threads;
    return (size_t)(dw_count(c) * a->head_dim) * sizeof(float);
}

const lm_kernel LM_TABLE_NAME(gated_norm, LM_SIMD)[] = {
    VF_KERNEL("gated_norm", gated_norm, NULL),
    VF_KERNEL("gated_norm_dx", gated_norm_dx, NULL),
    VF_KERNEL("gated_norm_dw", gated_norm_dw, dw_work),
    VF_KERNEL_END,
};
