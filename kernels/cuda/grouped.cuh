/* SPDX-License-Identifier: Apache-2.0 */
/* grouped.cuh -- used by the grouped products, plain (grouped.cu) and by tensor cores (grouped_tensor.cu): how a block
 * finds its rows.
 *
 * The grid has strips of SIDE rows.  Those of group g begin with strip offsets[g] / SIDE + g, which is past the last
 * strip of the groups before it; rows of no group are a group G whose results are 0.  So a block finds its group by a
 * search in the offsets alone, without a list of tiles, and at most G + 2 strips are empty: the host reads no offset,
 * and a recording holds for all of them. */
#ifndef LM_KERNELS_CUDA_GROUPED_CUH
#define LM_KERNELS_CUDA_GROUPED_CUH

#include "kernels/cuda/gemm_tile.cuh"

extern "C" {
#include "kernels/grouped.h"
}

/* Rows [row, end) of group g; g is the number of groups for rows of none.  Empty: row >= end. */
struct group_rows {
    int64_t g, row, end;
};

template <int SIDE> __device__ inline int64_t first_strip(const int32_t *offsets, int64_t g)
{
    return offsets[g] / SIDE + g;
}

/* What is left of the strip's group from the strip on.  All lanes of a warp call it: each round of the search reads 32
 * offsets at once. */
template <int SIDE>
__device__ inline group_rows rows_of_strip(const int32_t *offsets, int64_t groups, int64_t rows,
                                           int64_t strip)
{
    const int lane = (int)threadIdx.x % 32;
    int64_t low = 0, high = groups + 1; /* the last group that begins by then is in [low, high) */
    group_rows r;

    while (high - low > 1) {
        int64_t step = (high - low + 31) / 32, mine = low + lane * step;
        bool begins = mine < high && first_strip<SIDE>(offsets, mine) <= strip;
        low += (__popc(__ballot_sync(0xffffffffu, begins)) - 1) * step;
        high = low + step < high ? low + step : high;
    }
    r.g = low;
    r.row = offsets[low] + (strip - first_strip<SIDE>(offsets, low)) * SIDE;
    r.end = low < groups ? offsets[low + 1] : rows;
    return r;
}

/* y = x w^T, or with dx: dx = dy w.  Tiles of SIDE rows; the columns' are SIDE, too. */
template <class T, int SIDE> inline tiling rows_tiling(const lm_call *c, bool dx)
{
    tiling t = {};

    t.m = c->in[0].dim[0], t.n = c->out[0].dim[1], t.k = c->in[0].dim[1];
    t.lda = t.k, t.ldb = dx ? t.n : t.k, t.ldc = t.n;
    t.stride_b = t.n * t.k;
    t.tiles_m = t.m / SIDE + c->in[2].dim[0];
    t.tiles_n = ceil_div(t.n, SIDE);
    t.pack_a = packs<T>(wide<T>::n, t.lda, c->in[0].data);
    t.pack_b = packs<T>(wide<T>::n, t.ldb, c->in[1].data);
    t.pack_c = packs<T>(4, t.ldc, c->out[0].data);
    return t;
}

/* dw = dy^T x of each group: its rows are the depth of the product, so tiles follow from the output's shape. */
template <class T, int SIDE> inline tiling weights_tiling(const lm_call *c)
{
    tiling t = {};

    t.m = c->in[0].dim[1], t.n = c->in[1].dim[1];
    t.lda = t.m, t.ldb = t.n, t.ldc = t.n;
    t.stride_c = t.m * t.n;
    t.tiles_m = ceil_div(t.m, SIDE);
    t.tiles_n = ceil_div(t.n, SIDE);
    t.pack_a = packs<T>(wide<T>::n, t.lda, c->in[0].data);
    t.pack_b = packs<T>(wide<T>::n, t.ldb, c->in[1].data);
    t.pack_c = packs<float>(4, t.ldc, c->out[0].data);
    t.accumulate = !overwrites(c, ((const lm_grouped_attr *)c->attr)->acc);
    return t;
}

inline int64_t groups_of(const lm_call *c)
{
    return c->in[2].dim[0] - 1;
}

/* One block for each tile, at most as many as a grid may have. */
inline unsigned tile_blocks(int64_t tiles)
{
    return (unsigned)(tiles < INT32_MAX ? tiles : INT32_MAX);
}

/* By tensor cores, for BF16 and F16.  False, without a launch, if some row cannot be moved 16 bytes at a time. */
template <class T> bool grouped_rows_tensor(const lm_call *c, bool dx);
template <class T> bool grouped_weights_tensor(const lm_call *c);

/* y = x w^T of a weight in codes (grouped_codes.cu); tensor: by tensor cores where they serve. */
template <class T> void grouped_codes(const lm_call *c, bool tensor);

#endif
