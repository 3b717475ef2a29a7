/* SPDX-License-Identifier: Apache-2.0 */
/* gated_norm_ref.c -- the definition of the gated norm (kernels/gated_norm.h). */
#include "kernels/gated_norm.h"

#include <math.h>

#include "kernels/cpu/ref.h"
#include "kernels/cpu/tables.h"

static double silu(double z)
{
    return z / (1 + exp(-z));
}

static double silu_slope(double z)
{
    double p = 1 / (1 + exp(-z));
    return p * (1 + z * (1 - p));
}

static void gated_norm(const lm_call *c)
{
    const lm_gated_norm_attr *a = c->attr;
    const lm_tensor *x = &c->in[0];
    lm_tensor *stat = opt_out(c, 1);
    int64_t E = a->head_dim;
    for (int64_t i = 0; i < rows_of(x) * a->heads; i++) {
        double sum = 0;
        for (int64_t e = 0; e < E; e++)
            sum += get(x, i * E + e) * get(x, i * E + e);
        double r = 1 / sqrt(sum / (double)E + a->eps);
        for (int64_t e = 0; e < E; e++)
            set(&c->out[0], i * E + e,
                get(&c->in[2], e) * rounded(x->dtype, get(x, i * E + e) * r) *
                    silu(get(&c->in[1], i * E + e)));
        if (stat)
            set(stat, i, r);
    }
}

static void gated_norm_dx(const lm_call *c)
{
    const lm_gated_norm_attr *a = c->attr;
    const lm_tensor *dy = &c->in[0], *x = &c->in[1], *z = &c->in[2], *w = &c->in[3];
    lm_tensor *dx = opt_out(c, 0), *dz = opt_out(c, 1);
    int64_t E = a->head_dim;
    for (int64_t i = 0; i < rows_of(x) * a->heads; i++) {
        double r = get(&c->in[4], i), along = 0;
        for (int64_t e = i * E; e < i * E + E; e++)
            along += get(dy, e) * get(w, e % E) * silu(get(z, e)) * get(x, e) * r / (double)E;
        for (int64_t e = i * E; e < i * E + E; e++) {
            double xh = get(x, e) * r, g = get(dy, e) * get(w, e % E);
            if (dx)
                set(dx, e, r * (g * silu(get(z, e)) - xh * along));
            if (dz)
                set(dz, e, g * rounded(x->dtype, xh) * silu_slope(get(z, e)));
        }
    }
}

static void gated_norm_dw(const lm_call *c)
{
    const lm_gated_norm_attr *a = c->attr;
    const lm_tensor *dy = &c->in[0], *x = &c->in[1], *z = &c->in[2];
    int64_t E = a->head_dim;
    for (int64_t e = 0; e < E; e++) {
        double sum = 0;
        for (int64_t i = 0; i < rows_of(x) * a->heads; i++)
            sum += get(dy, i * E + e) * rounded(x->dtype, get(x, i * E + e) * get(&c->in[3], i)) *
                   silu(get(z, i * E + e));
        accumulate(c, a->acc, &c->out[0], e, sum);
    }
}

const lm_kernel lm_gated_norm_ref_kernels[] = {
    { "gated_norm", LM_DTYPE_NONE, LM_CPU_REF, gated_norm, NULL },
    { "gated_norm_dx", LM_DTYPE_NONE, LM_CPU_REF, gated_norm_dx, NULL },
    { "gated_norm_dw", LM_DTYPE_NONE, LM_CPU_REF, gated_norm_dw, NULL },
    { NULL, LM_DTYPE_NONE, LM_CPU_REF, NULL, NULL },
};
