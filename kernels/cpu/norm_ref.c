/* SPDX-License-Identifier: Apache-2.0 */
/* norm_ref.c -- the definition of the norm family (kernels/norm.h). */
#include "kernels/norm.h"

#include <math.h>

#include "kernels/cpu/ref.h"
#include "kernels/cpu/tables.h"

/* Weight i in the form used. */
static double weight(const lm_tensor *w, int64_t i, bool plus_one)
{
    return get(w, i) + (plus_one ? 1 : 0);
}

static void norm(const lm_call *c)
{
    const lm_norm_attr *a = c->attr;
    const lm_tensor *x = &c->in[0], *w = &c->in[1], *b = opt_in(c, 2), *r = opt_in(c, 3);
    lm_tensor *y = &c->out[0], *stat = &c->out[1], *s = opt_out(c, 2);
    int64_t n_rows = rows_of(x), n_cols = width(x);
    for (int64_t n = 0; n < n_rows; n++) {
        int64_t at = n * n_cols;
        const lm_tensor *src = x;
        if (r) {
            for (int64_t i = 0; i < n_cols; i++)
                set(s, at + i, get(x, at + i) + get(r, at + i));
            src = s;
        }
        double mean = 0, var = 0;
        for (int64_t i = 0; a->kind == LM_NORM_LAYER && i < n_cols; i++)
            mean += get(src, at + i) / (double)n_cols;
        for (int64_t i = 0; i < n_cols; i++) {
            double d = get(src, at + i) - mean;
            var += d * d / (double)n_cols;
        }
        double rstd = 1 / sqrt(var + a->eps);
        set(stat, 2 * n, mean);
        set(stat, 2 * n + 1, rstd);
        for (int64_t i = 0; i < n_cols; i++) {
            double xh = (get(src, at + i) - mean) * rstd;
            if (a->kind == LM_NORM_RMS && !a->plus_one)
                xh = rounded(x->dtype, xh);
            set(y, at + i, weight(w, i, a->plus_one) * xh + (b ? get(b, i) : 0));
        }
    }
}

/* With g = dy w: ds = rstd (g - mean(g) - xh mean(g xh)); RMSNorm has no mean(g) term. */
static void norm_dx(const lm_call *c)
{
    const lm_norm_attr *a = c->attr;
    const lm_tensor *dy = &c->in[0], *s = &c->in[1], *w = &c->in[2], *stat = &c->in[3];
    const lm_tensor *dres = opt_in(c, 4);
    lm_tensor *ds = &c->out[0];
    int64_t n_rows = rows_of(s), n_cols = width(s);
    for (int64_t n = 0; n < n_rows; n++) {
        int64_t at = n * n_cols;
        double mean = get(stat, 2 * n), rstd = get(stat, 2 * n + 1), g1 = 0, g2 = 0;
        for (int64_t i = 0; i < n_cols; i++) {
            double g = get(dy, at + i) * weight(w, i, a->plus_one),
                   xh = (get(s, at + i) - mean) * rstd;
            g1 += a->kind == LM_NORM_LAYER ? g / (double)n_cols : 0;
            g2 += g * xh / (double)n_cols;
        }
        for (int64_t i = 0; i < n_cols; i++) {
            double g = get(dy, at + i) * weight(w, i, a->plus_one),
                   xh = (get(s, at + i) - mean) * rstd;
            set(ds, at + i, rstd * (g - g1 - xh * g2) + (dres ? get(dres, at + i) : 0));
        }
    }
}

static void norm_dw(const lm_call *c)
{
    const lm_norm_attr *a = c->attr;
    const lm_tensor *dy = &c->in[0], *s = &c->in[1], *stat = &c->in[2];
    lm_tensor *dw = &c->out[0], *db = opt_out(c, 1);
    int64_t n_rows = rows_of(s), n_cols = width(s);
    for (int64_t i = 0; i < n_cols; i++) {
        double sw = 0, sb = 0;
        for (int64_t n = 0; n < n_rows; n++) {
            double g = get(dy, n * n_cols + i);
            double xh = (get(s, n * n_cols + i) - get(stat, 2 * n)) * get(stat, 2 * n + 1);
            sw += g * (a->kind == LM_NORM_RMS && !a->plus_one ? rounded(s->dtype, xh) : xh);
            sb += g;
        }
        accumulate(c, a->acc, dw, i, sw);
        if (db)
            accumulate(c, a->acc, db, i, sb);
    }
}

static void head_norm(const lm_call *c)
{
    const lm_head_norm_attr *a = c->attr;
    const lm_tensor *x = &c->in[0];
    lm_tensor *y = &c->out[0], *stat = &c->out[1];
    int64_t normed = a->heads + a->kv_heads, all = normed + a->kv_heads, n_cols = a->head_dim;
    for (int64_t i = 0; i < rows_of(x) * all; i++) {
        int64_t head = i % all, at = i * n_cols;
        const lm_tensor *w = &c->in[head < a->heads ? 1 : 2];
        double sq = 0;
        for (int64_t d = 0; d < n_cols; d++)
            sq += get(x, at + d) * get(x, at + d) / (double)n_cols;
        double rstd = 1 / sqrt(sq + a->eps);
        if (head < normed)
            set(stat, i / all * normed + head, rstd);
        for (int64_t d = 0; d < n_cols; d++) {
            double v = get(x, at + d), h = a->plus_one ? v * rstd : rounded(x->dtype, v * rstd);
            set(y, at + d, head < normed ? weight(w, d, a->plus_one) * h : v);
        }
    }
}

static void head_norm_dx(const lm_call *c)
{
    const lm_head_norm_attr *a = c->attr;
    const lm_tensor *dy = &c->in[0], *x = &c->in[1], *stat = &c->in[4];
    lm_tensor *dx = &c->out[0];
    int64_t normed = a->heads + a->kv_heads, all = normed + a->kv_heads, n_cols = a->head_dim;
    for (int64_t i = 0; i < rows_of(x) * all; i++) {
        int64_t head = i % all, at = i * n_cols;
        const lm_tensor *w = &c->in[head < a->heads ? 2 : 3];
        if (head >= normed) {
            for (int64_t d = 0; d < n_cols; d++)
                set(dx, at + d, get(dy, at + d));
            continue;
        }
        double rstd = get(stat, i / all * normed + head), g2 = 0;
        for (int64_t d = 0; d < n_cols; d++)
            g2 += get(dy, at + d) * weight(w, d, a->plus_one) * get(x, at + d) * rstd /
                  (double)n_cols;
        for (int64_t d = 0; d < n_cols; d++)
            set(dx, at + d,
                rstd * (get(dy, at + d) * weight(w, d, a->plus_one) - get(x, at + d) * rstd * g2));
    }
}

static void head_norm_dw(const lm_call *c)
{
    const lm_head_norm_attr *a = c->attr;
    const lm_tensor *dy = &c->in[0], *x = &c->in[1], *stat = &c->in[2];
    int64_t normed = a->heads + a->kv_heads, all = normed + a->kv_heads, n_cols = a->head_dim;
    for (int which = 0; which < 2; which++) {
        int64_t first = which ? a->heads : 0, past = which ? normed : a->heads;
        for (int64_t d = 0; d < n_cols; d++) {
            double sum = 0;
            for (int64_t n = 0; n < rows_of(x); n++) {
                for (int64_t h = first; h < past; h++) {
                    int64_t at = (n * all + h) * n_cols + d;
                    double xh = get(x, at) * get(stat, n * normed + h);
                    sum += get(dy, at) * (a->plus_one ? xh : rounded(x->dtype, xh));
                }
            }
            accumulate(c, a->acc, &c->out[which], d, sum);
        }
    }
}

/* Queries (0) or keys (1) of a row: where they begin, and how many numbers they are. */
static int64_t part_of(const lm_qk_norm_attr *a, int which, int64_t *at)
{
    *at = which ? a->heads * a->head_dim : 0;
    return (which ? a->kv_heads : a->heads) * a->head_dim;
}

static void qk_norm(const lm_call *c)
{
    const lm_qk_norm_attr *a = c->attr;
    const lm_tensor *x = &c->in[0];
    lm_tensor *y = &c->out[0], *stat = &c->out[1];
    int64_t all = width(x), at;
    for (int64_t n = 0; n < rows_of(x); n++) {
        for (int64_t i = n * all; i < (n + 1) * all; i++)
            set(y, i, get(x, i));
        for (int which = 0; which < 2; which++) {
            int64_t n_cols = part_of(a, which, &at);
            double sq = 0;
            for (int64_t d = 0; d < n_cols; d++)
                sq += get(x, n * all + at + d) * get(x, n * all + at + d) / (double)n_cols;
            double rstd = 1 / sqrt(sq + a->eps);
            set(stat, 2 * n + which, rstd);
            for (int64_t d = 0; d < n_cols; d++)
                set(y, n * all + at + d,
                    get(&c->in[1 + which], d) * get(x, n * all + at + d) * rstd);
        }
    }
}

static void qk_norm_dx(const lm_call *c)
{
    const lm_qk_norm_attr *a = c->attr;
    const lm_tensor *dy = &c->in[0], *x = &c->in[1], *stat = &c->in[4];
    int64_t all = width(x), at;
    for (int64_t n = 0; n < rows_of(x); n++) {
        for (int which = 0; which < 2; which++) {
            const lm_tensor *w = &c->in[2 + which];
            int64_t n_cols = part_of(a, which, &at), o = n * all + at;
            double rstd = get(stat, 2 * n + which), g2 = 0;
            for (int64_t d = 0; d < n_cols; d++)
                g2 += get(dy, o + d) * get(w, d) * get(x, o + d) * rstd / (double)n_cols;
            for (int64_t d = 0; d < n_cols; d++)
                set(&c->out[0], o + d,
                    rstd * (get(dy, o + d) * get(w, d) - get(x, o + d) * rstd * g2));
        }
        for (int64_t d = (a->heads + a->kv_heads) * a->head_dim; d < all; d++)
            set(&c->out[0], n * all + d, get(dy, n * all + d));
    }
}

static void qk_norm_dw(const lm_call *c)
{
    const lm_qk_norm_attr *a = c->attr;
    const lm_tensor *dy = &c->in[0], *x = &c->in[1], *stat = &c->in[2];
    int64_t all = width(x), at;
    for (int which = 0; which < 2; which++) {
        int64_t n_cols = part_of(a, which, &at);
        for (int64_t d = 0; d < n_cols; d++) {
            double sum = 0;
            for (int64_t n = 0; n < rows_of(x); n++)
                sum +=
                    get(dy, n * all + at + d) * get(x, n * all + at + d) * get(stat, 2 * n + which);
            accumulate(c, a->acc, &c->out[which], d, sum);
        }
    }
}

const lm_kernel lm_norm_ref_kernels[] = {
    { "norm", LM_DTYPE_NONE, LM_CPU_REF, norm, NULL },
    { "norm_dx", LM_DTYPE_NONE, LM_CPU_REF, norm_dx, NULL },
    { "norm_dw", LM_DTYPE_NONE, LM_CPU_REF, norm_dw, NULL },
    { "head_norm", LM_DTYPE_NONE, LM_CPU_REF, head_norm, NULL },
    { "head_norm_dx", LM_DTYPE_NONE, LM_CPU_REF, head_norm_dx, NULL },
    { "head_norm_dw", LM_DTYPE_NONE, LM_CPU_REF, head_norm_dw, NULL },
    { "qk_norm", LM_DTYPE_NONE, LM_CPU_REF, qk_norm, NULL },
    { "qk_norm_dx", LM_DTYPE_NONE, LM_CPU_REF, qk_norm_dx, NULL },
    { "qk_norm_dw", LM_DTYPE_NONE, LM_CPU_REF, qk_norm_dw, NULL },
    { NULL, LM_DTYPE_NONE, LM_CPU_REF, NULL, NULL },
};
