/* SPDX-License-Identifier: Apache-2.0 */
/* attention_forward.cuh -- attention, forward (kernels/attention.h): FlashAttention-2 (arXiv:2307.08691, algorithm 1),
 * a block for a tile of queries of one head, over the tiles of keys that any of them sees. */
#ifndef LM_KERNELS_CUDA_ATTENTION_FORWARD_CUH
#define LM_KERNELS_CUDA_ATTENTION_FORWARD_CUH

#include "kernels/cuda/attention_tile.cuh"

/* Sizes such that a block has at most 99 KiB of shared memory and its threads enough registers. */
template <class T, int D> struct forward_tile {
    static const bool wide = sizeof(T) == 4;
    static const int warps = wide && D > 128 ? 2 : 4, threads = 32 * warps;
    static const int rows = 16 * warps, keys = wide ? (D > 128 ? 16 : 32) : (D > 128 ? 32 : 64);
    static const int ld = tile_pitch<T, D>::n;
    static const int bytes = (rows + 2 * keys) * ld * (int)sizeof(T) + rows * 4;
};

/* The keys visible to a tile of queries: to some of them [lo, hi), to all of them [full_lo,
 * full_hi). */
struct key_span {
    int lo, hi, full_lo, full_hi;
};

/* The first visible keys of the first `rows` queries from i0 of sequence b, in start; all threads read them. */
__device__ inline key_span span_of(const attn_shape &s, const int *start, int64_t b, int i0,
                                   int rows)
{
    key_span x = { start[0], end_key(s, b, i0 + rows - 1), start[0], end_key(s, b, i0) };
    for (int r = 1; r < rows; r++) {
        x.lo = start[r] < x.lo ? start[r] : x.lo;
        x.full_lo = start[r] > x.full_lo ? start[r] : x.full_lo;
    }
    for (int r = 0; s.hi && r < rows; r++) {
        int end = end_key(s, b, i0 + r);
        x.hi = end > x.hi ? end : x.hi;
        x.full_hi = end < x.full_hi ? end : x.full_hi;
    }
    return x;
}

/* A lane's two rows: running maximum and its share of the sum. */
struct softmax_rows {
    float top[2], sum[2];
    int first[2], end[2];
};

/* Scores c become probabilities relative to the running maximum; the sums o before are rescaled. */
template <int N, int D8>
__device__ inline void softmax_tile(softmax_rows &x, mma_c *c, mma_c *o, int j0, bool full,
                                    unsigned kept, float scale)
{
    j0 += (int)(threadIdx.x % 4) * 2;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float top = -INFINITY;
#pragma unroll
        for (int n = 0; n < N; n++) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
                int j = j0 + 8 * n + e;
                float &v = c[n].r[2 * r + e];
                v = full || (j >= x.first[r] && j < x.end[r]) ? v * scale : -INFINITY;
                top = fmaxf(top, v);
            }
        }
        top = fmaxf(x.top[r], quad_max(top));
        float shift = top == -INFINITY ? 0.0f : top, fade = exp2f(x.top[r] - shift), sum = 0;
#pragma unroll
        for (int n = 0; n < N; n++) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float &v = c[n].r[2 * r + e];
                v = exp2f(v - shift);
                sum += v;
                v = kept >> (4 * n + 2 * r + e) & 1 ? v : 0.0f;
            }
        }
        x.top[r] = top;
        x.sum[r] = x.sum[r] * fade + sum;
#pragma unroll
        for (int d = 0; d < D8; d++)
#pragma unroll
            for (int e = 0; e < 2; e++)
                o[d].r[2 * r + e] *= fade;
    }
}

/* The tile of queries from i0 of head h of sequence b. */
template <class T, int D, bool TENSOR>
__device__ inline void forward_rows(const attn_shape &s, int64_t b, int64_t h, int i0, const T *qkv,
                                    T *o, float *lse, const float *sinks, T *q)
{
    typedef forward_tile<T, D> tile;
    const int N = tile::keys / 8, ld = tile::ld;
    T *k = q + tile::rows * ld, *v = k + tile::keys * ld;
    int *start = reinterpret_cast<int *>(v + tile::keys * ld);
    int warp = (int)(threadIdx.x / 32), lane = (int)(threadIdx.x % 32), seq = (int)s.seq;
    uint32_t *box = reinterpret_cast<uint32_t *>(start + tile::rows) + warp * warp_box<T>::n;
    int rows = seq - i0 < tile::rows ? seq - i0 : tile::rows;
    int64_t pitch = qkv_pitch(s), kv = h / (s.heads / s.kv_heads);
    const T *base = qkv + b * s.seq * pitch, *keys = base + (s.heads + kv) * s.dim;
    const T *values = base + (s.heads + s.kv_heads) * s.dim + kv * s.vdim;

    for (int r = (int)threadIdx.x; r < rows; r += tile::threads)
        start[r] = first_key(s, b, i0 + r);
    load_tile<T, D, tile::rows, tile::threads, TENSOR>(q, base + i0 * pitch + h * s.dim, pitch,
                                                       rows, s.dim, s);
    __syncthreads();
    key_span span = span_of(s, start, b, i0, rows);
    softmax_rows x;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int at = warp * 16 + lane / 4 + 8 * r;
        x.first[r] = at < rows ? start[at] : 0;
        x.end[r] = at < rows ? end_key(s, b, i0 + at) : 0;
        x.top[r] = -INFINITY;
        x.sum[r] = 0;
    }
    attn_draws draws = draws_of(s, b * s.heads + h);
    mma_c c[N], sum[D / 8];
#pragma unroll
    for (int d = 0; d < D / 8; d++)
        sum[d] = mma_c{};

    const query_tile mine = tile_of(s, b, h, i0, rows);
    int j0 = next_tile(s.blocks, mine, span.lo / tile::keys * tile::keys, span.hi, tile::keys), j1;
    if (j0 < span.hi)
        load_tile<T, D, tile::keys, tile::threads, TENSOR>(k, keys + j0 * pitch, pitch, seq - j0,
                                                           s.dim, s);
    for (; j0 < span.hi; j0 = j1) {
        copies_done<TENSOR>();
        __syncthreads(); /* k has arrived, and no warp reads v any longer */
        load_tile<T, D, tile::keys, tile::threads, TENSOR>(v, values + j0 * pitch, pitch, seq - j0,
                                                           s.vdim, s);
        product_rows<T, D, N, TENSOR>(c, q + warp * 16 * ld, k, box);
        add_biases<N>(s, c, h, j0 - i0 - warp * 16, 1);
        cap_scores<N>(s, c);
        if (s.blocks.size) {
            const int at = i0 + warp * 16 + lane / 4;
            const int i[2] = { at - x.first[0], at + 8 - x.first[1] };
            const int j[2] = { j0 - x.first[0], j0 - x.first[1] };
            hide_keys<N>(c, seen_by_rows(s.blocks, (int)h, i, j, N), -INFINITY);
        }
        bool full = j0 >= span.full_lo && j0 + tile::keys <= span.full_hi;
        unsigned kept = kept_queries(s, draws, i0 + warp * 16, j0, N);
        softmax_tile<N, D / 8>(x, c, sum, j0, full, kept, s.scale_log2);
        copies_done<TENSOR>();
        __syncthreads(); /* v has arrived, and no warp reads k any longer */
        j1 = next_tile(s.blocks, mine, j0 + tile::keys, span.hi, tile::keys);
        if (j1 < span.hi)
            load_tile<T, D, tile::keys, tile::threads, TENSOR>(k, keys + j1 * pitch, pitch,
                                                               seq - j1, s.dim, s);
        product_cols<T, D, N, TENSOR>(sum, c, v, box);
    }
    copies_done<TENSOR>(); /* without visible keys, q is still being copied, */
    __syncthreads();       /* and store_rows overwrites its rows */

    float by[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float all = quad_sum(x.sum[r]), fade = add_sink2(sinks, h, x.top[r], all);
        by[r] = all == 0 ? 0.0f : s.keep * row_factor2(s.undivided, fade, x.top[r], all);
        int at = warp * 16 + lane / 4 + 8 * r;
        if (lane % 4 == 0 && at < rows)
            lse[(b * s.heads + h) * s.seq + i0 + at] =
                all == 0 ? -INFINITY : row_lse2(s.undivided, x.top[r], all);
    }
    store_rows<T, D>(o + (b * s.seq + i0 + warp * 16) * o_pitch(s) + h * s.vdim, o_pitch(s),
                     rows - warp * 16, sum, by, q + warp * 16 * ld, s.vdim, s);
}

/* The last queries of each head first: with causal attention they see the most keys. */
template <class T, int D, bool TENSOR>
__global__ void __launch_bounds__((forward_tile<T, D>::threads))
    forward_kernel(attn_shape s, const T *qkv, T *o, float *lse, const float *sinks)
{
    typedef forward_tile<T, D> tile;
    LM_DYNAMIC_SHARED(T, shared);
    int64_t heads = s.batch * s.heads, tiles = (s.seq + tile::rows - 1) / tile::rows;
    for (int64_t job = blockIdx.x; job < tiles * heads; job += gridDim.x) {
        int64_t bh = job % heads, i0 = (tiles - 1 - job / heads) * tile::rows;
        __syncthreads(); /* the previous job no longer needs the shared memory */
        forward_rows<T, D, TENSOR>(s, bh / s.heads, bh % s.heads, (int)i0, qkv, o, lse, sinks,
                                   shared);
    }
}

template <class T, int D, bool TENSOR> static void launch_forward(const lm_call *c, attn_shape s)
{
    typedef forward_tile<T, D> tile;
    const int bytes = block_bytes<tile, T, TENSOR>();
    static_assert(bytes <= ATTN_MOST_SHARED, "every GPU has as much");
    const T *qkv = in_ptr<const T>(c, 0);
    T *o = out_ptr<T>(c, 0);
    int64_t jobs = s.batch * s.heads * ((s.seq + tile::rows - 1) / tile::rows);
    if (jobs == 0)
        return;
    s.packed = packs<T>(wide<T>::n, s.dim, qkv, o) && s.vdim % wide<T>::n == 0;
    LM_ALLOW_SHARED((forward_kernel<T, D, TENSOR>), bytes);
    LM_LAUNCH((forward_kernel<T, D, TENSOR>), attn_grid(jobs), tile::threads, bytes, c->stream, s,
              qkv, o, out_ptr<float>(c, 1), in_ptr<const float>(c, 3));
}

template <class T, bool TENSOR> void attention_forward(const lm_call *c)
{
    attn_shape s = attn_shape_of(c, 1, 4);
#define FORWARD(D) launch_forward<T, D, TENSOR>(c, s)
    LM_ATTN_FOR_DIM(TENSOR, widest(s), FORWARD);
#undef FORWARD
}

#endif
