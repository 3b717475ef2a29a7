/* SPDX-License-Identifier: Apache-2.0 */
/* chunk.cuh -- a block's work on the rows of a chunk, for kernels that pass a state from chunk to chunk (the delta rule,
 * linear attention).  Arrays are in scratch of the block, which its caches hold; products are in F32, each thread sums tiles
 * of 4 x 4.  All threads of the block call each function, and see its results. */
#ifndef LM_KERNELS_CUDA_CHUNK_CUH
#define LM_KERNELS_CUDA_CHUNK_CUH

#include "kernels/cuda/device.cuh"

enum { TILE = 4 };

/* A matrix: element (i, j) is at[i row + j col]. */
struct matrix {
    const float *at;
    int64_t row, col;
};

__device__ inline matrix rows_of_matrix(const float *at, int64_t width)
{
    return matrix{ at, width, 1 };
}

__device__ inline matrix turned(const float *at, int64_t width)
{
    return matrix{ at, 1, width };
}

/* c [m][n] (+)= a b over k terms; all threads, which then see it. */
__device__ inline void multiply(int64_t m, int64_t n, int64_t k, matrix a, matrix b, float *c,
                                bool add)
{
    int64_t across = (n + TILE - 1) / TILE, tiles = (m + TILE - 1) / TILE * across;
    for (int64_t at = threadIdx.x; at < tiles; at += blockDim.x) {
        int64_t i0 = at / across * TILE, j0 = at % across * TILE;
        float sum[TILE][TILE] = {};
        for (int64_t p = 0; p < k; p++) {
            float x[TILE], y[TILE];
            for (int i = 0; i < TILE; i++) {
                x[i] = i0 + i < m ? a.at[(i0 + i) * a.row + p * a.col] : 0;
                y[i] = j0 + i < n ? b.at[p * b.row + (j0 + i) * b.col] : 0;
            }
            for (int i = 0; i < TILE; i++)
                for (int j = 0; j < TILE; j++)
                    sum[i][j] = fmaf(x[i], y[j], sum[i][j]);
        }
        for (int i = 0; i < TILE && i0 + i < m; i++)
            for (int j = 0; j < TILE && j0 + j < n; j++) {
                float *to = c + (i0 + i) * n + j0 + j;
                *to = add ? *to + sum[i][j] : sum[i][j];
            }
    }
    __syncthreads();
}

/* Row i of to [rows][n] = by[i] `times` that of x; by 0 zeros, whatever x holds. */
__device__ inline void scale_rows(float *to, const float *x, int64_t rows, int64_t n,
                                  const float *by, float times = 1)
{
    for (int64_t i = threadIdx.x; i < rows * n; i += blockDim.x)
        to[i] = by[i / n] != 0 ? x[i] * by[i / n] * times : 0;
    __syncthreads();
}

/* The dot product of two rows, by a warp. */
__device__ inline float warp_dot(const float *x, const float *y, int64_t n)
{
    float sum = 0;
    for (int64_t i = threadIdx.x % 32; i < n; i += 32)
        sum = fmaf(x[i], y[i], sum);
    return warp_sum(sum);
}

/* to [rows][width] = n rows, `pitch` apart, then zeros. */
template <class T>
__device__ inline void read_rows(float *to, int64_t rows, const T *from, int64_t pitch, int64_t n,
                                 int64_t width)
{
    for (int64_t i = threadIdx.x; i < rows * width; i += blockDim.x)
        to[i] = i / width < n ? to_float(from[i / width * pitch + i % width]) : 0;
    __syncthreads();
}

/* by 0: zeros, whatever x holds. */
__device__ inline void scale_all(float *x, int64_t n, float by)
{
    for (int64_t i = threadIdx.x; i < n; i += blockDim.x)
        x[i] = by != 0 ? x[i] * by : 0;
    __syncthreads();
}

#endif
