/* SPDX-License-Identifier: Apache-2.0 */
/* route_aux.cu -- losses of routing and their gradient: sums over blocks of tokens, then over
 * blocks in double, in order; loads are whole numbers, which have no order. */
#include "kernels/cuda/route_scores.cuh"

extern "C" {
#include "kernels/route.h"
}

enum { TOKENS = 64 }; /* of a block; sequences begin with a block */

struct aux_args {
    lm_route_aux_attr a;
    int64_t tokens, experts, k, seq, sequences, each; /* each: blocks of a sequence */
    const float *z, *dloss, *given;                   /* given: the operand `count`; NULL: absent */
    const int32_t *expert;
    int *load;        /* [sequences,E], and behind them the number of dropped assignments */
    float *sum;       /* [blocks,E] of p; of the gradient dp [sequences,E] */
    double *square;   /* [blocks] of the squared logarithms */
    double *together; /* [blocks] of the squared shares of nodes */
    float *loss, *mean, *load_out, *dropped, *dz;
};

/* What divides the p of a token, and the logarithm of the sum of exp z. */
struct token_sums {
    float top, inv, lse, together; /* and the sum of the squared shares of nodes */
};

__device__ inline token_sums sums_of(const aux_args &x, const float *z)
{
    bool finite;
    token_sums s;
    s.top = row_top(z, x.experts, &finite);
    float sum = exp_sum(z, x.experts, s.top), part = 0;
    s.lse = finite ? s.top + logf(sum) : NAN;
    for (int64_t e = lane_of(); x.a.sigmoid && e < x.experts; e += 32)
        part += sigmoid_of(z[e]);
    s.inv = 1 / (x.a.sigmoid ? warp_sum(part) : sum);
    return s;
}

__device__ inline float share_of(const aux_args &x, float z, token_sums s)
{
    if (isnan(s.lse))
        return z - z == 0 ? 0 : NAN;
    return s.inv * (x.a.sigmoid ? sigmoid_of(z) : expf(z - s.top));
}

/* The share of node n in the p of a token, in all lanes of a warp. */
__device__ inline float node_share(const aux_args &x, const float *z, token_sums s, int64_t n)
{
    int64_t each = x.experts / x.a.nodes;
    float sum = 0;
    for (int64_t e = n * each + lane_of(); e < (n + 1) * each; e += 32)
        sum += share_of(x, z[e], s);
    return warp_sum(sum);
}

__device__ inline float squared_shares(const aux_args &x, const float *z, token_sums s)
{
    float sum = 0;
    for (int64_t n = 0; x.a.affinity > 0 && n < x.a.nodes; n++) {
        float q = node_share(x, z, s, n);
        sum = fmaf(q, q, sum);
    }
    return sum;
}

static __global__ void count_kernel(aux_args x)
{
    for (int64_t i = global_thread(); i < x.tokens * x.k; i += global_threads()) {
        int32_t e = x.expert[i];
        bool dropped = e < 0;
        if (dropped && x.a.by_expert)
            continue;
        atomicAdd(&x.load[i / x.k / x.seq * x.experts + (dropped ? -1 - e : e)], 1);
        if (dropped)
            atomicAdd(&x.load[x.sequences * x.experts], 1);
    }
}

static __global__ void __launch_bounds__(row_threads) block_kernel(aux_args x)
{
    __shared__ token_sums token[TOKENS];
    int64_t block = blockIdx.x, begin = block / x.each * x.seq;
    int64_t first = begin + block % x.each * TOKENS, end = first + TOKENS;
    end = end < begin + x.seq ? end : begin + x.seq;
    for (int64_t t = first + threadIdx.x / 32; t < end; t += row_warps) {
        token_sums s = sums_of(x, x.z + t * x.experts);
        s.together = squared_shares(x, x.z + t * x.experts, s);
        if (lane_of() == 0)
            token[t - first] = s;
    }
    __syncthreads();
    for (int64_t e = threadIdx.x; e < x.experts; e += blockDim.x) {
        float sum = 0;
        for (int64_t t = first; t < end; t++)
            sum += share_of(x, x.z[t * x.experts + e], token[t - first]);
        x.sum[block * x.experts + e] = sum;
    }
    if (threadIdx.x == 0) {
        double square = 0, together = 0;
        for (int64_t t = first; t < end; t++) {
            square += (double)token[t - first].lse * token[t - first].lse;
            together += token[t - first].together;
        }
        x.square[block] = square;
        x.together[block] = together;
    }
}

/* One block. */
static __global__ void loss_kernel(aux_args x)
{
    double T = (double)x.tokens, each = (double)x.experts / ((double)x.k * T), loss = 0;
    for (int64_t e = threadIdx.x; e < x.experts; e += blockDim.x) {
        double all_p = 0, all_n = 0, of_sequences = 0;
        for (int64_t s = 0; s < x.sequences; s++) {
            double p = 0, n = x.load[s * x.experts + e];
            for (int64_t b = s * x.each; b < (s + 1) * x.each; b++)
                p += x.sum[b * x.experts + e];
            all_p += p;
            all_n += n;
            of_sequences += n * p;
        }
        double counted = x.given ? (double)x.given[e] : all_n;
        loss += each *
                (x.a.balance * counted * all_p / T + x.a.sequence * of_sequences / (double)x.seq);
        if (x.mean)
            x.mean[e] = (float)(all_p / T);
        if (x.load_out)
            x.load_out[e] = (float)all_n;
    }
    for (int64_t b = threadIdx.x; b < x.sequences * x.each; b += blockDim.x)
        loss += (x.a.z * x.square[b] - x.a.affinity * x.together[b]) / T;
    loss = block_sum(loss);
    if (threadIdx.x == 0)
        *x.loss = (float)(loss + x.a.affinity);
    if (threadIdx.x == 0 && x.dropped)
        *x.dropped = (float)x.load[x.sequences * x.experts];
}

/* Gradients of p, of each sequence. */
static __global__ void load_kernel(aux_args x)
{
    double T = (double)x.tokens, each = *x.dloss * (double)x.experts / ((double)x.k * T);
    for (int64_t e = global_thread(); e < x.experts; e += global_threads()) {
        double all = 0;
        for (int64_t s = 0; s < x.sequences; s++)
            all += x.load[s * x.experts + e];
        all = x.given ? (double)x.given[e] : all;
        for (int64_t s = 0; s < x.sequences; s++)
            x.sum[s * x.experts + e] =
                (float)(each * (x.a.balance * all / T +
                                x.a.sequence * x.load[s * x.experts + e] / (double)x.seq));
    }
}

/* Without affinity all experts are one run, whose gradient has no part of its own; with it those of a node are. */
static __global__ void __launch_bounds__(row_threads) aux_dz_kernel(aux_args x)
{
    float of_z = (float)(2 * x.a.z * *x.dloss / (double)x.tokens);
    float of_share = (float)(-2 * x.a.affinity * *x.dloss / (double)x.tokens);
    bool shares = x.a.affinity > 0;
    int64_t runs = shares ? x.a.nodes : 1, each = x.experts / runs;
    for (int64_t t = first_row(); t < x.tokens; t += next_row()) {
        const float *z = x.z + t * x.experts, *dp = x.sum + t / x.seq * x.experts;
        token_sums s = sums_of(x, z);
        float dot = 0;
        for (int64_t n = 0; n < runs; n++) {
            float more = shares ? of_share * node_share(x, z, s, n) : 0;
            for (int64_t e = n * each + lane_of(); e < (n + 1) * each; e += 32)
                dot = fmaf(share_of(x, z[e], s), dp[e] + more, dot);
        }
        dot = warp_sum(dot);
        for (int64_t n = 0; n < runs; n++) {
            float more = shares ? of_share * node_share(x, z, s, n) : 0;
            for (int64_t e = n * each + lane_of(); e < (n + 1) * each; e += 32) {
                float d = share_of(x, z[e], s) * (dp[e] + more - dot);
                d *= x.a.sigmoid ? sigmoid_of(-z[e]) : 1;
                x.dz[t * x.experts + e] = fmaf(of_z * s.lse, expf(z[e] - s.lse), d);
            }
        }
    }
}

static aux_args args_of(const lm_call *c, bool gradient, size_t *bytes)
{
    aux_args x = {};
    x.a = *(const lm_route_aux_attr *)c->attr;
    x.tokens = c->in[0].dim[0], x.experts = c->in[0].dim[1], x.k = c->in[1].dim[1];
    x.seq = x.a.seq ? x.a.seq : x.tokens;
    x.sequences = x.tokens / x.seq;
    x.each = (x.seq + TOKENS - 1) / TOKENS;
    x.z = in_ptr<float>(c, 0);
    x.expert = in_ptr<int32_t>(c, 1);
    x.dloss = gradient ? in_ptr<float>(c, 2) : nullptr;
    int64_t blocks = x.sequences * x.each;
    *bytes = 0;
    x.load = part_of<int>(c->work, bytes, x.sequences * x.experts + 1);
    x.sum = part_of<float>(c->work, bytes, (gradient ? x.sequences : blocks) * x.experts);
    x.square = part_of<double>(c->work, bytes, blocks);
    x.together = part_of<double>(c->work, bytes, blocks);
    return x;
}

static size_t aux_work(const lm_call *c, int)
{
    size_t bytes;
    args_of(c, false, &bytes);
    return bytes;
}

static void count_loads(const lm_call *c, const aux_args &x)
{
    fill_with<int>(c, x.load, x.sequences * x.experts + 1, 0);
    LM_LAUNCH(count_kernel, grid_for(x.tokens * x.k, 256, c->stream), 256, 0, c->stream, x);
}

static void route_aux(const lm_call *c)
{
    size_t bytes;
    aux_args x = args_of(c, false, &bytes);
    x.given = in_ptr<float>(c, 2);
    x.loss = out_ptr<float>(c, 0);
    x.mean = out_ptr<float>(c, 1);
    x.load_out = out_ptr<float>(c, 2);
    x.dropped = out_ptr<float>(c, 3);
    count_loads(c, x);
    LM_LAUNCH(block_kernel, (unsigned)(x.sequences * x.each), row_threads, 0, c->stream, x);
    LM_LAUNCH(loss_kernel, 1, 256, 0, c->stream, x);
}

static void route_aux_dz(const lm_call *c)
{
    size_t bytes;
    aux_args x = args_of(c, true, &bytes);
    x.given = in_ptr<float>(c, 3);
    x.dz = out_ptr<float>(c, 0);
    count_loads(c, x);
    LM_LAUNCH(load_kernel, grid_for(x.experts, 256, c->stream), 256, 0, c->stream, x);
    LM_LAUNCH(aux_dz_kernel, grid_for(x.tokens, row_warps, c->stream), row_threads, 0, c->stream,
              x);
}

extern "C" const lm_kernel lm_route_aux_cuda_kernels[] = {
    { "route_aux", LM_DTYPE_F32, LM_CUDA_PLAIN, route_aux, aux_work },
    { "route_aux_dz", LM_DTYPE_F32, LM_CUDA_PLAIN, route_aux_dz, aux_work },
    LM_CUDA_END,
};
