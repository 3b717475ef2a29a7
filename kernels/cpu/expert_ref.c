/* SPDX-License-Identifier: Apache-2.0 */
/* expert_ref.c -- the definition of kernels/expert.h. */
#include "kernels/expert.h"

#include <math.h>

#include "kernels/cpu/ref.h"
#include "kernels/cpu/tables.h"

static void grouped_bias(const lm_call *c)
{
    const int32_t *offsets = c->in[2].data;
    int64_t M = c->in[0].dim[1], groups = c->in[2].dim[0] - 1, N = c->in[0].dim[0];
    for (int64_t g = 0; g < groups; g++)
        for (int64_t i = offsets[g] * M; i < offsets[g + 1] * M; i++)
            set(&c->out[0], i, get(&c->in[0], i) + get(&c->in[1], g * M + i % M));
    for (int64_t i = offsets[groups] * M; i < N * M; i++)
        set(&c->out[0], i, get(&c->in[0], i));
}

static void grouped_bias_db(const lm_call *c)
{
    const lm_grouped_bias_attr *a = c->attr;
    const int32_t *offsets = c->in[1].data;
    int64_t M = c->in[0].dim[1];
    bool add = !overwrites(c, a->acc);
    for (int64_t g = 0; g < a->groups; g++)
        for (int64_t m = 0; m < M; m++) {
            double sum = add ? get(&c->out[0], g * M + m) : 0;
            for (int64_t r = offsets[g]; r < offsets[g + 1]; r++)
                sum += get(&c->in[0], r * M + m);
            set(&c->out[0], g * M + m, sum);
        }
}

static void clamped_swiglu(const lm_call *c)
{
    const lm_clamped_swiglu_attr *a = c->attr;
    for (int64_t i = 0; i < lm_tensor_count(&c->out[0]); i++) {
        double g = fmin(get(&c->in[0], 2 * i), a->limit);
        double u = fmax(fmin(get(&c->in[0], 2 * i + 1), a->limit), -a->limit);
        set(&c->out[0], i, (u + 1) * g / (1 + exp(-a->alpha * g)));
    }
}

static void clamped_swiglu_dx(const lm_call *c)
{
    const lm_clamped_swiglu_attr *a = c->attr;
    for (int64_t i = 0; i < lm_tensor_count(&c->in[0]); i++) {
        double g0 = get(&c->in[1], 2 * i), u0 = get(&c->in[1], 2 * i + 1);
        double g = fmin(g0, a->limit), u = fmax(fmin(u0, a->limit), -a->limit);
        double s = 1 / (1 + exp(-a->alpha * g)), dh = get(&c->in[0], i);
        set(&c->out[0], 2 * i, g0 > a->limit ? 0 : dh * (u + 1) * s * (1 + a->alpha * g * (1 - s)));
        set(&c->out[0], 2 * i + 1, fabs(u0) > a->limit ? 0 : dh * g * s);
    }
}

const lm_kernel lm_expert_ref_kernels[] = {
    { "grouped_bias", LM_DTYPE_NONE, LM_CPU_REF, grouped_bias, NULL },
    { "grouped_bias_db", LM_DTYPE_NONE, LM_CPU_REF, grouped_bias_db, NULL },
    { "clamped_swiglu", LM_DTYPE_NONE, LM_CPU_REF, clamped_swiglu, NULL },
    { "clamped_swiglu_dx", LM_DTYPE_NONE, LM_CPU_REF, clamped_swiglu_dx, NULL },
    { 0 },
};
