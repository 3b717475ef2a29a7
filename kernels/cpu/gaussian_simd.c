/* SPDX-License-Identifier: Apache-2.0 */
/* gaussian_simd.c -- the rows of Gaussian attention (kernels/gaussian.h) on vectors: a head is copied while its squares are
 * added up. */
#include "kernels/gaussian.h"

#include <math.h>

#include "kernels/cpu/simd.h"
#include "kernels/cpu/tables.h"

LM_INLINE float round_to(lm_dtype t, float x)
{
    return t == LM_DTYPE_BF16 ? lm_bf16_to_f32(lm_f32_to_bf16(x)) : x;
}

LM_INLINE void put_columns(lm_dtype t, const lm_gaussian_attr *a, bool key, float n, void *y,
                           int64_t to)
{
    const float unit = LM_GAUSSIAN_UNIT;
    float column[LM_GAUSSIAN_MORE] = { 0 };
    int own = lm_gaussian_own(a, key), units = lm_gaussian_units(a, key);
    if (own >= 0) {
        float x = round_to(t, -n / unit);
        column[own] = x;
        if (isfinite(x)) {
            float left = -n - unit * x;
            column[own + 1] = round_to(t, left);
            column[own + 2] = round_to(t, left - column[own + 1]);
        }
    }
    if (units >= 0) {
        column[units] = unit;
        column[units + 1] = column[units + 2] = 1;
    }
    VF_FOR(j, live, LM_GAUSSIAN_MORE,
           { vf_put_any(t, y, to + j, vf_get_any(LM_DTYPE_F32, column, j, live), live); });
}

LM_INLINE void longer_rows(lm_dtype t, void *ctx, int64_t begin, int64_t end)
{
    const lm_call *c = ctx;
    const lm_gaussian_attr *a = c->attr;
    const void *x = c->in[0].data;
    void *y = c->out[0].data;
    int64_t D = a->head_dim, heads = a->heads + a->kv_heads, values = a->kv_heads * D;
    for (int64_t i = begin; i < end; i++) {
        int64_t from = i * (heads * D + values), to = i * lm_gaussian_row(a);
        for (int64_t h = 0; h < heads; h++, from += D, to += D + LM_GAUSSIAN_MORE) {
            vf sum = vf_zero();
            VF_FOR(d, live, D, {
                vf v = vf_get_any(t, x, from + d, live);
                sum = vf_fma(v, v, sum);
                vf_put_any(t, y, to + d, v, live);
            });
            put_columns(t, a, h >= a->heads, 0.5f * vf_sum(sum), y, to + D);
        }
        VF_FOR(d, live, values,
               { vf_put_any(t, y, to + d, vf_get_any(t, x, from + d, live), live); });
    }
}
VF_TYPED(longer_rows)

static void gaussian_rows(const lm_call *c)
{
    lm_par_for(c->par, c->in[0].dim[0], grain_rows(last_dim(&c->out[0])),
               VF_PICK(longer_rows, c->in[0].dtype), (void *)(uintptr_t)c);
}

LM_INLINE void shorter_rows(lm_dtype t, void *ctx, int64_t begin, int64_t end)
{
    const lm_call *c = ctx;
    const lm_gaussian_attr *a = c->attr;
    const void *dy = c->in[0].data, *y = c->in[1].data;
    void *dx = c->out[0].data;
    int64_t D = a->head_dim, heads = a->heads + a->kv_heads, values = a->kv_heads * D;
    for (int64_t i = begin; i < end; i++) {
        int64_t from = i * lm_gaussian_row(a), to = i * (heads * D + values);
        for (int64_t h = 0; h < heads; h++, from += D + LM_GAUSSIAN_MORE, to += D) {
            int own = lm_gaussian_own(a, h >= a->heads);
            float column[VF_LANES];
            vf_store(column, vf_zero());
            if (own >= 0)
                vf_store(column, vf_get_n(t, dy, from + D + own, 1));
            vf by = vf_set(column[0] / LM_GAUSSIAN_UNIT);
            VF_FOR(d, live, D, {
                vf g = vf_get_any(t, dy, from + d, live);
                if (own >= 0)
                    g = vf_fnma(by, vf_get_any(t, y, from + d, live), g);
                vf_put_any(t, dx, to + d, g, live);
            });
        }
        VF_FOR(d, live, values,
               { vf_put_any(t, dx, to + d, vf_get_any(t, dy, from + d, live), live); });
    }
}
VF_TYPED(shorter_rows)

static void gaussian_rows_dx(const lm_call *c)
{
    lm_par_for(c->par, c->in[0].dim[0], grain_rows(last_dim(&c->in[0])),
               VF_PICK(shorter_rows, c->in[0].dtype), (void *)(uintptr_t)c);
}

const lm_kernel LM_TABLE_NAME(gaussian, LM_SIMD)[] = {
    VF_KERNEL("gaussian_rows", gaussian_rows, NULL),
    VF_KERNEL("gaussian_rows_dx", gaussian_rows_dx, NULL),
    VF_KERNEL_END,
};
