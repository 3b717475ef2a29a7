/* SPDX-License-Identifier: Apache-2.0 */
/* attention_sink_simd.c -- attention_dsinks on vectors: one job for each head, whose rows are summed in their order. */
#include <math.h>

#include "kernels/attention.h"
#include "kernels/cpu/simd.h"
#include "kernels/cpu/tables.h"

LM_INLINE void sum_heads(lm_dtype t, void *ctx, int64_t begin, int64_t end)
{
    const lm_call *c = ctx;
    const lm_attention_dsinks_attr *a = c->attr;
    const float *lse = c->in[2].data, *sinks = c->in[3].data;
    float *out = c->out[0].data;
    int64_t B = c->in[2].dim[0], T = c->in[2].dim[2], width = c->in[0].dim[1], W = width / a->heads;
    bool add = !overwrites(c, a->acc);
    for (int64_t h = begin; h < end; h++) {
        double sum = 0;
        for (int64_t i = 0; i < B * T; i++) {
            int64_t at = i * width + h * W;
            vf dot = vf_zero();
            VF_FOR(w, live, W, {
                vf x = vf_get_any(t, c->in[0].data, at + w, live);
                dot = vf_fma(x, vf_get_any(t, c->in[1].data, at + w, live), dot);
            });
            sum -= (double)(expf(sinks[h] - lse[(i / T * a->heads + h) * T + i % T]) * vf_sum(dot));
        }
        out[h] = (float)(sum + (add ? (double)out[h] : 0));
    }
}
VF_TYPED(sum_heads)

static void attention_dsinks(const lm_call *c)
{
    const lm_attention_dsinks_attr *a = c->attr;
    lm_par_for(c->par, a->heads, 1, VF_PICK(sum_heads, c->in[0].dtype), (void *)(uintptr_t)c);
}

const lm_kernel LM_TABLE_NAME(attention_sink, LM_SIMD)[] = {
    { "attention_dsinks", LM_DTYPE_F32, LM_SIMD_LEVEL, attention_dsinks, NULL },
    { "attention_dsinks", LM_DTYPE_BF16, LM_SIMD_LEVEL, attention_dsinks, NULL },
    { 0 },
};
