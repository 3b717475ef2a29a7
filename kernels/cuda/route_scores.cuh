/* SPDX-License-Identifier: Apache-2.0 */
/* route_scores.cuh -- a token's logits by the lanes of a warp, the largest of a row, and parts of scratch, for the
 * route family. */
#ifndef LM_KERNELS_CUDA_ROUTE_SCORES_CUH
#define LM_KERNELS_CUDA_ROUTE_SCORES_CUH

#include "kernels/cuda/sigmoid.cuh"

static const unsigned full_warp = 0xffffffffu;
static const int row_warps = 8, row_threads = 32 * row_warps; /* a warp a row */

__device__ inline int64_t lane_of(void)
{
    return threadIdx.x % 32;
}
__device__ inline int64_t first_row(void)
{
    return (int64_t)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
}
__device__ inline int64_t next_row(void)
{
    return (int64_t)gridDim.x * (blockDim.x / 32);
}

/* inv: 1 / sum of exp(z - top), or 1 of sigmoids; NaN: a logit is not finite. */
struct row_stats {
    float top, inv;
};

__device__ inline float row_top(const float *z, int64_t experts, bool *finite)
{
    float top = -INFINITY;
    int bad = 0;
    for (int64_t e = lane_of(); e < experts; e += 32) {
        bad |= !(z[e] - z[e] == 0);
        top = fmaxf(top, z[e]);
    }
    *finite = !__any_sync(full_warp, bad);
    return warp_max(top);
}

__device__ inline float exp_sum(const float *z, int64_t experts, float top)
{
    float sum = 0;
    for (int64_t e = lane_of(); e < experts; e += 32)
        sum += expf(z[e] - top);
    return warp_sum(sum);
}

__device__ inline row_stats stats_of(const float *z, int64_t experts, bool sigmoid)
{
    bool finite;
    row_stats r;
    r.top = row_top(z, experts, &finite);
    float sum = sigmoid ? 1 : exp_sum(z, experts, r.top);
    r.inv = finite ? 1 / sum : NAN;
    return r;
}

__device__ inline float score(bool sigmoid, float z, row_stats r)
{
    return r.inv * (sigmoid ? sigmoid_of(z) : expf(z - r.top));
}

/* Of two numbers with their indices: the largest, of the lowest index. */
__device__ inline void take_larger(float *v, int *i, float other_v, int other_i)
{
    if (other_v > *v || (other_v == *v && other_i < *i)) {
        *v = other_v;
        *i = other_i;
    }
}

/* The index of the largest over a warp; every lane gets it. */
__device__ inline int warp_best(float v, int i)
{
    for (int o = 16; o > 0; o >>= 1) {
        float other_v = __shfl_xor_sync(full_warp, v, o);
        int other_i = __shfl_xor_sync(full_warp, i, o);
        take_larger(&v, &i, other_v, other_i);
    }
    return i;
}

/* The largest of n numbers in shared memory, of the lowest index; it is replaced by -Inf. */
__device__ inline int pick(float *v, int64_t n)
{
    float top = -INFINITY;
    int best = (int)n;
    for (int64_t i = lane_of(); i < n; i += 32)
        if (best == n || v[i] > top) {
            top = v[i];
            best = (int)i;
        }
    best = warp_best(top, best);
    best = best < n ? best : 0; /* a bias is not finite: any expert will do */
    __syncwarp();
    if (lane_of() == 0)
        v[best] = -INFINITY;
    __syncwarp();
    return best;
}

/* The next `count` elements of scratch; *at: bytes used so far. */
template <class P> inline P *part_of(void *work, size_t *at, int64_t count)
{
    P *p = work ? (P *)((char *)work + *at) : nullptr;
    *at = (*at + (size_t)count * sizeof(P) + 255) / 256 * 256;
    return p;
}

template <class P> __global__ void fill_kernel(P *p, int64_t count, P value)
{
    for (int64_t i = global_thread(); i < count; i += global_threads())
        p[i] = value;
}

template <class P> inline void fill_with(const lm_call *c, P *p, int64_t count, P value)
{
    LM_LAUNCH((fill_kernel<P>), grid_for(count, 256, c->stream), 256, 0, c->stream, p, count,
              value);
}

#endif
