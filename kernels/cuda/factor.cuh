/* SPDX-License-Identifier: Apache-2.0 */
/* factor.cuh -- what the bases of matrices share on a device: the state of a call, products in double, and the
 * two factorisations.  Everything is computed in double, in a fixed order, and rounded once; no launcher waits,
 * and how many kernels it launches depends on the sizes alone.
 *
 * householder.cu   qr and eigh_next: blocked reflections, a panel of 32 columns by one block of threads, the
 *                  columns behind it by many
 * jacobi.cu        eigh and svd: rotations of blocks.  A round pairs all blocks of rows; the diagonal square of each
 *                  pair is made more diagonal by one block of threads, and the whole matrix follows by products */
#ifndef LM_KERNELS_CUDA_FACTOR_CUH
#define LM_KERNELS_CUDA_FACTOR_CUH

#include "kernels/cuda/device.cuh"

extern "C" {
#include "kernels/factor.h"
}

enum { FACTOR_SWEEPS = 24, FACTOR_THREADS = 256 };

/* On the device.  stop: nothing is to be computed, since the call is not due or x is not finite (bad). */
struct factor_state {
    int stop, bad;
    int moved[FACTOR_SWEEPS]; /* did a sweep find something to rotate? */
    double least;             /* numbers beside the diagonal up to this are zero */
};

/* Parts of a call's scratch, one after the other. */
struct factor_room {
    char *at;
    size_t used;
};
template <class T> inline T *take_room(factor_room *r, int64_t n)
{
    T *p = (T *)(r->at ? r->at + r->used : nullptr);
    r->used += ((size_t)n * sizeof(T) + 15) / 16 * 16;
    return p;
}

/* due NULL: always. */
static __global__ void factor_begin(factor_state *s, const float *due)
{
    s->stop = due && *due == 0;
    s->bad = 0;
    s->least = 0;
    for (int i = 0; i < FACTOR_SWEEPS; i++)
        s->moved[i] = 0;
}

/* By one block: stops the call when a number of a [n] is not finite, and sets `least`. */
static __global__ void __launch_bounds__(1024)
    factor_measure(factor_state *s, const double *a, int64_t n, double root)
{
    double sum = 0;
    if (s->stop)
        return;
    for (int64_t i = threadIdx.x; i < n; i += blockDim.x)
        sum += a[i] * a[i];
    sum = block_sum(sum);
    __syncthreads(); /* stop has been read */
    if (threadIdx.x == 0) {
        s->stop = s->bad = !isfinite(sum);
        s->least = 0x1p-53 * sqrt(sum) / root;
    }
}

/* x as rows of numbers at strides of its own. */
struct factor_matrix {
    const float *x;
    int64_t down, across; /* from a row to the next, from a column to the next */
};

/* C [rows,cols] = A B in double over k terms; C's number (i,j) lies at i down + j across.  Tiles of 64 x 64. */
static __global__ void __launch_bounds__(FACTOR_THREADS)
    factor_product(const factor_state *s, factor_matrix a, factor_matrix b, int64_t rows,
                   int64_t cols, int64_t k, double *c, int64_t down, int64_t across)
{
    const int SIDE = 64, DEEP = 16;
    __shared__ double left[DEEP][SIDE + 1], right[DEEP][SIDE + 1];
    int64_t wide = (cols + SIDE - 1) / SIDE, tiles = (rows + SIDE - 1) / SIDE * wide;
    int ty = (int)threadIdx.x / 16, tx = (int)threadIdx.x % 16;
    if (s->stop)
        return;
#pragma unroll 1
    for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        int64_t row = tile / wide * SIDE, col = tile % wide * SIDE;
        double sum[4][4] = {};
#pragma unroll 1
        for (int64_t at = 0; at < k; at += DEEP) {
            __syncthreads();
            for (int i = (int)threadIdx.x; i < DEEP * SIDE; i += FACTOR_THREADS) {
                int64_t p = at + i / SIDE, r = row + i % SIDE, t = col + i % SIDE;
                left[i / SIDE][i % SIDE] =
                    p < k && r < rows ? (double)a.x[r * a.down + p * a.across] : 0;
                right[i / SIDE][i % SIDE] =
                    p < k && t < cols ? (double)b.x[p * b.down + t * b.across] : 0;
            }
            __syncthreads();
#pragma unroll 4
            for (int p = 0; p < DEEP; p++)
#pragma unroll
                for (int i = 0; i < 4; i++)
#pragma unroll
                    for (int j = 0; j < 4; j++)
                        sum[i][j] += left[p][ty + 16 * i] * right[p][tx + 16 * j];
        }
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) {
                int64_t r = row + ty + 16 * i, t = col + tx + 16 * j;
                if (r < rows && t < cols)
                    c[r * down + t * across] = sum[i][j];
            }
    }
}

inline unsigned product_grid(int64_t rows, int64_t cols, const lm_stream *s)
{
    return grid_for(((rows + 63) / 64) * ((cols + 63) / 64), 1, s);
}

/* How many of value[0], value[pitch], ... come before number i when they fall; equal ones stay in order, and what is
 * not a number comes last.  All threads of the block call it. */
__device__ inline int64_t falling_place(const double *value, int64_t n, int64_t pitch, int64_t i)
{
    double mine = isnan(value[i * pitch]) ? -INFINITY : value[i * pitch];
    int before = 0;
    for (int64_t j = threadIdx.x; j < n; j += blockDim.x) {
        double v = isnan(value[j * pitch]) ? -INFINITY : value[j * pitch];
        before += v > mine || (v == mine && j < i);
    }
    return block_sum(before);
}

#endif
