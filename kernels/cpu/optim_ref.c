/* SPDX-License-Identifier: Apache-2.0 */
/* optim_ref.c -- the definition of the optim family (kernels/optim.h). */
#include "kernels/optim.h"

#include <math.h>

#include "kernels/cpu/ref.h"
#include "kernels/cpu/tables.h"
#include "kernels/panels.h"

double lm_optim_scale(const lm_call *c, int from, double clip_norm)
{
    const lm_tensor *sumsq = opt_in(c, from), *watch = opt_in(c, from + 1);
    double norm = sumsq ? sqrt(get(sumsq, 0)) : 0;
    if (!isfinite(norm) || (watch && !isfinite(get(watch, 0))))
        return NAN;
    return clip_norm > 0 && sumsq ? fmin(1, clip_norm / (norm + 1e-6)) : 1;
}

lm_adamw_attr lm_adamw_now(const lm_call *c)
{
    lm_adamw_attr a = *(const lm_adamw_attr *)c->attr;
    const lm_tensor *now = opt_in(c, 3);
    if (now) {
        a.lr = get(now, 0);
        a.bc1 = get(now, 1);
        a.bc2 = get(now, 2);
    }
    return a;
}

lm_sgd_attr lm_sgd_now(const lm_call *c)
{
    lm_sgd_attr a = *(const lm_sgd_attr *)c->attr;
    const lm_tensor *now = opt_in(c, 3);
    if (now) {
        a.lr = get(now, 0);
        a.first = get(now, 1) != 0;
    }
    return a;
}

/* The gradient used by the step: clipped by norm (scale), then by value; NaN propagates. */
static double clipped(double g, double scale, double bound)
{
    g *= scale;
    if (bound > 0)
        g = g > bound ? bound : g < -bound ? -bound : g;
    return g;
}

/* Where a copy has the number of element i of its parameter. */
static int64_t place_of(const lm_tensor *copy, int64_t i)
{
    return copy->panels ? lm_panel_at(i / width(copy), i % width(copy), width(copy)) : i;
}

static void adamw(const lm_call *c)
{
    const lm_adamw_attr a = lm_adamw_now(c);
    lm_tensor *p = &c->out[0], *m = &c->out[1], *v = &c->out[2], *copy = opt_out(c, 3);
    double scale = lm_optim_scale(c, 1, a.clip_norm);
    for (int64_t i = 0; !isnan(scale) && i < lm_tensor_count(&c->in[0]); i++) {
        double g = clipped(get(&c->in[0], i), scale, a.clip_value);
        double mi = a.beta1 * get(m, i) + (1 - a.beta1) * g;
        double vi = a.beta2 * get(v, i) + (1 - a.beta2) * g * g;
        double step = a.lr * (mi / a.bc1) / (sqrt(vi / a.bc2) + a.eps);
        set(m, i, mi);
        set(v, i, vi);
        set(p, i, get(p, i) * (1 - a.lr * a.weight_decay) - step);
        if (copy)
            set(copy, place_of(copy, i), get(p, i));
    }
}

static void sgd(const lm_call *c)
{
    const lm_sgd_attr a = lm_sgd_now(c);
    lm_tensor *p = &c->out[0], *buf = opt_out(c, 1), *copy = opt_out(c, 2);
    double scale = lm_optim_scale(c, 1, a.clip_norm);
    for (int64_t i = 0; !isnan(scale) && i < lm_tensor_count(&c->in[0]); i++) {
        double d = clipped(get(&c->in[0], i), scale, a.clip_value);
        d += a.weight_decay * get(p, i);
        if (buf) {
            double b = a.first ? d : a.momentum * get(buf, i) + (1 - a.dampening) * d;
            set(buf, i, b);
            d = a.nesterov ? d + a.momentum * b : b;
        }
        set(p, i, get(p, i) - a.lr * d);
        if (copy)
            set(copy, i, get(p, i));
    }
}

static void clip(const lm_call *c)
{
    set(&c->out[0], 0, lm_optim_scale(c, 0, ((const lm_clip_attr *)c->attr)->clip_norm));
}

static void sumsq(const lm_call *c)
{
    const lm_sum_block *block = c->in[1].data;
    for (int64_t i = 0; i < lm_tensor_count(&c->out[0]); i++)
        set(&c->out[0], i, 0);
    for (int64_t b = 0; b < c->in[1].dim[0]; b++) {
        const int64_t first = (int64_t)block[b].page * LM_SUM_BLOCK + block[b].first;
        double sum = 0;
        for (int64_t i = first; i < first + block[b].count; i++)
            sum += get(&c->in[0], i) * get(&c->in[0], i);
        if (block[b].count)
            set(&c->out[0], block[b].place, sum);
    }
}

static void total(const lm_call *c)
{
    double sum = c->step->more ? get(&c->out[0], 0) : 0, part = 0;
    for (int64_t i = 0; i < lm_tensor_count(&c->in[0]); i++)
        part += get(&c->in[0], i);
    set(&c->out[0], 0, sum + part);
}

/* Called at every logged step, always in F32. */
static void strided(const lm_call *c)
{
    const lm_strided_attr *a = c->attr;
    int64_t n = lm_tensor_count(&c->out[0]);
    if (c->in[0].dtype == LM_DTYPE_F32 && c->out[0].dtype == LM_DTYPE_F32) {
        const float *x = c->in[0].data;
        float *y = c->out[0].data;
        for (int64_t i = 0; i < n; i++)
            y[i] = x[i * a->stride];
        return;
    }
    for (int64_t i = 0; i < n; i++)
        set(&c->out[0], i, get(&c->in[0], i * a->stride));
}

const lm_kernel lm_optim_ref_kernels[] = {
    { "adamw", LM_DTYPE_NONE, LM_CPU_REF, adamw, NULL },
    { "sgd", LM_DTYPE_NONE, LM_CPU_REF, sgd, NULL },
    { "sumsq", LM_DTYPE_NONE, LM_CPU_REF, sumsq, NULL },
    { "clip", LM_DTYPE_NONE, LM_CPU_REF, clip, NULL },
    { "total", LM_DTYPE_NONE, LM_CPU_REF, total, NULL },
    { "strided", LM_DTYPE_NONE, LM_CPU_REF, strided, NULL },
    { NULL, LM_DTYPE_NONE, LM_CPU_REF, NULL, NULL },
};
