/* SPDX-License-Identifier: Apache-2.0 */
/* grouped.cu -- grouped linear layers: in plain CUDA, and by tensor cores (grouped_tensor.cu) where rows allow reads of 16
 * bytes.  Not by cuBLASLt, which needs the number of rows of a product on the host: only the device has it. */
#include "kernels/cuda/grouped.cuh"

static const int side = 64;

/* y = x w^T (TB), or dx = dy w.  t: m rows, n columns, depth k, tiles_m strips. */
template <class T, bool TB>
__global__ void __launch_bounds__(256, 3)
    grouped_rows_kernel(const T *a, const T *w, T *c, const int32_t *offsets, int64_t groups,
                        tiling t)
{
    __shared__ room<side> room_a, room_b;

    for (int64_t i = blockIdx.x; i < t.tiles_m * t.tiles_n; i += gridDim.x) {
        int64_t strip, col;
        tile_at(t, i, &strip, &col);
        col *= side;
        group_rows r = rows_of_strip<side>(offsets, groups, t.m, strip);
        if (r.row >= r.end) /* the whole block */
            continue;
        float sum[side / 16][side / 16] = {};
        if (r.g < groups)
            sum_tile<T, T, false, TB, side>(sum, &room_a, &room_b, a, w + r.g * t.stride_b, t,
                                            r.row, r.end, col, 0, t.k);
        put_tile<T, side>(c, sum, t, r.row, r.end, col, nullptr, false);
    }
}

/* dw [m,n] of each group (+)= dy^T x over its rows. */
template <class T>
__global__ void __launch_bounds__(256, 3)
    grouped_weights_kernel(const T *dy, const T *x, float *dw, const int32_t *offsets,
                           int64_t groups, tiling t)
{
    __shared__ room<side> room_a, room_b;
    int64_t each = t.tiles_m * t.tiles_n;

    for (int64_t i = blockIdx.x; i < each * groups; i += gridDim.x) {
        int64_t g = i / each, row, col;
        int64_t begin = offsets[g], end = offsets[g + 1];
        tile_at(t, i % each, &row, &col);
        row *= side, col *= side;
        /* Long sums are folded into dw every so often (gemm_plain.cu); an empty group's is 0. */
        for (int64_t k0 = begin; k0 == begin || k0 < end; k0 += flush) {
            int64_t k1 = k0 + flush < end ? k0 + flush : end;
            float sum[side / 16][side / 16] = {};
            sum_tile<T, T, true, false, side>(sum, &room_a, &room_b, dy, x, t, row, t.m, col, k0,
                                              k1);
            put_tile<float, side>(dw + g * t.stride_c, sum, t, row, t.m, col, nullptr,
                                  t.accumulate || k0 > begin);
        }
    }
}

template <class T, bool TB> static void by_rows(const lm_call *c)
{
    tiling t = rows_tiling<T, side>(c, !TB);

    LM_LAUNCH((grouped_rows_kernel<T, TB>), tile_blocks(t.tiles_m * t.tiles_n), block_threads, 0,
              c->stream, in_ptr<T>(c, 0), in_ptr<T>(c, 1), out_ptr<T>(c, 0), in_ptr<int32_t>(c, 2),
              groups_of(c), t);
}

template <class T> static void grouped_linear(const lm_call *c)
{
    if (c->in[1].codes)
        grouped_codes<T>(c, false);
    else
        by_rows<T, true>(c);
}

template <class T> static void grouped_linear_dx(const lm_call *c)
{
    by_rows<T, false>(c);
}

template <class T> static void grouped_linear_dw(const lm_call *c)
{
    tiling t = weights_tiling<T, side>(c);
    int64_t groups = groups_of(c);

    LM_LAUNCH((grouped_weights_kernel<T>), tile_blocks(t.tiles_m * t.tiles_n * groups),
              block_threads, 0, c->stream, in_ptr<T>(c, 0), in_ptr<T>(c, 1), out_ptr<float>(c, 0),
              in_ptr<int32_t>(c, 2), groups, t);
}

/* ---- on the path of tensor cores ---- */

template <class T> static void tensor_linear(const lm_call *c)
{
    if (c->in[1].codes)
        grouped_codes<T>(c, true);
    else if (!grouped_rows_tensor<T>(c, false))
        grouped_linear<T>(c);
}

template <class T> static void tensor_linear_dx(const lm_call *c)
{
    if (!grouped_rows_tensor<T>(c, true))
        grouped_linear_dx<T>(c);
}

template <class T> static void tensor_linear_dw(const lm_call *c)
{
    if (!grouped_weights_tensor<T>(c))
        grouped_linear_dw<T>(c);
}

#define TENSOR_ROWS(op, fn)                                   \
    { op, LM_DTYPE_BF16, LM_CUDA_TENSOR, fn<bf16>, nullptr }, \
    {                                                         \
        op, LM_DTYPE_F16, LM_CUDA_TENSOR, fn<f16>, nullptr    \
    }

extern "C" const lm_kernel lm_grouped_cuda_kernels[] = {
    LM_CUDA_ROWS("grouped_linear", grouped_linear, nullptr),
    LM_CUDA_ROWS("grouped_linear_dx", grouped_linear_dx, nullptr),
    LM_CUDA_ROWS("grouped_linear_dw", grouped_linear_dw, nullptr),
    TENSOR_ROWS("grouped_linear", tensor_linear),
    TENSOR_ROWS("grouped_linear_dx", tensor_linear_dx),
    TENSOR_ROWS("grouped_linear_dw", tensor_linear_dw),
    LM_CUDA_END,
};
