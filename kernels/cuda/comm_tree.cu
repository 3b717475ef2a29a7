/* SPDX-License-Identifier: Apache-2.0 */
/* comm_tree.cu -- parts of all ranks combined in a fixed tree (kernels/cuda/comm.h): one read of each and one write. */
#include "kernels/cuda/device.cuh"

extern "C" {
#include "kernels/cuda/comm.h"
}

static const int threads = 256;

/* Nodes of the tree that are complete, and wait for their neighbours: one for each bit of the number of ranks. */
enum { LEVELS = 32 };

__device__ inline int64_t to_wide(int64_t x)
{
    return x;
}
__device__ inline int32_t to_wide(int32_t x)
{
    return x;
}
__device__ inline double to_wide(double x)
{
    return x;
}
template <class T> __device__ inline float to_wide(T x)
{
    return to_float(x);
}

template <class T> struct narrow {
    template <class W> __device__ static T from(W x)
    {
        return from_float<T>(x);
    }
};
template <> struct narrow<double> {
    __device__ static double from(double x)
    {
        return x;
    }
};
template <> struct narrow<int64_t> {
    __device__ static int64_t from(int64_t x)
    {
        return x;
    }
};
template <> struct narrow<int32_t> {
    __device__ static int32_t from(int32_t x)
    {
        return x;
    }
};

__device__ inline int64_t added(int64_t p, int64_t q)
{
    return (int64_t)((uint64_t)p + (uint64_t)q);
}
__device__ inline int32_t added(int32_t p, int32_t q)
{
    return (int32_t)((uint32_t)p + (uint32_t)q);
}
__device__ inline double added(double p, double q)
{
    return p + q;
}
__device__ inline float added(float p, float q)
{
    return p + q;
}

/* A NaN is the largest and the smallest of all. */
template <class W> __device__ inline W combined(W p, W q, lm_exchange_op op)
{
    if (op == LM_EXCHANGE_SUM)
        return added(p, q);
    if (op == LM_EXCHANGE_MAX)
        return p >= q || p != p ? p : q;
    return p <= q || p != p ? p : q;
}

/* A part that makes an even number of equal nodes completes the one above; those that are left at the end are combined from
 * the smallest. */
template <class T, class W>
__global__ void tree_kernel(const T *parts, int64_t stride, int ranks, int64_t n, lm_exchange_op op,
                            T *out)
{
#pragma unroll 1
    for (int64_t i = global_thread(); i < n; i += global_threads()) {
        W node[LEVELS];
        node[0] = W();
        int left = 0;
#pragma unroll 1
        for (int r = 0; r < ranks; r++) {
            node[left++] = to_wide(parts[r * stride + i]);
#pragma unroll 1
            for (int whole = r + 1; whole % 2 == 0; whole /= 2) {
                left--;
                node[left - 1] = combined<W>(node[left - 1], node[left], op);
            }
        }
#pragma unroll 1
        for (; left > 1; left--)
            node[left - 2] = combined<W>(node[left - 2], node[left - 1], op);
        out[i] = narrow<T>::from(node[0]);
    }
}

template <class T, class W>
static void tree(const void *parts, size_t stride, int ranks, size_t n, lm_exchange_op op,
                 void *out, const lm_stream *s)
{
    LM_LAUNCH((tree_kernel<T, W>), grid_for((int64_t)n, threads, s), threads, 0, s,
              (const T *)parts, (int64_t)stride, ranks, (int64_t)n, op, (T *)out);
}

void lm_cuda_tree(const void *parts, size_t stride, int ranks, size_t n, lm_dtype d,
                  lm_exchange_op op, void *out, const lm_stream *s)
{
    if (!n)
        return;
    switch (d) {
    case LM_DTYPE_F64:
        return tree<double, double>(parts, stride, ranks, n, op, out, s);
    case LM_DTYPE_I64:
        return tree<int64_t, int64_t>(parts, stride, ranks, n, op, out, s);
    case LM_DTYPE_I32:
        return tree<int32_t, int32_t>(parts, stride, ranks, n, op, out, s);
    case LM_DTYPE_F16:
        return tree<f16, float>(parts, stride, ranks, n, op, out, s);
    case LM_DTYPE_BF16:
        return tree<bf16, float>(parts, stride, ranks, n, op, out, s);
    default:
        return tree<float, float>(parts, stride, ranks, n, op, out, s);
    }
}
