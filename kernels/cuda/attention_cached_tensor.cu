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

/* load_tile of `rows` keys or values of pages, from position j0 of a sequence on. */
template <class T, int D, int SIDE>
static __device__ inline void load_pages(T *to, const cached &c, const attn_shape &s,
                                         const T *cache, int64_t b, int64_t kv, int j0, int rows)
{
    typedef cached_tile<T, D> tile;
    const int n = s.packed ? wide<T>::n : 1, across = D / n;
    for (int p = (int)threadIdx.x; p < tile::keys * across; p += tile::threads) {
        int r = p / across, d = p % across * n;
        bool there = r < rows && d < (SIDE == OF_KEYS ? c.dim : c.vdim);
        const T *from = there ? cache + cache_at<true, SIDE>(c, b, kv, j0 + r) + d : cache;
        T *at = to + r * tile::ld + d;
        if (s.packed)
            copy_pack<true>(reinterpret_cast<pack<T, wide<T>::n> *>(at),
                            reinterpret_cast<const pack<T, wide<T>::n> *>(from), there);
        else
            *at = there ? *from : T{};
    }
}

/* keys, values: SERVED: the caches, else their position 0 of this sequence and head. */
template <class T, int D, bool SERVED, int SIDE>
static __device__ inline void load_keys(T *to, const cached &c, const attn_shape &s, const T *cache,
                                        int64_t b, int64_t kv, int j0, int rows)
{
    typedef cached_tile<T, D> tile;
    if constexpr (SERVED)
        load_pages<T, D, SIDE>(to, c, s, cache, b, kv, j0, rows);
    else
        load_tile<T, D, tile::keys, tile::threads, true>(to, cache + (int64_t)j0 * line_of<SIDE>(c),
                                                         line_of<SIDE>(c), rows,
                                                         SIDE == OF_KEYS ? c.dim : c.vdim, s);
}

/* The rows from i0 of head h of sequence b; the first `rows` are no padding. */
template <class T, int D, bool SERVED>
static __device__ inline void tile_rows(const cached &c, const attn_shape &s, int64_t b, int64_t h,
                                        int64_t i0, int rows, const T *qkv, T *o, const T *keys,
                                        const T *values, T *q)
{
    const int64_t row0 = first_of<SERVED>(c, b) + i0, kv = h / c.group;
    typedef cached_tile<T, D> tile;
    const int N = tile::keys / 8, ld = tile::ld;
    T *k = q + tile::rows * ld, *v = k + tile::keys * ld;
    uint32_t *box = reinterpret_cast<uint32_t *>(v + tile::keys * ld);
    const int warp = (int)(threadIdx.x / 32), lane = (int)(threadIdx.x % 32);
    const int there = (int)held_of(c, b);
    box += warp * warp_box<T>::n;
    load_tile<T, D, tile::rows, tile::threads, true>(q, qkv + row0 * qkv_pitch(c) + h * c.dim,
                                                     qkv_pitch(c), rows, c.dim, s);
    softmax_rows x;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int at = warp * 16 + lane / 4 + 8 * r;
        span seen = keys_of(c, b, at < rows ? i0 + at : SERVED ? c.fresh[b] : c.seq);
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

    const int at0 = c.used[b] + (int)i0;
    const query_tile mine = { (int)h, at0, at0 + rows, 0, true };
    int j1, j0 = next_tile(s.blocks, mine, (int)top.start / tile::keys * tile::keys,
                           (int)bottom.end, tile::keys);
    load_keys<T, D, SERVED, OF_KEYS>(k, c, s, keys, b, kv, j0, there - j0);
#pragma unroll 1
    for (; j0 < (int)bottom.end; j0 = j1) {
        copies_done<true>();
        __syncthreads(); /* k has arrived, and no warp reads v any longer */
        load_keys<T, D, SERVED, OF_VALUES>(v, c, s, values, b, kv, j0, there - j0);
        product_rows<T, D, N, true>(score, q + warp * 16 * ld, k, box);
        add_biases<N>(s, score, h, j0 - c.used[b] - (int)i0 - warp * 16, 1);
        cap_scores<N>(s, score);
        if (s.blocks.size) {
            const int i[2] = { at0 + warp * 16 + lane / 4, at0 + warp * 16 + lane / 4 + 8 };
            const int j[2] = { j0, j0 };
            hide_keys<N>(score, seen_by_rows(s.blocks, (int)h, i, j, N), -INFINITY);
        }
        bool full = j0 >= bottom.start && j0 + tile::keys <= top.end;
        softmax_tile<N, D / 8>(x, score, sum, j0, full, ~0u, s.scale_log2);
        copies_done<true>();
        __syncthreads(); /* v has arrived, and no warp reads k any longer */
        j1 = next_tile(s.blocks, mine, j0 + tile::keys, (int)bottom.end, tile::keys);
        if (j1 < (int)bottom.end)
            load_keys<T, D, SERVED, OF_KEYS>(k, c, s, keys, b, kv, j1, there - j1);
        product_cols<T, D, N, true>(sum, score, v, box);
    }
    float by[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float all = quad_sum(x.sum[r]);
        const int at = warp * 16 + lane / 4 + 8 * r;
        const float fade = add_sink2(c.sinks, h, x.top[r], all);
        by[r] = row_factor2(c.undivided, fade, x.top[r], all);
        if (SERVED && c.lse && lane % 4 == 0 && at < rows)
            c.lse[(row0 + at) * c.heads + h] = row_lse2(c.undivided, x.top[r], all);
    }
    store_rows<T, D>(o + ((row0 + warp * 16) * c.heads + h) * c.vdim, c.heads * c.vdim,
                     rows - warp * 16, sum, by, q + warp * 16 * ld, c.vdim, s);
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
        int64_t first = (b * c.kv_heads + h / c.group) * c.room;
        __syncthreads(); /* the previous job no longer needs the shared memory */
        if (rows)
            tile_rows<T, D, false>(c, s, b, h, i0, rows, qkv, o, keys + first * c.dim,
                                   values + first * c.vline, shared);
        for (int64_t t = rows * c.vdim + (int)threadIdx.x; t < all * c.vdim; t += tile::threads)
            o[((b * c.seq + i0 + t / c.vdim) * c.heads + h) * c.vdim + t % c.vdim] = T{};
    }
}

/* Pages, and ragged rows. */
template <class T, int D>
static __global__ void __launch_bounds__((cached_tile<T, D>::threads),
                                         (cached_tile<T, D>::resident))
    served_kernel(cached c, attn_shape s, const T *qkv, T *o, const T *keys, const T *values)
{
    typedef cached_tile<T, D> tile;
    LM_DYNAMIC_SHARED(T, shared);
    const int64_t tiles = tiles_of_rows(c, tile::rows);
#pragma unroll 1
    for (int64_t job = blockIdx.x; job < tiles * c.heads; job += gridDim.x) {
        const int64_t h = job % c.heads;
        tile_walk w = walk_tile(c, tiles - 1 - job / c.heads, tile::rows);
#pragma unroll 1
        while (next_piece(c, w)) {
            const int64_t row = first_of<true>(c, w.b) + w.i0;
            __syncthreads(); /* the previous piece no longer needs the shared memory */
            if (w.rows)
                tile_rows<T, D, true>(c, s, w.b, h, w.i0, w.rows, qkv, o, keys, values, shared);
            for (int t = w.rows * c.vdim + (int)threadIdx.x; t < w.all * c.vdim;
                 t += tile::threads) {
                o[((row + t / c.vdim) * c.heads + h) * c.vdim + t % c.vdim] = T{};
                if (c.lse && t % c.vdim == 0)
                    c.lse[(row + t / c.vdim) * c.heads + h] = -INFINITY;
            }
        }
    }
}

template <class T, int D> static void launch(const lm_call *call, const cached &c, attn_shape s)
{
    typedef cached_tile<T, D> tile;
    int64_t jobs = c.heads * tiles_of_rows(c, tile::rows);
    const int bytes = block_bytes<tile, T, true>();
    static_assert(bytes <= ATTN_MOST_SHARED, "every GPU has as much");
    const T *qkv = in_ptr<const T>(call, 0), *keys = out_ptr<const T>(call, 1),
            *values = cached_values<const T>(call);
    if (is_served(call)) {
        LM_ALLOW_SHARED((served_kernel<T, D>), bytes);
        LM_LAUNCH((served_kernel<T, D>), attn_grid(jobs), tile::threads, bytes, call->stream, c, s,
                  qkv, out_ptr<T>(call, 0), keys, values);
        return;
    }
    LM_ALLOW_SHARED((tensor_kernel<T, D>), bytes);
    LM_LAUNCH((tensor_kernel<T, D>), attn_grid(jobs), tile::threads, bytes, call->stream, c, s, qkv,
              out_ptr<T>(call, 0), keys, values);
}

template <class T> void tensor_tiles(const lm_call *call, const cached &c, bool packed)
{
    attn_shape s = attn_shape_of(call, call->n_in, CACHED_BIAS);
    s.packed = packed;
#define LAUNCH(D) launch<T, D>(call, c, s)
    LM_ATTN_FOR_DIM(true, widest(c), LAUNCH);
#undef LAUNCH
}

template void tensor_tiles<bf16>(const lm_call *call, const cached &c, bool packed);
template void tensor_tiles<f16>(const lm_call *call, const cached &c, bool packed);
