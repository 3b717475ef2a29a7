/* SPDX-License-Identifier: Apache-2.0 */
/* route_load_simd.c -- bars of routers' numbers, and sums of weights by expert: sums over blocks of tokens in F32, over
 * blocks in double, in order. */
#include "kernels/route.h"

#include "kernels/cpu/route_scores.h"
#include "kernels/cpu/tables.h"

enum { TOKENS = 64 }; /* of a block */

/* ---- bars ---- */

static size_t bar_work(const lm_call *c, int threads)
{
    return (size_t)(threads * room_of(c->in[0].dim[1])) * sizeof(float);
}

static void fill(float *x, int64_t n, float v)
{
    for (int64_t i = 0; i < n; i++)
        x[i] = v;
}

static void bar_rows(void *ctx, int64_t begin, int64_t end, int worker)
{
    const lm_call *c = ctx;
    const int64_t k = ((const lm_route_bar_attr *)c->attr)->k, experts = c->in[0].dim[1];
    float *key = (float *)c->work + worker * room_of(experts);
    for (int64_t t = begin; t < end; t++) {
        const float *y = (const float *)c->in[0].data + t * experts;
        float *bar = (float *)c->out[0].data + t * experts;
        int32_t *at = (int32_t *)c->out[1].data + 2 * t;
        bool finite;
        top_of(y, experts, &finite);
        if (!finite) {
            fill(bar, experts, NAN);
            at[0] = at[1] = 0;
            continue;
        }
        memcpy(key, y, (size_t)experts * sizeof *key);
        end_row(key, experts);
        for (int64_t s = 0; s < k; s++)
            at[0] = (int32_t)pick(key, experts);
        at[1] = (int32_t)pick(key, experts);
        const vf kth = vf_set(y[at[0]]), next = vf_set(y[at[1]]);
        VF_FOR(i, n, experts, {
            vf v = vf_get_any(LM_DTYPE_F32, y, i, n);
            vf_put_any(LM_DTYPE_F32, bar, i, vf_if_lt(kth, v, next, kth), n);
        });
        for (int64_t e = 0; e <= at[0]; e++) /* equal ones in front of it, and it itself */
            bar[e] = y[e] < y[at[0]] ? bar[e] : y[at[1]];
    }
}

static void route_bar(const lm_call *c)
{
    lm_par_for(c->par, c->in[0].dim[0], grain_tokens(c->in[0].dim[1]), bar_rows,
               (void *)(uintptr_t)c);
}

static void bar_dy_rows(void *ctx, int64_t begin, int64_t end, int worker)
{
    const lm_call *c = ctx;
    const int64_t experts = c->in[0].dim[1];
    (void)worker;
    for (int64_t t = begin; t < end; t++) {
        const float *y = (const float *)c->in[0].data + t * experts;
        const float *d = (const float *)c->in[2].data + t * experts;
        float *dy = (float *)c->out[0].data + t * experts;
        const int32_t *at = (const int32_t *)c->in[1].data + 2 * t;
        const vf kth = vf_set(y[at[0]]);
        vf above = vf_zero(), below = vf_zero();
        bool finite;
        top_of(y, experts, &finite);
        fill(dy, experts, finite ? 0 : NAN);
        VF_FOR(i, n, experts, {
            vf v = vf_get_any(LM_DTYPE_F32, y, i, n), g = vf_get_any(LM_DTYPE_F32, d, i, n);
            above += vf_if_lt(kth, v, g, vf_zero());
            below += vf_if_lt(v, kth, g, vf_zero());
        });
        float sum[2] = { vf_sum(below), vf_sum(above) };
        for (int64_t e = 0; e < experts; e++)
            if (y[e] >= y[at[0]] && y[e] <= y[at[0]])
                sum[e <= at[0]] += d[e];
        dy[at[0]] += sum[0];
        dy[at[1]] += sum[1];
    }
}

static void route_bar_dy(const lm_call *c)
{
    lm_par_for(c->par, c->in[0].dim[0], grain_tokens(c->in[0].dim[1]), bar_dy_rows,
               (void *)(uintptr_t)c);
}

/* ---- sums of weights ---- */

static int64_t blocks_of(const lm_call *c)
{
    return (c->in[0].dim[0] + TOKENS - 1) / TOKENS;
}

static size_t importance_work(const lm_call *c, int threads)
{
    (void)threads;
    return (size_t)(blocks_of(c) * ((const lm_route_importance_attr *)c->attr)->experts) *
           sizeof(float);
}

static void sum_blocks(void *ctx, int64_t begin, int64_t end, int worker)
{
    const lm_call *c = ctx;
    const int64_t experts = ((const lm_route_importance_attr *)c->attr)->experts;
    const int64_t k = c->in[0].dim[1], count = c->in[0].dim[0] * k;
    const float *weight = c->in[0].data;
    const int32_t *expert = c->in[1].data;
    (void)worker;
    for (int64_t b = begin; b < end; b++) {
        float *sum = (float *)c->work + b * experts;
        memset(sum, 0, (size_t)experts * sizeof *sum);
        for (int64_t i = b * TOKENS * k; i < least((b + 1) * TOKENS * k, count); i++)
            if (expert[i] >= 0)
                sum[expert[i]] += weight[i];
    }
}

static void sum_experts(void *ctx, int64_t begin, int64_t end, int worker)
{
    const lm_call *c = ctx;
    const int64_t experts = ((const lm_route_importance_attr *)c->attr)->experts;
    (void)worker;
    for (int64_t e = begin; e < end; e++) {
        double sum = 0;
        for (int64_t b = 0; b < blocks_of(c); b++)
            sum += (double)((const float *)c->work)[b * experts + e];
        ((float *)c->out[0].data)[e] = (float)sum;
    }
}

static void route_importance(const lm_call *c)
{
    lm_par_for(c->par, blocks_of(c), 1, sum_blocks, (void *)(uintptr_t)c);
    lm_par_for(c->par, ((const lm_route_importance_attr *)c->attr)->experts, 16, sum_experts,
               (void *)(uintptr_t)c);
}

static void give_weights(void *ctx, int64_t begin, int64_t end, int worker)
{
    const lm_call *c = ctx;
    const int32_t *expert = c->in[0].data;
    const float *d = c->in[1].data;
    (void)worker;
    for (int64_t i = begin; i < end; i++)
        ((float *)c->out[0].data)[i] = expert[i] < 0 ? 0 : d[expert[i]];
}

static void route_importance_dw(const lm_call *c)
{
    lm_par_for(c->par, lm_tensor_count(&c->in[0]), 16384, give_weights, (void *)(uintptr_t)c);
}

const lm_kernel LM_TABLE_NAME(route_load, LM_SIMD)[] = {
    VF_KERNEL_F32("route_bar", route_bar, bar_work),
    VF_KERNEL_F32("route_bar_dy", route_bar_dy, NULL),
    VF_KERNEL_F32("route_importance", route_importance, importance_work),
    VF_KERNEL_F32("route_importance_dw", route_importance_dw, NULL),
    VF_KERNEL_END,
};
