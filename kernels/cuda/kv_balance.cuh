/* SPDX-License-Identifier: Apache-2.0 */
/* kv_balance.cuh -- second scales of a tile of tokens (numeric/kv_balance.c): rows and columns are divided by turns. */
#ifndef LM_KERNELS_CUDA_KV_BALANCE_CUH
#define LM_KERNELS_CUDA_KV_BALANCE_CUH

#include "kernels/cuda/kv_cell.cuh"

/* Scales of rows and columns of a tile with their logarithms, and the best so far: 6 * (rows + cols) numbers. */
struct kv_balance {
    double *scale[2], *log_scale[2], *best[2]; /* of columns, of rows */
    int n[2];
};

static __host__ __device__ inline int64_t balance_numbers(const kv_side &f)
{
    return f.second ? 6 * (int64_t)(f.D + f.step) : 0;
}

static __device__ inline kv_balance balance_at(const kv_side &f, double *work)
{
    kv_balance m;
    m.n[0] = f.axis == LM_KV_CHANNEL ? f.step : f.D;
    m.n[1] = f.axis == LM_KV_CHANNEL ? f.D : f.step;
    for (int side = 0; side < 2; side++) {
        m.scale[side] = work;
        m.log_scale[side] = work + m.n[side];
        m.best[side] = work + 2 * m.n[side];
        work += 3 * m.n[side];
    }
    return m;
}

/* The sample standard deviation of a row or column of the balanced tile, in the host's order. */
template <class T>
static __device__ inline double deviation(const kv_side &f, const kv_cell<T> &c,
                                          const kv_balance &m, int i, int by_row)
{
    const int n = m.n[!by_row];
    const bool tokens = (f.axis == LM_KV_CHANNEL) == (by_row == 0); /* i counts tokens */
    double sum = 0, squares = 0;
#pragma unroll 4
    for (int k = 0; k < n; k++)
        sum += c.number(f, c.tile + (tokens ? i : k), tokens ? k : i);
    const double mean = sum / (double)n;
#pragma unroll 4
    for (int k = 0; k < n; k++) {
        const double y = c.number(f, c.tile + (tokens ? i : k), tokens ? k : i) - mean;
        squares = __dadd_rn(squares, __dmul_rn(y, y));
    }
    return n > 1 ? sqrt(squares / (double)(n - 1)) : 1;
}

/* The largest over the least deviation; all threads get it. */
template <class T>
static __device__ inline double spread(const kv_side &f, const kv_cell<T> &c, const kv_balance &m,
                                       int by_row)
{
    __shared__ double low[WARPS], high[WARPS];
    double least = INFINITY, most = 0;
#pragma unroll 1
    for (int i = (int)threadIdx.x; i < m.n[by_row]; i += THREADS) {
        const double s = deviation(f, c, m, i, by_row);
        least = fmin(least, s);
        most = fmax(most, s);
    }
    const kv_extent r = kv_warp_extent({ least, most, 0, true });
    __syncthreads();
    if (threadIdx.x % 32 == 0) {
        low[threadIdx.x / 32] = r.least;
        high[threadIdx.x / 32] = r.most;
    }
    __syncthreads();
    for (int w = 0; w < WARPS; w++) {
        least = w ? fmin(least, low[w]) : low[0];
        most = w ? fmax(most, high[w]) : high[0];
    }
    return most / fmax(least, 1e-8);
}

template <class T>
static __device__ inline void divide(const kv_side &f, const kv_cell<T> &c, const kv_balance &m,
                                     int by_row)
{
#pragma unroll 1
    for (int i = (int)threadIdx.x; i < m.n[by_row]; i += THREADS)
        m.log_scale[by_row][i] += log(kv_limited(deviation(f, c, m, i, by_row), 1e-3, 1e3));
    __syncthreads();
#pragma unroll 1
    for (int i = (int)threadIdx.x; i < m.n[by_row]; i += THREADS) {
        const double x = kv_limited(m.log_scale[by_row][i], -0.3, 10);
        m.log_scale[by_row][i] = x;
        m.scale[by_row][i] = exp(x);
    }
    __syncthreads();
}

/* Set the scales of the tile at c.tile to those of the best round. */
template <class T>
static __device__ inline void balance(const kv_side &f, kv_cell<T> &c, double *work)
{
    enum { ROUNDS = 8 };
    const kv_balance m = balance_at(f, work);
    double best = INFINITY;
    c.col = m.scale[0];
    c.row = m.scale[1];
    for (int side = 0; side < 2; side++)
        for (int i = (int)threadIdx.x; i < m.n[side]; i += THREADS) {
            m.scale[side][i] = m.best[side][i] = 1;
            m.log_scale[side][i] = 0;
        }
    __syncthreads();
#pragma unroll 1
    for (int round = 0; round <= ROUNDS; round++) {
        const double now = spread(f, c, m, 0) + spread(f, c, m, 1);
        if (now <= best) {
            best = now;
            for (int side = 0; side < 2; side++)
                for (int i = (int)threadIdx.x; i < m.n[side]; i += THREADS)
                    m.best[side][i] = m.scale[side][i];
        }
        if (round == ROUNDS)
            break;
        divide(f, c, m, 0);
        divide(f, c, m, 1);
    }
    __syncthreads();
    c.col = m.best[0];
    c.row = m.best[1];
}

template <class T> static __device__ inline void put_seconds(const kv_side &f, const kv_cell<T> &c)
{
    const bool by_channel = f.axis == LM_KV_CHANNEL;
    const int n = by_channel ? f.step : f.D;
    for (int i = (int)threadIdx.x; i < n; i += THREADS)
        kv_put_scale(f.scale, c.page + f.at_second,
                     kv_second_at(f, c.tile + (by_channel ? i : 0), by_channel ? 0 : i),
                     kv_stored(f.scale, c.col[i]));
    __syncthreads();
}

#endif
