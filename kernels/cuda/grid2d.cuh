/* SPDX-License-Identifier: Apache-2.0 */
/* grid2d.cuh -- a launch over rows and columns, for kernels that need the row of an element,
 * without a division for each element.  Threads lie along the columns, and along rows too where
 * these are narrow, or where blocks with fewer columns leave fewer threads idle. */
#ifndef LM_KERNELS_CUDA_GRID2D_CUH
#define LM_KERNELS_CUDA_GRID2D_CUH

#include "kernels/cuda/device.cuh"

struct grid2d {
    dim3 grid, block;
};

/* Columns including the idle ones of the last block. */
inline int64_t grid2d_padded(int64_t cols, int64_t x)
{
    return (cols + x - 1) / x * x;
}

inline grid2d grid2d_for(int64_t rows, int64_t cols, const lm_stream *s)
{
    const int64_t threads = 256, most = (int64_t)s->sms * 32;
    int64_t x = 16, y, down;
    for (int64_t w = 2 * x; w <= threads; w *= 2)
        if (grid2d_padded(cols, w) * 8 <= grid2d_padded(cols, x) * 9)
            x = w;
    y = threads / x;
    int64_t across = (cols + x - 1) / x;
    across = across < 1 ? 1 : across < most ? across : most;
    down = (rows + y - 1) / y;
    int64_t room = (most + across - 1) / across;
    down = down < room ? down : room;
    down = down < 1 ? 1 : down < 65535 ? down : 65535;
    return grid2d{ dim3((unsigned)across, (unsigned)down), dim3((unsigned)x, (unsigned)y) };
}

/* The first row and column of a thread, and the distances to its next ones. */
__device__ inline int64_t grid2d_row(void)
{
    return (int64_t)blockIdx.y * blockDim.y + threadIdx.y;
}
__device__ inline int64_t grid2d_rows(void)
{
    return (int64_t)gridDim.y * blockDim.y;
}
__device__ inline int64_t grid2d_col(void)
{
    return global_thread();
}
__device__ inline int64_t grid2d_cols(void)
{
    return global_threads();
}

#endif
