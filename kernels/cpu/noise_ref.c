/* SPDX-License-Identifier: Apache-2.0 */
/* noise_ref.c -- the definition of noise (kernels/noise.h). */
#include "kernels/noise.h"

#include <math.h>

#include "base/rng.h"
#include "kernels/cpu/ref.h"
#include "kernels/cpu/tables.h"

/* The x with the distribution function u, 0 < u < 1: by Newton's method on the lower half, where erfc is exact. */
static double normal_quantile(double u)
{
    const double p = fmin(u, 1 - u);
    double x = 0;
    for (int i = 0; i < 100; i++) {
        const double more = 0.5 * erfc(-x * M_SQRT1_2) - p;
        const double density = 0.39894228040143267794 * exp(-0.5 * x * x);
        const double step = more / density;
        x -= step / (1 + 0.5 * x * step); /* Halley's: it converges from 0 at all tails */
        if (fabs(step) < 1e-14 * (1 + fabs(x)))
            break;
    }
    return u < 0.5 ? x : -x;
}

static void noise(const lm_call *c)
{
    const lm_noise_attr *a = c->attr;
    const int64_t count = lm_tensor_count(&c->in[0]);
    int64_t run;
    lm_rng rng = lm_rng_make(c->step->seed, "noise", (uint64_t)a->site);
    const uint64_t base =
        lm_rng_first(&rng, (uint64_t)c->step->step * 65536 + (uint64_t)c->step->micro,
                     (uint64_t)lm_origin_count(&a->origin, count));
    for (int64_t i = 0; i < count; i++) {
        const uint32_t draw =
            lm_rng_u32(rng, base + (uint64_t)lm_origin_index(&a->origin, i, &run));
        const double u = ((double)(draw >> 8) + 0.5) * 0x1p-24, x = get(&c->in[0], i);
        set(&c->out[0], i,
            a->kind == LM_NOISE_SCALED    ? x * (1 + a->amount * (2 * u - 1))
            : a->kind == LM_NOISE_WEIGHED ? x * a->amount * normal_quantile(u)
                                          : x + a->amount * normal_quantile(u));
    }
}

const lm_kernel lm_noise_ref_kernels[] = {
    { "noise", LM_DTYPE_NONE, LM_CPU_REF, noise, NULL },
    { NULL, LM_DTYPE_NONE, LM_CPU_REF, NULL, NULL },
};
