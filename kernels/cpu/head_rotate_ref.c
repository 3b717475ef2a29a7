/* SPDX-License-Identifier: Apache-2.0 */
/* head_rotate_ref.c -- the definition of the rotation of heads (kernels/kv.h). */
#include <math.h>

#include "kernels/cpu/ref.h"
#include "kernels/cpu/tables.h"
#include "kernels/kv.h"

/* Head `h` of a row is rotated. */
static bool turns(const lm_head_rotate_attr *a, int64_t h)
{
    return h < a->heads ? a->q : h < a->heads + a->kv_heads ? a->k : a->v;
}

static bool odd_bits(int64_t i)
{
    bool odd = false;
    for (; i; i &= i - 1)
        odd = !odd;
    return odd;
}

static void head_rotate(const lm_call *c)
{
    const lm_head_rotate_attr *a = c->attr;
    const lm_tensor *x = &c->in[0];
    lm_tensor *y = &c->out[0];
    int64_t D = a->head_dim, P = lm_head_rotate_part(a), B = P & -P,
            all = a->heads + 2 * a->kv_heads;
    double in[LM_KV_MAX_DIM];
    for (int64_t i = 0; i < rows_of(x) * all; i++) {
        for (int64_t d = 0; d < D; d++)
            in[d] = get(x, i * D + d);
        for (int64_t d = 0; d < D; d++) {
            bool turned = d < P && turns(a, i % all);
            double sum = 0;
            for (int64_t j = 0; j < B && turned; j++)
                sum += odd_bits(d % B & j) ? -in[d / B * B + j] : in[d / B * B + j];
            set(y, i * D + d, turned ? sum / sqrt((double)B) : in[d]);
        }
    }
}

const lm_kernel lm_head_rotate_ref_kernels[] = {
    { "head_rotate", LM_DTYPE_NONE, LM_CPU_REF, head_rotate, NULL },
    { 0 },
};
