/* SPDX-License-Identifier: Apache-2.0 */
/* matmul.cu -- products of matrices and batches of them by gemm.cuh; inverses in double, a matrix by one block of threads. */
#include "kernels/cuda/gemm.cuh"

extern "C" {
#include "kernels/matmul.h"
}

static const int threads = 256;
static const int64_t MOST_BLOCKS = 256;

static gemm_call product_of(const lm_call *c)
{
    const lm_matmul_attr *attr = (const lm_matmul_attr *)c->attr;
    const lm_tensor *a = &c->in[0], *b = &c->in[1];
    lm_matmul_sizes s = lm_matmul_sizes_of(attr, a, b);
    gemm_call g = {};

    g.m = s.m, g.n = s.n, g.k = s.k;
    if (s.batch > 1) {
        g.batch = s.batch, g.stride_a = s.stride_a, g.stride_b = s.stride_b;
        g.stride_c = s.m * s.n;
    }
    g.ab = a->dtype, g.cd = c->out[0].dtype;
    g.ta = attr->turn_a, g.tb = attr->turn_b;
    g.a = a->data, g.b = b->data, g.c = c->out[0].data;
    g.lda = g.ta ? s.m : s.k, g.ldb = g.tb ? s.k : s.n, g.ldc = s.n;
    g.work = c->work;
    return g;
}

template <class T> static void matmul(const lm_call *c)
{
    gemm_call g = product_of(c);
    gemm_run(&g, c->stream);
}

static size_t matmul_work(const lm_call *c, int)
{
    gemm_call g = product_of(c);
    return gemm_work(&g, c->stream);
}

/* ---- inverse ---- */

/* The first row from k on with the largest magnitude in column k, by all threads. */
__device__ inline int64_t pivot_of(const double *x, int64_t n, int64_t k)
{
    __shared__ double most[threads];
    __shared__ int64_t at[threads];
    int t = (int)threadIdx.x;
    double best = -1;
    int64_t row = k;
    for (int64_t i = k + t; i < n; i += threads)
        if (fabs(x[i * n + k]) > best) {
            best = fabs(x[i * n + k]);
            row = i;
        }
    __syncthreads();
    most[t] = best;
    at[t] = row;
    __syncthreads();
    for (int half = threads / 2; half > 0; half /= 2) {
        if (t < half &&
            (most[t + half] > most[t] || (most[t + half] == most[t] && at[t + half] < at[t]))) {
            most[t] = most[t + half];
            at[t] = at[t + half];
        }
        __syncthreads();
    }
    return at[0];
}

/* x and y [n,n]: step k of Gauss and Jordan.  factor [n]: column k before it. */
__device__ inline void eliminate(double *x, double *y, double *factor, int64_t n, int64_t k,
                                 int64_t pivot)
{
    int t = (int)threadIdx.x;
    double scale = 1 / x[pivot * n + k];
    __syncthreads();
    for (int64_t j = t; j < n; j += threads) {
        double up = x[pivot * n + j] * scale, up_y = y[pivot * n + j] * scale;
        x[pivot * n + j] = x[k * n + j];
        y[pivot * n + j] = y[k * n + j];
        x[k * n + j] = up;
        y[k * n + j] = up_y;
    }
    __syncthreads();
    for (int64_t i = t; i < n; i += threads)
        factor[i] = i == k ? 0 : x[i * n + k];
    __syncthreads();
    for (int64_t i = t; i < n * n; i += threads) {
        int64_t row = i / n, col = i % n;
        if (row == k)
            continue;
        x[i] -= factor[row] * x[k * n + col];
        y[i] -= factor[row] * y[k * n + col];
    }
    __syncthreads();
}

template <class T>
__global__ void __launch_bounds__(threads)
    inverse_kernel(const T *from, T *to, int64_t batch, int64_t n, double *work)
{
    double *x = work + (int64_t)blockIdx.x * (2 * n * n + n), *y = x + n * n, *factor = y + n * n;
#pragma unroll 1
    for (int64_t b = blockIdx.x; b < batch; b += gridDim.x) {
        double bad = 0;
        for (int64_t i = threadIdx.x; i < n * n; i += threads) {
            x[i] = to_float(from[b * n * n + i]);
            y[i] = i % (n + 1) == 0;
            bad += x[i] - x[i];
        }
        bad = block_sum(bad);
        __syncthreads();
#pragma unroll 1
        for (int64_t k = 0; k < n; k++) {
            int64_t pivot = pivot_of(x, n, k);
            if (!(fabs(x[pivot * n + k]) > 0))
                bad = NAN;
            eliminate(x, y, factor, n, k, pivot);
        }
        for (int64_t i = threadIdx.x; i < n * n; i += threads)
            to[b * n * n + i] = from_float<T>(bad == 0 ? (float)y[i] : NAN);
        __syncthreads();
    }
}

static int64_t inverse_blocks(const lm_call *c, int64_t n)
{
    int64_t batch = lm_tensor_count(&c->in[0]) / (n * n);
    return batch < MOST_BLOCKS ? batch : MOST_BLOCKS;
}

template <class T> static void inverse(const lm_call *c)
{
    int64_t n = width_of(&c->in[0]), batch = lm_tensor_count(&c->in[0]) / (n * n);
    LM_LAUNCH((inverse_kernel<T>), (unsigned)inverse_blocks(c, n), threads, 0, c->stream,
              in_ptr<const T>(c, 0), out_ptr<T>(c, 0), batch, n, (double *)c->work);
}

static size_t inverse_work(const lm_call *c, int)
{
    int64_t n = width_of(&c->in[0]);
    return (size_t)(inverse_blocks(c, n) * (2 * n * n + n)) * sizeof(double);
}

extern "C" const lm_kernel lm_matmul_cuda_kernels[] = {
    LM_CUDA_ROWS("matmul", matmul, matmul_work),
    LM_CUDA_ROWS("inverse", inverse, inverse_work),
    LM_CUDA_END,
};
