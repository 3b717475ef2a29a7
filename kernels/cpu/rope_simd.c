/* SPDX-License-Identifier: Apache-2.0 */
/* rope_simd.c -- rotary embedding on vectors: the halves of a head are two streams, the table row
 * is shared by all heads of a row and stays in the first-level cache. */
#include "kernels/rope.h"

#include "kernels/cpu/simd.h"
#include "kernels/cpu/tables.h"

LM_INLINE void turn_head(lm_dtype t, const void *x, void *y, int64_t at, int64_t half,
                         const float *cosines, const float *sines, vf sign)
{
    VF_FOR(j, n, half, {
        vf cs = vf_get_any(LM_DTYPE_F32, cosines, j, n);
        vf sn = vf_get_any(LM_DTYPE_F32, sines, j, n) * sign;
        vf u = vf_get_any(t, x, at + j, n), v = vf_get_any(t, x, at + half + j, n);
        vf_put_any(t, y, at + j, vf_fnma(v, sn, u * cs), n);
        vf_put_any(t, y, at + half + j, vf_fma(u, sn, v * cs), n);
    });
}

LM_INLINE void rope_rows(lm_dtype t, void *ctx, int64_t begin, int64_t end)
{
    const lm_call *c = ctx;
    const lm_rope_attr *a = c->attr;
    int64_t turned = a->heads + a->kv_heads, all = turned + a->kv_heads, dim = a->head_dim;
    int64_t half = a->rotary_dim / 2, size = t == LM_DTYPE_BF16 ? 2 : 4;
    const int32_t *pos = c->in[1].data;
    const float *table = c->in[2].data;
    const char *x = c->in[0].data;
    char *y = c->out[0].data;
    vf sign = vf_set(a->inverse ? -1 : 1);
    for (int64_t row = begin; row < end; row++) {
        const float *cosines = table + pos[row] * a->rotary_dim;
        int64_t at = row * all * dim;
        for (int64_t h = 0; h < turned; h++, at += dim) {
            turn_head(t, x, y, at, half, cosines, cosines + half, sign);
            int64_t rest = at + 2 * half;
            if (x != y && 2 * half < dim)
                memcpy(y + rest * size, x + rest * size, (size_t)((dim - 2 * half) * size));
        }
        if (x != y)
            memcpy(y + at * size, x + at * size, (size_t)(a->kv_heads * dim * size));
    }
}
VF_TYPED(rope_rows)

static void rope(const lm_call *c)
{
    lm_par_for(c->par, row_count(&c->in[0]), grain_rows(last_dim(&c->in[0])),
               VF_PICK(rope_rows, c->in[0].dtype), (void *)(uintptr_t)c);
}

const lm_kernel LM_TABLE_NAME(rope, LM_SIMD)[] = {
    VF_KERNEL("rope", rope, NULL),
    VF_KERNEL_END,
};
