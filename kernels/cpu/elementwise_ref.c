/* SPDX-License-Identifier: Apache-2.0 */
/* elementwise_ref.c -- the definition of the elementwise family (kernels/elementwise.h). */
#include "kernels/elementwise.h"

#include <math.h>

#include "base/rng.h"
#include "kernels/cpu/ref.h"
#include "kernels/cpu/tables.h"

static const double root_2_pi = 0.79788456080286535588; /* sqrt(2/pi) */
static const double root_half = 0.70710678118654752440;

static double gelu_tanh(double x)
{
    return 0.5 * x * (1 + tanh(root_2_pi * (x + 0.044715 * x * x * x)));
}

static double gelu_tanh_slope(double x)
{
    double t = tanh(root_2_pi * (x + 0.044715 * x * x * x));
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * root_2_pi * (1 + 3 * 0.044715 * x * x);
}

static void gelu(const lm_call *c)
{
    const lm_gelu_attr *a = c->attr;
    for (int64_t i = 0; i < lm_tensor_count(&c->in[0]); i++) {
        double x = get(&c->in[0], i);
        set(&c->out[0], i, a->exact ? 0.5 * x * (1 + erf(x * root_half)) : gelu_tanh(x));
    }
}

static void gelu_dx(const lm_call *c)
{
    const lm_gelu_attr *a = c->attr;
    for (int64_t i = 0; i < lm_tensor_count(&c->in[0]); i++) {
        double x = get(&c->in[1], i), d;
        if (a->exact)
            d = 0.5 * (1 + erf(x * root_half)) + x * exp(-0.5 * x * x) * 0.5 * root_2_pi;
        else
            d = gelu_tanh_slope(x);
        set(&c->out[0], i, get(&c->in[0], i) * d);
    }
}

static double sigmoid(double x)
{
    return 1 / (1 + exp(-x));
}

static void swiglu(const lm_call *c)
{
    int64_t n_cols = width(&c->out[0]);
    for (int64_t n = 0; n < rows_of(&c->out[0]); n++) {
        for (int64_t i = 0; i < n_cols; i++) {
            double g = get(&c->in[0], 2 * n * n_cols + i);
            double u = get(&c->in[0], (2 * n + 1) * n_cols + i);
            set(&c->out[0], n * n_cols + i, g * sigmoid(g) * u);
        }
    }
}

static void swiglu_dx(const lm_call *c)
{
    int64_t n_cols = width(&c->in[0]);
    for (int64_t n = 0; n < rows_of(&c->in[0]); n++) {
        for (int64_t i = 0; i < n_cols; i++) {
            double dh = get(&c->in[0], n * n_cols + i);
            double g = get(&c->in[1], 2 * n * n_cols + i);
            double u = get(&c->in[1], (2 * n + 1) * n_cols + i), s = sigmoid(g);
            set(&c->out[0], 2 * n * n_cols + i, dh * u * s * (1 + g * (1 - s)));
            set(&c->out[0], (2 * n + 1) * n_cols + i, dh * g * s);
        }
    }
}

static void geglu(const lm_call *c)
{
    int64_t n_cols = width(&c->out[0]);
    for (int64_t n = 0; n < rows_of(&c->out[0]); n++) {
        for (int64_t i = 0; i < n_cols; i++) {
            double g = get(&c->in[0], 2 * n * n_cols + i);
            double u = get(&c->in[0], (2 * n + 1) * n_cols + i);
            set(&c->out[0], n * n_cols + i, gelu_tanh(g) * u);
        }
    }
}

static void geglu_dx(const lm_call *c)
{
    int64_t n_cols = width(&c->in[0]);
    for (int64_t n = 0; n < rows_of(&c->in[0]); n++) {
        for (int64_t i = 0; i < n_cols; i++) {
            double dh = get(&c->in[0], n * n_cols + i);
            double g = get(&c->in[1], 2 * n * n_cols + i);
            double u = get(&c->in[1], (2 * n + 1) * n_cols + i);
            set(&c->out[0], 2 * n * n_cols + i, dh * u * gelu_tanh_slope(g));
            set(&c->out[0], (2 * n + 1) * n_cols + i, dh * gelu_tanh(g));
        }
    }
}

static void soft_cap(const lm_call *c)
{
    const lm_soft_cap_attr *a = c->attr;
    for (int64_t i = 0; i < lm_tensor_count(&c->in[0]); i++)
        set(&c->out[0], i, a->cap * tanh(get(&c->in[0], i) / a->cap));
}

static void soft_cap_dx(const lm_call *c)
{
    const lm_soft_cap_attr *a = c->attr;
    for (int64_t i = 0; i < lm_tensor_count(&c->in[0]); i++) {
        double t = tanh(get(&c->in[1], i) / a->cap);
        set(&c->out[0], i, get(&c->in[0], i) * (1 - t * t));
    }
}

static void add(const lm_call *c)
{
    for (int64_t i = 0; i < lm_tensor_count(&c->in[0]); i++)
        set(&c->out[0], i, get(&c->in[0], i) + get(&c->in[1], i));
}

static void dropout(const lm_call *c)
{
    const lm_dropout_attr *a = c->attr;
    int64_t count = lm_tensor_count(&c->in[0]), run;
    uint64_t threshold = (uint64_t)floor(a->p * 4294967296.0);
    lm_rng rng = lm_rng_make(c->step->seed, "dropout", (uint64_t)a->site);
    uint64_t base = lm_rng_first(&rng, (uint64_t)c->step->step * 65536 + (uint64_t)c->step->micro,
                                 (uint64_t)lm_origin_count(&a->origin, count));
    for (int64_t i = 0; i < count; i++) {
        uint64_t at = base + (uint64_t)lm_origin_index(&a->origin, i, &run);
        bool kept = lm_rng_u32(rng, at) >= threshold;
        set(&c->out[0], i, kept ? get(&c->in[0], i) / (1 - a->p) : 0);
    }
}

static void cast(const lm_call *c)
{
    for (int64_t i = 0; i < lm_tensor_count(&c->in[0]); i++)
        set(&c->out[0], i, get(&c->in[0], i));
}

static void rows(const lm_call *c)
{
    int64_t n_cols = width(&c->out[0]);
    for (int64_t m = 0; m < rows_of(&c->out[0]); m++) {
        int64_t from = (int64_t)get(&c->in[1], m) * n_cols;
        for (int64_t i = 0; i < n_cols; i++)
            set(&c->out[0], m * n_cols + i, get(&c->in[0], from + i));
    }
}

const lm_kernel lm_elementwise_ref_kernels[] = {
    { "gelu", LM_DTYPE_NONE, LM_CPU_REF, gelu, NULL },
    { "gelu_dx", LM_DTYPE_NONE, LM_CPU_REF, gelu_dx, NULL },
    { "swiglu", LM_DTYPE_NONE, LM_CPU_REF, swiglu, NULL },
    { "swiglu_dx", LM_DTYPE_NONE, LM_CPU_REF, swiglu_dx, NULL },
    { "geglu", LM_DTYPE_NONE, LM_CPU_REF, geglu, NULL },
    { "geglu_dx", LM_DTYPE_NONE, LM_CPU_REF, geglu_dx, NULL },
    { "soft_cap", LM_DTYPE_NONE, LM_CPU_REF, soft_cap, NULL },
    { "soft_cap_dx", LM_DTYPE_NONE, LM_CPU_REF, soft_cap_dx, NULL },
    { "add", LM_DTYPE_NONE, LM_CPU_REF, add, NULL },
    { "dropout", LM_DTYPE_NONE, LM_CPU_REF, dropout, NULL },
    { "cast", LM_DTYPE_NONE, LM_CPU_REF, cast, NULL },
    { "rows", LM_DTYPE_NONE, LM_CPU_REF, rows, NULL },
    { NULL, LM_DTYPE_NONE, LM_CPU_REF, NULL, NULL },
};
