/* SPDX-License-Identifier: Apache-2.0 */
/* attention_sink_ref.c -- the definition of attention_dsinks (kernels/attention.h). */
#include <math.h>

#include "kernels/attention.h"
#include "kernels/cpu/ref.h"
#include "kernels/cpu/tables.h"

static void attention_dsinks(const lm_call *c)
{
    const lm_attention_dsinks_attr *a = c->attr;
    const lm_tensor *lse = &c->in[2];
    int64_t B = lse->dim[0], H = a->heads, T = lse->dim[2], width = c->in[0].dim[1], W = width / H;
    bool add = !overwrites(c, a->acc);
    for (int64_t h = 0; h < H; h++) {
        double s = get(&c->in[3], h), sum = add ? get(&c->out[0], h) : 0;
        for (int64_t i = 0; i < B * T; i++) {
            int64_t at = i * width + h * W;
            double dot = 0;
            for (int64_t w = 0; w < W; w++)
                dot += get(&c->in[0], at + w) * get(&c->in[1], at + w);
            sum -= exp(s - get(lse, (i / T * H + h) * T + i % T)) * dot;
        }
        set(&c->out[0], h, sum);
    }
}

const lm_kernel lm_attention_sink_ref_kernels[] = {
    { "attention_dsinks", LM_DTYPE_NONE, LM_CPU_REF, attention_dsinks, NULL },
    { 0 },
};
