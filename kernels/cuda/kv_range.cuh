/* SPDX-License-Identifier: Apache-2.0 */
/* kv_range.cuh -- the range of a token's numbers of all heads, without its outliers (numeric/kv_range.c); a block has a token. */
#ifndef LM_KERNELS_CUDA_KV_RANGE_CUH
#define LM_KERNELS_CUDA_KV_RANGE_CUH

#include "kernels/cuda/kv_cell.cuh"

/* Numbers in the order of floats, zeros apart. */
static __device__ inline uint32_t rank_key(float x)
{
    const uint32_t bits = __float_as_uint(x);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

/* The numbers of a token of all heads, 0 to n. */
template <class T> struct kv_token_numbers {
    const T *from;
    int64_t step; /* from head to head */
    int dim, n;
    __device__ inline float at(int i) const
    {
        return to_float(from[i / dim * step + i % dim]);
    }
};

/* The number that sorting puts at k among the finite ones: a byte of its key is found at a time, by counts. */
template <class T> static __device__ inline float number_at(const kv_token_numbers<T> &x, int k)
{
    __shared__ unsigned count[256];
    __shared__ unsigned chosen[2];
    uint32_t key = 0;
#pragma unroll 1
    for (int shift = 24; shift >= 0; shift -= 8) {
        __syncthreads();
        count[threadIdx.x] = 0;
        __syncthreads();
#pragma unroll 1
        for (int i = (int)threadIdx.x; i < x.n; i += THREADS) {
            const float v = x.at(i);
            const uint32_t own = rank_key(v);
            if (isfinite(v) && (shift == 24 || own >> (shift + 8) == key >> (shift + 8)))
                atomicAdd(&count[own >> shift & 255], 1u);
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            unsigned before = 0, i = 0;
            while (i < 255 && before + count[i] <= (unsigned)k)
                before += count[i++];
            chosen[0] = i;
            chosen[1] = before;
        }
        __syncthreads();
        key |= chosen[0] << shift;
        k -= (int)chosen[1];
    }
    return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key);
}

template <class T>
static __device__ inline double quantile(const kv_token_numbers<T> &x, int m, double q)
{
    const double at = __dmul_rn(q, (double)(m - 1));
    const int i = (int)at;
    const double low = (double)number_at(x, i),
                 high = i + 1 < m ? (double)number_at(x, i + 1) : low;
    return __dadd_rn(low, __dmul_rn(high - low, at - (double)i));
}

template <class T>
static __device__ inline void token_range(const kv_token_numbers<T> &x, double share, float *range)
{
    double finite = 0, low = -INFINITY, high = INFINITY;
    float least = INFINITY, most = -INFINITY;
#pragma unroll 1
    for (int i = (int)threadIdx.x; i < x.n; i += THREADS)
        finite += isfinite(x.at(i));
    const int m = (int)block_sum(finite);
    if (m && share > 0) {
        high = quantile(x, m, 1 - share / 2);
        low = quantile(x, m, share / 2);
    }
#pragma unroll 1
    for (int i = (int)threadIdx.x; i < x.n; i += THREADS) {
        const float v = x.at(i);
        if (isfinite(v) && (double)v > low && (double)v < high) {
            least = fminf(least, v);
            most = fmaxf(most, v);
        }
    }
    least = -block_max(-least);
    most = block_max(most);
    if (m && least > most) /* all are outliers */
        least = most = number_at(x, (m - 1) / 2);
    if (threadIdx.x == 0) {
        range[0] = m ? least : 0;
        range[1] = m ? most : 0;
    }
}

#endif
