/* SPDX-License-Identifier: Apache-2.0 */
/* conv_ref.c -- the definition of the conv family (kernels/conv.h). */
#include "kernels/conv.h"

#include <math.h>

#include "kernels/cpu/ref.h"
#include "kernels/cpu/state_rows.h"
#include "kernels/cpu/tables.h"

/* The operands that all three have. */
typedef struct {
    const lm_conv_attr *a;
    const lm_tensor *x, *w, *lo;
} view;

static int64_t start_of(const view *v, int64_t row)
{
    return v->lo ? (int64_t)get(v->lo, row) : 0;
}

/* True if tap j of row `row` reads a row of its document, which is row - W + 1 + j. */
static bool reads(const view *v, int64_t row, int64_t j)
{
    return row % v->a->seq - v->a->taps + 1 + j >= start_of(v, row);
}

/* The sum of channel c in row `row`, before SiLU. */
static double sum_at(const view *v, int64_t row, int64_t c, int64_t column)
{
    int64_t W = v->a->taps;
    double sum = 0;
    for (int64_t j = 0; j < W; j++)
        if (reads(v, row, j))
            sum += get(v->w, c * W + j) * get(v->x, (row - W + 1 + j) * v->a->columns + column);
    return sum;
}

/* The gradient of that sum. */
static double slope_at(const view *v, const lm_tensor *dy, int64_t row, int64_t c, int64_t column)
{
    double s = sum_at(v, row, c, column), p = 1 / (1 + exp(-s));
    return get(dy, row * v->a->channels + c) * p * (1 + s * (1 - p));
}

static void conv(const lm_call *c)
{
    const lm_conv_attr *a = c->attr;
    view v = { a, &c->in[0], &c->in[1], opt_in(c, 2) };
    lm_tensor *z = opt_out(c, 1);
    for (int64_t i = 0; i < lm_conv_runs(a); i++) {
        lm_conv_run r = lm_conv_run_at(a, i);
        for (int64_t row = 0; row < a->batch * a->seq; row++)
            for (int64_t k = 0; k < r.n; k++) {
                if (r.channel < 0) {
                    if (z)
                        set(z, row * a->heads * a->value_dim + r.z + k,
                            get(v.x, row * a->columns + r.column + k));
                    continue;
                }
                double s = sum_at(&v, row, r.channel + k, r.column + k);
                set(&c->out[0], row * a->channels + r.channel + k, s / (1 + exp(-s)));
            }
    }
}

static void conv_dx(const lm_call *c)
{
    const lm_conv_attr *a = c->attr;
    view v = { a, &c->in[1], &c->in[2], opt_in(c, 3) };
    const lm_tensor *dz = opt_in(c, 4);
    for (int64_t i = 0; i < lm_conv_runs(a); i++) {
        lm_conv_run r = lm_conv_run_at(a, i);
        for (int64_t row = 0; row < a->batch * a->seq; row++)
            for (int64_t k = 0; k < r.n; k++) {
                double d = 0;
                if (r.channel < 0 && dz)
                    d = get(dz, row * a->heads * a->value_dim + r.z + k);
                for (int64_t j = 0; r.channel >= 0 && j < a->taps; j++) {
                    int64_t to = row + a->taps - 1 - j; /* tap j of that row reads this one */
                    if (to / a->seq == row / a->seq && reads(&v, to, j))
                        d += get(v.w, (r.channel + k) * a->taps + j) *
                             slope_at(&v, &c->in[0], to, r.channel + k, r.column + k);
                }
                set(&c->out[0], row * a->columns + r.column + k, d);
            }
    }
}

static void conv_dw(const lm_call *c)
{
    const lm_conv_attr *a = c->attr;
    view v = { a, &c->in[1], &c->in[2], opt_in(c, 3) };
    for (int64_t i = 0; i < lm_conv_runs(a); i++) {
        lm_conv_run r = lm_conv_run_at(a, i);
        for (int64_t k = 0; r.channel >= 0 && k < r.n; k++)
            for (int64_t j = 0; j < a->taps; j++) {
                double sum = 0;
                for (int64_t row = 0; row < a->batch * a->seq; row++)
                    if (reads(&v, row, j))
                        sum += slope_at(&v, &c->in[0], row, r.channel + k, r.column + k) *
                               get(v.x, (row - a->taps + 1 + j) * a->columns + r.column + k);
                accumulate(c, a->acc, &c->out[0], (r.channel + k) * a->taps + j, sum);
            }
    }
}

/* The number of channel c, column `column`, in row p of sequence s; rows before its first one are in its tail, or zeros. */
static double number_at(const lm_call *c, const state_rows *s, int64_t p, int64_t channel,
                        int64_t column)
{
    const lm_conv_attr *a = c->attr;
    if (p >= 0)
        return get(&c->in[0], (s->row + p) * a->columns + column);
    if (s->used + p < 0)
        return 0;
    return get(&c->out[1], ((s->slot + 1) * (a->taps - 1) + p) * a->channels + channel);
}

static void channel_cached(const lm_call *c, const state_rows *s, int64_t channel, int64_t column)
{
    const lm_conv_attr *a = c->attr;
    for (int64_t t = 0; t < s->n; t++) {
        double sum = 0;
        for (int64_t j = 0; t < s->fresh && j < a->taps; j++)
            sum += get(&c->in[1], channel * a->taps + j) *
                   number_at(c, s, t - a->taps + 1 + j, channel, column);
        set(&c->out[0], (s->row + t) * a->channels + channel, sum / (1 + exp(-sum)));
    }
    for (int64_t i = 0; s->fresh && i < a->taps - 1; i++)
        set(&c->out[1], (s->slot * (a->taps - 1) + i) * a->channels + channel,
            number_at(c, s, s->fresh - a->taps + 1 + i, channel, column));
}

static void conv_cached(const lm_call *c)
{
    const lm_conv_attr *a = c->attr;
    lm_tensor *z = opt_out(c, 2);
    for (int64_t i = 0; i < lm_conv_runs(a); i++) {
        lm_conv_run r = lm_conv_run_at(a, i);
        for (int64_t b = 0; r.channel >= 0 && b <= a->batch; b++) {
            state_rows s = state_rows_of(c, 2, a->seq, b);
            for (int64_t k = 0; k < r.n; k++)
                channel_cached(c, &s, r.channel + k, r.column + k);
        }
        for (int64_t row = 0; r.channel < 0 && z && row < c->in[0].dim[0]; row++)
            for (int64_t k = 0; k < r.n; k++)
                set(z, row * a->heads * a->value_dim + r.z + k,
                    get(&c->in[0], row * a->columns + r.column + k));
    }
}

const lm_kernel lm_conv_ref_kernels[] = {
    { "conv", LM_DTYPE_NONE, LM_CPU_REF, conv, NULL },
    { "conv_dx", LM_DTYPE_NONE, LM_CPU_REF, conv_dx, NULL },
    { "conv_dw", LM_DTYPE_NONE, LM_CPU_REF, conv_dw, NULL },
    { "conv_cached", LM_DTYPE_NONE, LM_CPU_REF, conv_cached, NULL },
    { NULL, LM_DTYPE_NONE, LM_CPU_REF, NULL, NULL },
};
