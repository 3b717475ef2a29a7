/* SPDX-License-Identifier: Apache-2.0 */
/* rope_ref.c -- the definition of the rope family (kernels/rope.h). */
#include "kernels/rope.h"

#include "kernels/cpu/ref.h"
#include "kernels/cpu/tables.h"

static void rope(const lm_call *c)
{
    const lm_rope_attr *a = c->attr;
    const lm_tensor *x = &c->in[0], *pos = &c->in[1], *table = &c->in[2];
    lm_tensor *y = &c->out[0];
    int64_t turned = a->heads + a->kv_heads, all = turned + a->kv_heads;
    int64_t half = a->rotary_dim / 2;
    for (int64_t i = 0; i < rows_of(x) * all; i++) {
        int64_t at = i * a->head_dim, keep = 0;
        int64_t row = (int64_t)get(pos, i / all) * a->rotary_dim;
        if (i % all < turned) {
            for (int64_t j = 0; j < half; j++) {
                double cs = get(table, row + j), sn = get(table, row + half + j);
                double u = get(x, at + j), v = get(x, at + half + j);
                sn = a->inverse ? -sn : sn;
                set(y, at + j, u * cs - v * sn);
                set(y, at + half + j, v * cs + u * sn);
            }
            keep = 2 * half;
        }
        for (int64_t j = keep; j < a->head_dim; j++)
            set(y, at + j, get(x, at + j));
    }
}

const lm_kernel lm_rope_ref_kernels[] = {
    { "rope", LM_DTYPE_NONE, LM_CPU_REF, rope, NULL },
    { NULL, LM_DTYPE_NONE, LM_CPU_REF, NULL, NULL },
};
