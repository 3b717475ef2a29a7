/* SPDX-License-Identifier: Apache-2.0 */
/* grouped.cu -- grouped linear layers in plain CUDA, on every path: cuBLASLt needs the number of
 * rows of a product on the host, but only the device has it.
 *
 * The grid has strips of `side` rows.  Those of group g begin with strip offsets[g] / side + g,
 * which is past the last strip of the groups before it; rows of no group are a group G whose
 * results are 0.  So a block finds its group by a search in the offsets alone, without a list of
 * tiles, and at most G + 2 strips are empty.  In the gradient
 * of weights the rows of a group are the depth of its product, so its tiles follow from the
 * output's shape. */
#include "kernels/cuda/gemm_tile.cuh"

extern "C" {
#include "kernels/grouped.h"
}

static const int side = 64;

__device__ inline int64_t first_strip(const int32_t *offsets, int64_t g)
{
    return offsets[g] / side + g;
}

/* The last group that begins at or before the strip. */
__device__ inline int64_t group_at(const int32_t *offsets, int64_t groups, int64_t strip)
{
    int64_t low = 0, high = groups; /* it is in [low, high) */
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        if (first_strip(offsets, middle) <= strip)
            low = middle;
        else
            high = middle;
    }
    return low;
}

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
        int64_t g = group_at(offsets, groups + 1, strip);
        int64_t row = offsets[g] + (strip - first_strip(offsets, g)) * side;
        int64_t end = g < groups ? offsets[g + 1] : t.m;
        if (row >= end) /* the whole block */
            continue;
        float sum[side / 16][side / 16] = {};
        if (g < groups)
            sum_tile<T, T, false, TB, side>(sum, &room_a, &room_b, a, w + g * t.stride_b, t, row,
                                            end, col, 0, t.k);
        put_tile<T, side>(c, sum, t, row, end, col, nullptr, false);
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

static unsigned tile_blocks(int64_t tiles)
{
    return (unsigned)(tiles < INT32_MAX ? tiles : INT32_MAX);
}

template <class T, bool TB> static void by_rows(const lm_call *c)
{
    const lm_tensor *a = &c->in[0];
    int64_t rows = a->dim[0], groups = c->in[2].dim[0] - 1;
    const T *a_at = in_ptr<T>(c, 0), *w_at = in_ptr<T>(c, 1);
    T *out = out_ptr<T>(c, 0);
    tiling t = {};

    t.m = rows, t.n = c->out[0].dim[1], t.k = a->dim[1];
    t.lda = t.k, t.ldb = TB ? t.k : t.n, t.ldc = t.n;
    t.stride_b = t.n * t.k;
    t.tiles_m = rows / side + groups + 1;
    t.tiles_n = ceil_div(t.n, side);
    t.pack_a = packs<T>(wide<T>::n, t.lda, a_at);
    t.pack_b = packs<T>(wide<T>::n, t.ldb, w_at);
    t.pack_c = packs<T>(4, t.ldc, out);
    LM_LAUNCH((grouped_rows_kernel<T, TB>), tile_blocks(t.tiles_m * t.tiles_n), block_threads, 0,
              c->stream, a_at, w_at, out, in_ptr<int32_t>(c, 2), groups, t);
}

template <class T> static void grouped_linear(const lm_call *c)
{
    by_rows<T, true>(c);
}

template <class T> static void grouped_linear_dx(const lm_call *c)
{
    by_rows<T, false>(c);
}

template <class T> static void grouped_linear_dw(const lm_call *c)
{
    const lm_grouped_attr *attr = (const lm_grouped_attr *)c->attr;
    const T *dy = in_ptr<T>(c, 0), *x = in_ptr<T>(c, 1);
    float *dw = out_ptr<float>(c, 0);
    int64_t groups = c->in[2].dim[0] - 1;
    tiling t = {};

    t.m = c->in[0].dim[1], t.n = c->in[1].dim[1];
    t.lda = t.m, t.ldb = t.n, t.ldc = t.n;
    t.stride_c = t.m * t.n;
    t.tiles_m = ceil_div(t.m, side);
    t.tiles_n = ceil_div(t.n, side);
    t.pack_a = packs<T>(wide<T>::n, t.lda, dy);
    t.pack_b = packs<T>(wide<T>::n, t.ldb, x);
    t.pack_c = packs<float>(4, t.ldc, dw);
    t.accumulate = !overwrites(c, attr->acc);
    LM_LAUNCH((grouped_weights_kernel<T>), tile_blocks(t.tiles_m * t.tiles_n * groups),
              block_threads, 0, c->stream, dy, x, dw, in_ptr<int32_t>(c, 2), groups, t);
}

extern "C" const lm_kernel lm_grouped_cuda_kernels[] = {
    LM_CUDA_ROWS("grouped_linear", grouped_linear, nullptr),
    LM_CUDA_ROWS("grouped_linear_dx", grouped_linear_dx, nullptr),
    LM_CUDA_ROWS("grouped_linear_dw", grouped_linear_dw, nullptr),
    LM_CUDA_END,
};
