/* SPDX-License-Identifier: Apache-2.0 */
/* divergence_ref.c -- the definition of the divergence family (kernels/divergence.h). */
#include "kernels/divergence.h"

#include <math.h>

#include "kernels/cpu/ref.h"
#include "kernels/cpu/tables.h"
#include "numeric/code_rows.h"

/* Logs of softmax(cap(x w^T) / T) of row n; cap: the capped logits (may be NULL). */
static void log_softmax(const lm_call *c, int first, int64_t n, double cap, double *z,
                        double *capped)
{
    const lm_divergence_attr *a = c->attr;
    const lm_tensor *x = &c->in[first], *w = &c->in[first + 1];
    int64_t cols = width(x);
    double top = -INFINITY, sum = 0, *row = (double *)c->work + 3 * a->vocab;
    for (int64_t v = 0; v < a->vocab; v++) {
        lm_tensor numbers = { .data = row, .dtype = w->dtype };
        double dot = 0;
        if (w->codes)
            lm_code_rows_numbers(w->codes, v, 1, cols, w->dtype, NULL, row, row + cols);
        for (int64_t i = 0; i < cols; i++)
            dot += get(x, n * cols + i) * (w->codes ? get(&numbers, i) : get(w, v * cols + i));
        dot = cap > 0 ? cap * tanh(dot / cap) : dot;
        if (capped)
            capped[v] = dot;
        z[v] = dot / a->temperature;
        top = isnan(z[v]) || z[v] > top ? z[v] : top;
    }
    for (int64_t v = 0; v < a->vocab; v++)
        sum += exp(z[v] - top);
    for (int64_t v = 0; v < a->vocab; v++)
        z[v] -= top + log(sum);
}

static double times_log(double p, double log_ratio)
{
    return p > 0 || isnan(p) ? p * log_ratio : 0;
}

/* The loss of a row of log s and log t, and g of the gradient in place of log t (of beta 0: -t / s). */
static double divergence_of(double beta, int64_t vocab, const double *s, double *t)
{
    double loss = 0;
    for (int64_t v = 0; v < vocab; v++) {
        double p = exp(s[v]), q = exp(t[v]), m = log((1 - beta) * p + beta * q);
        m = beta <= 0 ? s[v] : beta >= 1 ? t[v] : m;
        if (beta <= 0) {
            loss += times_log(q, t[v] - s[v]);
            continue;
        }
        loss += (beta < 1 ? beta * times_log(q, t[v] - m) + (1 - beta) * times_log(p, s[v] - m)
                          : times_log(p, s[v] - m));
        t[v] = (beta < 1 ? 1 - beta : 1) * (p > 0 || isnan(p) ? s[v] - m : 0);
    }
    return loss;
}

/* d loss / d logit, in place of log s. */
static void slopes_of(const lm_divergence_attr *a, double scale, double *s, const double *g,
                      const double *capped)
{
    double mean = 0;
    for (int64_t v = 0; v < a->vocab && a->beta > 0; v++)
        mean += exp(s[v]) * g[v];
    for (int64_t v = 0; v < a->vocab; v++) {
        double p = exp(s[v]), d = a->beta > 0 ? p * (g[v] - mean) : p - exp(g[v]);
        double u = a->soft_cap > 0 ? capped[v] / a->soft_cap : 0;
        s[v] = scale * d / a->temperature * (1 - u * u);
    }
}

static void divergence(const lm_call *c)
{
    const lm_divergence_attr *a = c->attr;
    double *s = c->work, *t = s + a->vocab;
    for (int64_t n = 0; n < c->in[0].dim[0]; n++) {
        bool counts = get(&c->in[4], n) >= 0;
        if (counts) {
            log_softmax(c, 0, n, a->soft_cap, s, NULL);
            log_softmax(c, 2, n, a->teacher_cap, t, NULL);
        }
        set(&c->out[0], n, counts ? divergence_of(a->beta, a->vocab, s, t) : 0);
    }
}

static void divergence_grad(const lm_call *c)
{
    const lm_divergence_attr *a = c->attr;
    const lm_tensor *x = &c->in[0], *w = &c->in[1];
    lm_tensor *dx = opt_out(c, 0), *dw = opt_out(c, 1);
    int64_t cols = width(x);
    double *s = c->work, *t = s + a->vocab, *capped = t + a->vocab;
    for (int64_t i = 0; dw && overwrites(c, a->acc) && i < lm_tensor_count(dw); i++)
        set(dw, i, 0);
    for (int64_t n = 0; n < x->dim[0]; n++) {
        bool counts = get(&c->in[4], n) >= 0;
        if (counts) {
            log_softmax(c, 0, n, a->soft_cap, s, capped);
            log_softmax(c, 2, n, a->teacher_cap, t, NULL);
            divergence_of(a->beta, a->vocab, s, t);
            slopes_of(a, get(&c->in[5], n), s, t, capped);
        }
        for (int64_t v = 0; v < a->vocab; v++)
            s[v] = counts ? rounded(x->dtype, s[v]) : 0;
        for (int64_t i = 0; i < cols; i++) {
            double sum = 0;
            for (int64_t v = 0; dx && v < a->vocab; v++)
                sum += s[v] * get(w, v * cols + i);
            if (dx)
                set(dx, n * cols + i, sum);
            for (int64_t v = 0; dw && v < a->vocab; v++)
                set(dw, v * cols + i, get(dw, v * cols + i) + s[v] * get(x, n * cols + i));
        }
    }
}

static size_t divergence_work(const lm_call *c, int threads)
{
    const lm_divergence_attr *a = c->attr;
    int64_t cols = width(&c->in[1]), other = width(&c->in[3]);
    (void)threads;
    return (size_t)(3 * a->vocab + 2 * (cols > other ? cols : other)) * sizeof(double);
}

const lm_kernel lm_divergence_ref_kernels[] = {
    { "divergence", LM_DTYPE_NONE, LM_CPU_REF, divergence, divergence_work },
    { "divergence_grad", LM_DTYPE_NONE, LM_CPU_REF, divergence_grad, divergence_work },
    { NULL, LM_DTYPE_NONE, LM_CPU_REF, NULL, NULL },
};
