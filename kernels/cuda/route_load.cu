/* SPDX-License-Identifier: Apache-2.0 */
/* route_load.cu -- bars of routers' numbers, a warp a token; and sums of weights by expert, over blocks of tokens, then over
 * blocks in double, in order. */
#include "kernels/cuda/route_scores.cuh"

extern "C" {
#include "kernels/route.h"
}

enum { TOKENS = 64 }; /* of a block */

/* ---- bars ---- */

struct bar_args {
    int64_t tokens, experts, k;
    const float *y, *dbar;
    const int32_t *at;
    float *out;
    int32_t *at_out;
};

__device__ inline bool is_chosen(const float *y, int64_t e, int32_t kth)
{
    return y[e] > y[kth] || (y[e] >= y[kth] && e <= kth);
}

static __global__ void bar_kernel(bar_args x)
{
    LM_DYNAMIC_SHARED(float, keys);
    float *key = keys + threadIdx.x / 32 * x.experts;
    for (int64_t t = first_row(); t < x.tokens; t += next_row()) {
        const float *y = x.y + t * x.experts;
        bool finite;
        row_top(y, x.experts, &finite);
        for (int64_t e = lane_of(); e < x.experts; e += 32)
            key[e] = finite ? y[e] : 0;
        __syncwarp();
        int32_t kth = 0, next;
        for (int64_t s = 0; s < x.k; s++)
            kth = pick(key, x.experts);
        next = pick(key, x.experts);
        for (int64_t e = lane_of(); e < x.experts; e += 32)
            x.out[t * x.experts + e] = finite ? y[is_chosen(y, e, kth) ? next : kth] : NAN;
        if (lane_of() == 0) {
            x.at_out[2 * t] = finite ? kth : 0;
            x.at_out[2 * t + 1] = finite ? next : 0;
        }
        __syncwarp();
    }
}

static void route_bar(const lm_call *c)
{
    bar_args x = {};
    x.tokens = c->in[0].dim[0], x.experts = c->in[0].dim[1];
    x.k = ((const lm_route_bar_attr *)c->attr)->k;
    x.y = in_ptr<float>(c, 0);
    x.out = out_ptr<float>(c, 0);
    x.at_out = out_ptr<int32_t>(c, 1);
    int warps = x.experts <= 1024 ? 8 : 1;
    LM_LAUNCH(bar_kernel, grid_for(x.tokens, warps, c->stream), warps * 32,
              (size_t)(warps * x.experts) * sizeof(float), c->stream, x);
}

static __global__ void bar_dy_kernel(bar_args x)
{
    for (int64_t t = first_row(); t < x.tokens; t += next_row()) {
        const float *y = x.y + t * x.experts, *d = x.dbar + t * x.experts;
        float *dy = x.out + t * x.experts, in = 0, out = 0;
        int32_t kth = x.at[2 * t], next = x.at[2 * t + 1];
        bool finite;
        row_top(y, x.experts, &finite);
        for (int64_t e = lane_of(); e < x.experts; e += 32) {
            bool chosen = is_chosen(y, e, kth);
            in += chosen ? d[e] : 0;
            out += chosen ? 0 : d[e];
        }
        in = warp_sum(in);
        out = warp_sum(out);
        float none = finite ? 0 : NAN;
        for (int64_t e = lane_of(); e < x.experts; e += 32)
            dy[e] = none + (e == kth ? out : 0) + (e == next ? in : 0);
    }
}

static void route_bar_dy(const lm_call *c)
{
    bar_args x = {};
    x.tokens = c->in[0].dim[0], x.experts = c->in[0].dim[1];
    x.y = in_ptr<float>(c, 0);
    x.at = in_ptr<int32_t>(c, 1);
    x.dbar = in_ptr<float>(c, 2);
    x.out = out_ptr<float>(c, 0);
    LM_LAUNCH(bar_dy_kernel, grid_for(x.tokens, row_warps, c->stream), row_threads, 0, c->stream,
              x);
}

/* ---- sums of weights ---- */

struct importance_args {
    int64_t tokens, k, experts, blocks;
    const float *weight, *dsum;
    const int32_t *expert;
    float *part; /* [blocks,E] */
    float *out;
};

static __global__ void sum_blocks_kernel(importance_args x)
{
    int64_t block = blockIdx.x, first = block * TOKENS * x.k, end = first + TOKENS * x.k;
    end = end < x.tokens * x.k ? end : x.tokens * x.k;
    for (int64_t e = threadIdx.x; e < x.experts; e += blockDim.x) {
        float sum = 0;
        for (int64_t i = first; i < end; i++)
            sum += x.expert[i] == e ? x.weight[i] : 0;
        x.part[block * x.experts + e] = sum;
    }
}

static __global__ void sum_experts_kernel(importance_args x)
{
    for (int64_t e = global_thread(); e < x.experts; e += global_threads()) {
        double sum = 0;
        for (int64_t b = 0; b < x.blocks; b++)
            sum += (double)x.part[b * x.experts + e];
        x.out[e] = (float)sum;
    }
}

static importance_args importance_of(const lm_call *c, size_t *bytes)
{
    importance_args x = {};
    x.tokens = c->in[0].dim[0], x.k = c->in[0].dim[1];
    x.experts = ((const lm_route_importance_attr *)c->attr)->experts;
    x.blocks = (x.tokens + TOKENS - 1) / TOKENS;
    *bytes = 0;
    x.part = part_of<float>(c->work, bytes, x.blocks * x.experts);
    x.out = out_ptr<float>(c, 0);
    return x;
}

static size_t importance_work(const lm_call *c, int)
{
    size_t bytes;
    importance_of(c, &bytes);
    return bytes;
}

static void route_importance(const lm_call *c)
{
    size_t bytes;
    importance_args x = importance_of(c, &bytes);
    x.weight = in_ptr<float>(c, 0);
    x.expert = in_ptr<int32_t>(c, 1);
    LM_LAUNCH(sum_blocks_kernel, (unsigned)x.blocks, 256, 0, c->stream, x);
    LM_LAUNCH(sum_experts_kernel, grid_for(x.experts, 256, c->stream), 256, 0, c->stream, x);
}

static __global__ void give_weights_kernel(importance_args x)
{
    for (int64_t i = global_thread(); i < x.tokens * x.k; i += global_threads())
        x.out[i] = x.expert[i] < 0 ? 0 : x.dsum[x.expert[i]];
}

static void route_importance_dw(const lm_call *c)
{
    importance_args x = {};
    x.tokens = c->in[0].dim[0], x.k = c->in[0].dim[1];
    x.expert = in_ptr<int32_t>(c, 0);
    x.dsum = in_ptr<float>(c, 1);
    x.out = out_ptr<float>(c, 0);
    LM_LAUNCH(give_weights_kernel, grid_for(x.tokens * x.k, 256, c->stream), 256, 0, c->stream, x);
}

extern "C" const lm_kernel lm_route_load_cuda_kernels[] = {
    { "route_bar", LM_DTYPE_F32, LM_CUDA_PLAIN, route_bar, nullptr },
    { "route_bar_dy", LM_DTYPE_F32, LM_CUDA_PLAIN, route_bar_dy, nullptr },
    { "route_importance", LM_DTYPE_F32, LM_CUDA_PLAIN, route_importance, importance_work },
    { "route_importance_dw", LM_DTYPE_F32, LM_CUDA_PLAIN, route_importance_dw, nullptr },
    LM_CUDA_END,
};
