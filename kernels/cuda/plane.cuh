/* SPDX-License-Identifier: Apache-2.0 */
/* plane.cuh -- a launch over rows and columns, for kernels that must know which row they are in:
 * no division per element.  Threads lie along the columns, and along rows too where these are
 * narrow, or where fewer columns to a block leave fewer threads without work. */
#ifndef LM_KERNELS_CUDA_PLANE_CUH
#define LM_KERNELS_CUDA_PLANE_CUH

#include "kernels/cuda/device.cuh"

struct plane {
    dim3 grid, block;
};

/* Columns with those of the last block that are not there. */
inline int64_t plane_padded(int64_t cols, int64_t x)
{
    return (cols + x - 1) / x * x;
}

inline plane plane_for(int64_t rows, int64_t cols, const lm_stream *s)
{
    const int64_t threads = 256, most = (int64_t)s->sms * 32;
    int64_t x = 16, y, down;
    for (int64_t w = 2 * x; w <= threads; w *= 2)
        if (plane_padded(cols, w) * 8 <= plane_padded(cols, x) * 9)
            x = w;
    y = threads / x;
    int64_t across = (cols + x - 1) / x;
    across = across < 1 ? 1 : across < most ? across : most;
    down = (rows + y - 1) / y;
    int64_t room = (most + across - 1) / across;
    down = down < room ? down : room;
    down = down < 1 ? 1 : down < 65535 ? down : 65535;
    return plane{ dim3((unsigned)across, (unsigned)down), dim3((unsigned)x, (unsigned)y) };
}

/* The first row and column of a thread, and how far it is to its next. */
__device__ inline int64_t plane_row(void)
{
    return (int64_t)blockIdx.y * blockDim.y + threadIdx.y;
}
__device__ inline int64_t plane_rows(void)
{
    return (int64_t)gridDim.y * blockDim.y;
}
__device__ inline int64_t plane_col(void)
{
    return global_thread();
}
__device__ inline int64_t plane_cols(void)
{
    return global_threads();
}

#endif
