/* SPDX-License-Identifier: Apache-2.0 */
/* grouped_tensor.cu -- grouped linear layers by tensor cores (grouped_stages.cuh), for BF16 and F16 whose rows can be read 16
 * bytes at a time. */
#include "kernels/cuda/grouped_stages.cuh"

/* In F32, replaced or added to. */
__device__ inline void store_wide(float *c, int64_t pitch, const warp_sums &sum, int rows, int cols,
                                  bool add)
{
    typedef pack<float, 2> pair;
    const int lane = (int)threadIdx.x % 32;

#pragma unroll
    for (int i = 0; i < warp_rows / 8; i++)
#pragma unroll
        for (int j = 0; j < warp_cols / 8; j++) {
            int row = warp_row() + 8 * i + lane / 4, col = warp_col() + 8 * j + lane % 4 * 2;
            const float *r = sum.v[i / 2][j].r + i % 2 * 2;
            pair *to = reinterpret_cast<pair *>(c + row * pitch + col), v = {};
            if (row >= rows || col >= cols)
                continue;
            if (add)
                v = *to;
            *to = pair{ { v.v[0] + r[0], v.v[1] + r[1] } };
        }
}

/* ---- kernels ---- */

/* y = x w^T, or with TB (w has the depth across its lines) dx = dy w.  t as in grouped.cu. */
template <class T, bool TB>
static __global__ void __launch_bounds__(256, 2)
    grouped_rows_tensor_kernel(const T *a, const T *w, T *c, const int32_t *offsets, int64_t groups,
                               tiling t)
{
    LM_DYNAMIC_SHARED(T, shared);

    for (int64_t i = blockIdx.x; i < t.tiles_m * t.tiles_n; i += gridDim.x) {
        int64_t strip, col;
        tile_at(t, i, &strip, &col);
        col *= side;
        group_rows r = rows_of_strip<side>(offsets, groups, t.m, strip);
        if (r.row >= r.end) /* the whole block */
            continue;
        int rows = inside(r.end - r.row), cols = inside(t.n - col);
        T *to = c + r.row * t.ldc + col;
        warp_sums sum = {};
        if (r.g < groups)
            sum_stages<T, false, TB>(
                &sum, shared, reader_of<T, false>(a, r.row * t.lda, t.lda, rows, (int)t.k),
                reader_of<T, TB>(w, r.g * t.stride_b + (TB ? col : col * t.ldb), t.ldb, cols,
                                 (int)t.k));
        store_rounded<T>(to, t.ldc, sum, shared, rows, cols);
    }
}

/* dw [m,n] of each group (+)= dy^T x over its rows. */
template <class T>
static __global__ void __launch_bounds__(256, 2)
    grouped_weights_tensor_kernel(const T *dy, const T *x, float *dw, const int32_t *offsets,
                                  int64_t groups, tiling t)
{
    LM_DYNAMIC_SHARED(T, shared);
    int64_t each = t.tiles_m * t.tiles_n;

    for (int64_t i = blockIdx.x; i < each * groups; i += gridDim.x) {
        int64_t g = i / each, row, col;
        tile_at(t, i % each, &row, &col);
        row *= side, col *= side;
        int rows = inside(t.m - row), cols = inside(t.n - col);
        int begin = offsets[g], left = offsets[g + 1] - begin;
        float *to = dw + g * t.stride_c + row * t.ldc + col;
        bool add = t.accumulate;
        if (add && !left)
            continue;
        const T *a = dy + begin * t.lda + row, *b = x + begin * t.ldb + col;
        /* Long sums are folded into dw every so often (gemm_plain.cu); an empty group's is 0. */
        do {
            int depth = left < flush ? left : (int)flush;
            warp_sums sum = {};
            sum_stages<T, true, true>(&sum, shared, reader_of<T, true>(a, 0, t.lda, rows, depth),
                                      reader_of<T, true>(b, 0, t.ldb, cols, depth));
            store_wide(to, t.ldc, sum, rows, cols, add);
            add = true;
            a += flush * t.lda, b += flush * t.ldb;
            left -= (int)flush;
        } while (left > 0);
    }
}

/* ---- launches ---- */

/* Whether rows of both widths, and so all of w[g], lie at multiples of 16 bytes. */
template <class T> static bool serves(const lm_call *c, const tiling &t)
{
    return t.lda % wide<T>::n == 0 && t.ldb % wide<T>::n == 0 && t.ldc % wide<T>::n == 0 &&
           packs<T>(wide<T>::n, 0, c->in[0].data, c->in[1].data, c->out[0].data);
}

template <class T, bool TB> static void launch_rows(const lm_call *c, const tiling &t)
{
    const int bytes = shared_part<false, TB>::bytes;

    LM_ALLOW_SHARED((grouped_rows_tensor_kernel<T, TB>), bytes);
    LM_LAUNCH((grouped_rows_tensor_kernel<T, TB>), tile_blocks(t.tiles_m * t.tiles_n),
              block_threads, bytes, c->stream, in_ptr<T>(c, 0), in_ptr<T>(c, 1), out_ptr<T>(c, 0),
              in_ptr<int32_t>(c, 2), groups_of(c), t);
}

template <class T> bool grouped_rows_tensor(const lm_call *c, bool dx)
{
    tiling t = rows_tiling<T, side>(c, dx);

    if (!serves<T>(c, t))
        return false;
    if (dx)
        launch_rows<T, true>(c, t);
    else
        launch_rows<T, false>(c, t);
    return true;
}

template <class T> bool grouped_weights_tensor(const lm_call *c)
{
    const int bytes = shared_part<true, true>::bytes;
    tiling t = weights_tiling<T, side>(c);
    int64_t groups = groups_of(c);

    if (!serves<T>(c, t))
        return false;
    LM_ALLOW_SHARED((grouped_weights_tensor_kernel<T>), bytes);
    LM_LAUNCH((grouped_weights_tensor_kernel<T>), tile_blocks(t.tiles_m * t.tiles_n * groups),
              block_threads, bytes, c->stream, in_ptr<T>(c, 0), in_ptr<T>(c, 1),
              out_ptr<float>(c, 0), in_ptr<int32_t>(c, 2), groups, t);
    return true;
}

template bool grouped_rows_tensor<bf16>(const lm_call *c, bool dx);
template bool grouped_rows_tensor<f16>(const lm_call *c, bool dx);
template bool grouped_weights_tensor<bf16>(const lm_call *c);
template bool grouped_weights_tensor<f16>(const lm_call *c);
