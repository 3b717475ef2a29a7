/* SPDX-License-Identifier: Apache-2.0 */
/* route_load_ref.c -- the definition of the bars and sums of which losses of loads are made (kernels/route.h). */
#include "kernels/route.h"

#include <math.h>

#include "kernels/cpu/ref.h"
#include "kernels/cpu/tables.h"

/* The largest number of row t that is behind number `last` in the order of values, then of places; -1: before all. */
static int64_t next_largest(const lm_tensor *y, int64_t t, int64_t last)
{
    const int64_t experts = y->dim[1];
    int64_t best = -1;
    for (int64_t e = 0; e < experts; e++) {
        const double v = get(y, t * experts + e);
        const double bound = last < 0 ? INFINITY : get(y, t * experts + last);
        const bool behind = v < bound || (!(v > bound) && e > last);
        if (behind && (best < 0 || v > get(y, t * experts + best)))
            best = e;
    }
    return best;
}

static bool is_finite(const lm_tensor *y, int64_t t)
{
    bool all = true;
    for (int64_t e = 0; e < y->dim[1]; e++)
        all &= isfinite(get(y, t * y->dim[1] + e)) != 0;
    return all;
}

/* True if number e of row t is one of the largest, of which the last stands at `kth`. */
static bool is_chosen(const lm_tensor *y, int64_t t, int64_t e, int64_t kth)
{
    const double v = get(y, t * y->dim[1] + e), bound = get(y, t * y->dim[1] + kth);
    return v > bound || (v >= bound && e <= kth);
}

static void route_bar(const lm_call *c)
{
    const lm_route_bar_attr *a = c->attr;
    const lm_tensor *y = &c->in[0];
    const int64_t experts = y->dim[1];
    int32_t *at = c->out[1].data;
    for (int64_t t = 0; t < y->dim[0]; t++) {
        const bool good = is_finite(y, t);
        int64_t kth = -1;
        for (int64_t s = 0; good && s < a->k; s++)
            kth = next_largest(y, t, kth);
        at[2 * t] = good ? (int32_t)kth : 0;
        at[2 * t + 1] = good ? (int32_t)next_largest(y, t, kth) : 0;
        for (int64_t e = 0; e < experts; e++)
            set(&c->out[0], t * experts + e,
                good ? get(y, t * experts + at[2 * t + is_chosen(y, t, e, kth)]) : NAN);
    }
}

static void route_bar_dy(const lm_call *c)
{
    const lm_tensor *y = &c->in[0], *d = &c->in[2];
    const int64_t experts = y->dim[1];
    const int32_t *at = c->in[1].data;
    for (int64_t t = 0; t < y->dim[0]; t++) {
        const double none = is_finite(y, t) ? 0 : NAN;
        double sum[2] = { none, none };
        for (int64_t e = 0; e < experts; e++)
            sum[is_chosen(y, t, e, at[2 * t])] += get(d, t * experts + e);
        for (int64_t e = 0; e < experts; e++)
            set(&c->out[0], t * experts + e,
                (e == at[2 * t] ? sum[0] : none) + (e == at[2 * t + 1] ? sum[1] : none));
    }
}

static void route_importance(const lm_call *c)
{
    const lm_route_importance_attr *a = c->attr;
    const int32_t *expert = c->in[1].data;
    for (int64_t e = 0; e < a->experts; e++) {
        double sum = 0;
        for (int64_t i = 0; i < lm_tensor_count(&c->in[1]); i++)
            sum += expert[i] == e ? get(&c->in[0], i) : 0;
        set(&c->out[0], e, sum);
    }
}

static void route_importance_dw(const lm_call *c)
{
    const int32_t *expert = c->in[0].data;
    for (int64_t i = 0; i < lm_tensor_count(&c->in[0]); i++)
        set(&c->out[0], i, expert[i] < 0 ? 0 : get(&c->in[1], expert[i]));
}

const lm_kernel lm_route_load_ref_kernels[] = {
    { "route_bar", LM_DTYPE_NONE, LM_CPU_REF, route_bar, NULL },
    { "route_bar_dy", LM_DTYPE_NONE, LM_CPU_REF, route_bar_dy, NULL },
    { "route_importance", LM_DTYPE_NONE, LM_CPU_REF, route_importance, NULL },
    { "route_importance_dw", LM_DTYPE_NONE, LM_CPU_REF, route_importance_dw, NULL },
    { NULL, LM_DTYPE_NONE, LM_CPU_REF, NULL, NULL },
};
