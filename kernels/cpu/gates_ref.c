/* SPDX-License-Identifier: Apache-2.0 */
/* gates_ref.c -- the definition of the gates family (kernels/gates.h). */
#include "kernels/gates.h"

#include <math.h>

#include "kernels/cpu/ref.h"
#include "kernels/cpu/tables.h"

/* Copy n numbers of row `row`. */
static void move(const lm_tensor *x, int64_t from, lm_tensor *y, int64_t to, int64_t row, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        set(y, row * width(y) + to + i, get(x, row * width(x) + from + i));
}

static void gate_split(const lm_call *c)
{
    const lm_gate_split_attr *a = c->attr;
    const lm_tensor *x = &c->in[0];
    int64_t D = a->head_dim;
    for (int64_t row = 0; row < rows_of(x); row++) {
        for (int64_t h = 0; h < a->heads; h++) {
            move(x, 2 * h * D, &c->out[0], h * D, row, D);
            move(x, (2 * h + 1) * D, &c->out[1], h * D, row, D);
        }
        move(x, 2 * a->heads * D, &c->out[0], a->heads * D, row, 2 * a->kv_heads * D);
    }
}

static void gate_join(const lm_call *c)
{
    const lm_gate_split_attr *a = c->attr;
    lm_tensor *x = &c->out[0];
    int64_t D = a->head_dim;
    for (int64_t row = 0; row < rows_of(x); row++) {
        for (int64_t h = 0; h < a->heads; h++) {
            move(&c->in[0], h * D, x, 2 * h * D, row, D);
            move(&c->in[1], h * D, x, (2 * h + 1) * D, row, D);
        }
        move(&c->in[0], a->heads * D, x, 2 * a->heads * D, row, 2 * a->kv_heads * D);
    }
}

/* ---- delta_gates ---- */

static double sigmoid(double x)
{
    return 1 / (1 + exp(-x));
}

static double softplus(double x)
{
    return (x > 0 ? x : 0) + log1p(exp(-fabs(x)));
}

/* The numbers b and a of head h of a row. */
static double b_at(const lm_call *c, const lm_tensor *ba, int64_t row, int64_t h)
{
    return get(ba, row * width(ba) + lm_delta_gates_at(c->attr, h));
}

static double a_at(const lm_call *c, const lm_tensor *ba, int64_t row, int64_t h)
{
    const lm_delta_gates_attr *a = c->attr;
    return get(ba, row * width(ba) + lm_delta_gates_at(a, h) + a->heads / a->key_heads);
}

static void delta_gates(const lm_call *c)
{
    const lm_delta_gates_attr *a = c->attr;
    const lm_tensor *ba = &c->in[0];
    for (int64_t i = 0; i < rows_of(ba) * a->heads; i++) {
        int64_t row = i / a->heads, h = i % a->heads;
        set(&c->out[0], i,
            -exp(get(&c->in[1], h)) * softplus(a_at(c, ba, row, h) + get(&c->in[2], h)));
        set(&c->out[1], i, sigmoid(b_at(c, ba, row, h)));
    }
}

static void delta_gates_dx(const lm_call *c)
{
    const lm_delta_gates_attr *a = c->attr;
    const lm_tensor *dg = opt_in(c, 0), *dbeta = opt_in(c, 1), *ba = &c->in[2];
    for (int64_t i = 0; i < rows_of(ba) * a->heads; i++) {
        int64_t row = i / a->heads, h = i % a->heads, at = lm_delta_gates_at(a, h);
        double p = sigmoid(b_at(c, ba, row, h));
        double s = -exp(get(&c->in[3], h)) * sigmoid(a_at(c, ba, row, h) + get(&c->in[4], h));
        set(&c->out[0], row * 2 * a->heads + at, dbeta ? get(dbeta, i) * p * (1 - p) : 0);
        set(&c->out[0], row * 2 * a->heads + at + a->heads / a->key_heads, dg ? get(dg, i) * s : 0);
    }
}

static void delta_gates_dw(const lm_call *c)
{
    const lm_delta_gates_attr *a = c->attr;
    const lm_tensor *dg = &c->in[0], *ba = &c->in[1];
    lm_tensor *da_log = opt_out(c, 0), *ddt = opt_out(c, 1);
    for (int64_t h = 0; h < a->heads; h++) {
        double by_log = 0, by_dt = 0, rate = -exp(get(&c->in[2], h));
        for (int64_t row = 0; row < rows_of(ba); row++) {
            double x = a_at(c, ba, row, h) + get(&c->in[3], h), d = get(dg, row * a->heads + h);
            by_log += d * rate * softplus(x);
            by_dt += d * rate * sigmoid(x);
        }
        if (da_log)
            accumulate(c, a->acc, da_log, h, by_log);
        if (ddt)
            accumulate(c, a->acc, ddt, h, by_dt);
    }
}

const lm_kernel lm_gates_ref_kernels[] = {
    { "gate_split", LM_DTYPE_NONE, LM_CPU_REF, gate_split, NULL },
    { "gate_join", LM_DTYPE_NONE, LM_CPU_REF, gate_join, NULL },
    { "delta_gates", LM_DTYPE_NONE, LM_CPU_REF, delta_gates, NULL },
    { "delta_gates_dx", LM_DTYPE_NONE, LM_CPU_REF, delta_gates_dx, NULL },
    { "delta_gates_dw", LM_DTYPE_NONE, LM_CPU_REF, delta_gates_dw, NULL },
    { NULL, LM_DTYPE_NONE, LM_CPU_REF, NULL, NULL },
};
