/* SPDX-License-Identifier: Apache-2.0 */
/* attention_cached_tensor.cu -- prompts over key/value caches by tensor cores: the tiles of
 * attention's forward; the queries come after the keys of the cache. */
#include "kernels/cuda/attention_cached.cuh"
#include "kernels/cuda/attention_forward.cuh"

template <class T, int D> struct cached_tile {
    static const int warps = 4, threads = 32 * warps, rows = 16 * warps;
    static const int keys = D > 128 ? 32 : 64, ld = tile_pitch<T, D>::n;
    static const int resident = D == 128 ? 3 : 1; /* blocks on a multiprocessor, at least */
    static const int bytes = (rows + 2 * keys) * ld * (int)sizeof(T);
};

/* The rows from i0 of head h of sequence b; the first `rows` are no padding. */
template <class T, int D>
static __device__ inline void tile_rows(const cached &c, const attn_shape &s, int64_t b, int64_t h,
                                        int64_t i0, int rows, const T *qkv, T *o, const T *keys,
                                        const T *values, T *q)
{
    typedef cached_tile<T, D> tile;
    const int N = tile::keys / 8, ld = tile::ld;
    T *k = q + tile::rows * ld, *v = k + tile::keys * ld;
    uint32_t *box = reinterpret_cast<uint32_t *>(v + tile::keys * ld);
    const int warp = (int)(threadIdx.x / 32), lane = (int)(threadIdx.x % 32);
    const int there = c.used[b] + c.fresh[b];
    box += warp * warp_box<T>::n;
    load_tile<T, D, tile::rows, tile::threads, true>(
        q, qkv + (b * c.seq + i0) * qkv_pitch(c) + h * c.dim, qkv_pitch(c), rows, s);
    softmax_rows x;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int at = warp * 16 + lane / 4 + 8 * r;
        span seen = keys_of(c, b, at < rows ? i0 + at : c.seq);
        x.first[r] = (int)seen.start;
        x.end[r] = (int)seen.end;
        x.top[r] = -INFINITY;
        x.sum[r] = 0;
    }
    span top = keys_of(c, b, i0), bottom = keys_of(c, b, i0 + rows - 1);
    mma_c score[N], sum[D / 8];
#pragma unroll
    for (int d = 0; d < D / 8; d++)
        sum[d] = mma_c{};

    int j0 = (int)top.start / tile::keys * tile::keys;
    load_tile<T, D, tile::keys, tile::threads, true>(k, keys + (int64_t)j0 * c.dim, c.dim,
                                                     there - j0, s);
#pragma unroll 1
    for (; j0 < (int)bottom.end; j0 += tile::keys) {
        copies_done<true>();
        __syncthreads(); /* k has arrived, and no warp reads v any longer */
        load_tile<T, D, tile::keys, tile::threads, true>(v, values + (int64_t)j0 * c.dim, c.dim,
                                                         there - j0, s);
        product_rows<T, D, N, true>(score, q + warp * 16 * ld, k, box);
        cap_scores<N>(s, score);
        bool full = j0 >= bottom.start && j0 + tile::keys <= top.end;
        softmax_tile<N, D / 8>(x, score, sum, j0, full, ~0u, s.scale_log2);
        copies_done<true>();
        __syncthreads(); /* v has arrived, and no warp reads k any longer */
        int j1 = j0 + tile::keys;
        if (j1 < (int)bottom.end)
            load_tile<T, D, tile::keys, tile::threads, true>(k, keys + (int64_t)j1 * c.dim, c.dim,
                                                             there - j1, s);
        product_cols<T, D, N, true>(sum, score, v, box);
    }
    float by[2];
#pragma unroll
    for (int r = 0; r < 2; r++)
        by[r] = 1 / quad_sum(x.sum[r]);
    store_rows<T, D>(o + ((b * c.seq + i0 + warp * 16) * c.heads + h) * c.dim, c.heads * c.dim,
                     rows - warp * 16, sum, by, q + warp * 16 * ld, s);
}

template <class T, int D>
static __global__ void __launch_bounds__((cached_tile<T, D>::threads),
                                         (cached_tile<T, D>::resident))
    tensor_kernel(cached c, attn_shape s, const T *qkv, T *o, const T *keys, const T *values)
{
    typedef cached_tile<T, D> tile;
    LM_DYNAMIC_SHARED(T, shared);
    const int64_t heads = c.batch * c.heads, tiles = (c.seq + tile::rows - 1) / tile::rows;
#pragma unroll 1
    for (int64_t job = blockIdx.x; job < tiles * heads; job += gridDim.x) {
        int64_t b = job % heads / c.heads, h = job % heads % c.heads;
        int64_t i0 = (tiles - 1 - job / heads) * tile::rows, left = c.fresh[b] - i0;
        int64_t all = c.seq - i0 < tile::rows ? c.seq - i0 : tile::rows;
        int rows = (int)(left < 0 ? 0 : left < all ? left : all);
        int64_t first = (b * c.kv_heads + h / c.group) * c.room * c.dim;
        __syncthreads(); /* the previous job no longer needs the shared memory */
        if (rows)
            tile_rows<T, D>(c, s, b, h, i0, rows, qkv, o, keys + first, values + first, shared);
        for (int64_t t = rows * c.dim + (int)threadIdx.x; t < all * c.dim; t += tile::threads)
            o[((b * c.seq + i0 + t / c.dim) * c.heads + h) * c.dim + t % c.dim] = T{};
    }
}

template <class T, int D> static void launch(const lm_call *call, const cached &c, attn_shape s)
{
    typedef cached_tile<T, D> tile;
    int64_t jobs = c.batch * c.heads * ((c.seq + tile::rows - 1) / tile::rows);
    const int bytes = block_bytes<tile, T, true>();
    static_assert(bytes <= ATTN_MOST_SHARED, "every GPU has as much");
    LM_ALLOW_SHARED((tensor_kernel<T, D>), bytes);
    LM_LAUNCH((tensor_kernel<T, D>), attn_grid(jobs), tile::threads, bytes, call->stream, c, s,
              in_ptr<const T>(call, 0), out_ptr<T>(call, 0), out_ptr<const T>(call, 1),
              out_ptr<const T>(call, 2));
}

template <class T> void tensor_tiles(const lm_call *call, const cached &c, bool packed)
{
    attn_shape s = attn_shape_of(call, call->n_in);
    s.packed = packed;
#define LAUNCH(D) launch<T, D>(call, c, s)
    LM_ATTN_FOR_DIM(true, c.dim, LAUNCH);
#undef LAUNCH
}

template void tensor_tiles<bf16>(const lm_call *call, const cached &c, bool packed);
template void tensor_tiles<f16>(const lm_call *call, const cached &c, bool packed);
