/* SPDX-License-Identifier: Apache-2.0 */
/* kv_attention_tensor.cu -- prompts over coded caches by tensor cores (kernels/kv.h): tiles of keys and values are decoded into
 * shared memory as numbers of the activations' type, and multiplied as attention's forward multiplies plain ones.
 * Tiles begin at multiples of their length, so that bits do not depend on where a prompt is cut into calls. */
#include "kernels/cuda/attention_forward.cuh"
#include "kernels/cuda/kv_attention.cuh"

template <class T, int D> struct kv_prompt_tile {
    static const int warps = THREADS / 32, rows = 16 * warps, keys = D > 128 ? 32 : 64;
    static const int ld = tile_pitch<T, D>::n, N = keys / 8;
    static const int bytes = (rows + 2 * keys) * ld * (int)sizeof(T);
};

/* Bytes of shared memory before the tables. */
template <class T, int D> struct kv_prompt_bytes {
    static const int n = block_bytes<kv_prompt_tile<T, D>, T, true>();
};

/* Shared memory of a block; box: of the warp. */
template <class T> struct kv_prompt_memory {
    T *q, *side[2];
    uint32_t *box;
    float *table[2];
};

template <class T, int D>
static __device__ inline kv_prompt_memory<T> memory_of(const kv_attending &a, T *shared)
{
    typedef kv_prompt_tile<T, D> tile;
    kv_prompt_memory<T> m;
    m.q = shared;
    m.side[0] = m.q + tile::rows * tile::ld;
    m.side[1] = m.side[0] + tile::keys * tile::ld;
    m.box = reinterpret_cast<uint32_t *>(m.side[1] + tile::keys * tile::ld) +
            threadIdx.x / 32 * warp_box<T>::n;
    m.table[0] =
        reinterpret_cast<float *>(reinterpret_cast<char *>(shared) + kv_prompt_bytes<T, D>::n);
    m.table[1] = m.table[0] + a.tables[0];
    return m;
}

/* Keys or values of tokens from j0 on; zeros behind the last one: weights of zero multiply them. */
template <class T, int D>
static __device__ inline void load_side(const kv_attending &a, const kv_side &f,
                                        const kv_reading<T> &x, int j0, T *to)
{
    typedef kv_prompt_tile<T, D> tile;
    const int there = x.plain.end - j0;
    kv_load_tile<T, T, THREADS>(a.r, f, x, j0, tile::keys, to, tile::ld, a.packed);
#pragma unroll 1
    for (int i = (there > 0 ? there : 0) * D + (int)threadIdx.x; i < tile::keys * D; i += THREADS)
        to[i / D * tile::ld + i % D] = T{};
}

/* Zeros beyond the head, in keys and values: tiles leave these columns as they are. */
template <class T, int D>
static __device__ inline void clear_columns(const kv_attending &a, const kv_prompt_memory<T> &m)
{
    typedef kv_prompt_tile<T, D> tile;
    const int from = (a.r.dim + 3) / 4 * 4, n = D - from;
#pragma unroll 1
    for (int i = (int)threadIdx.x; i < 2 * tile::keys * n; i += THREADS)
        m.side[0][i / n * tile::ld + from + i % n] = T{};
}

static __device__ inline void begin_rows(const kv_attending &a, const kv_queries &x,
                                         softmax_rows &y)
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int at = (int)threadIdx.x / 32 * 16 + (int)threadIdx.x % 32 / 4 + 8 * r;
        span seen = { 0, 0 };
        if (at < x.n)
            seen = keys_of(a.r, x.b, x.i0 + at);
        y.first[r] = (int)seen.start;
        y.end[r] = (int)seen.end;
        y.top[r] = -INFINITY;
        y.sum[r] = 0;
    }
}

/* The x.n rows of queries of head x.h. */
template <class T, int D>
static __device__ inline void prompt_rows(const kv_attending &a, const attn_shape &s,
                                          const kv_queries &x, const T *qkv, T *o, T *shared)
{
    typedef kv_prompt_tile<T, D> tile;
    const kv_rows &r = a.r;
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    const int64_t kv = x.h / r.group, width = r.heads * r.dim;
    const kv_prompt_memory<T> m = memory_of<T, D>(a, shared);
    for (int side = 0; side < 2; side++)
        kv_fill_tables(a.side[side], kv, m.table[side]);
    load_tile<T, D, tile::rows, THREADS, true>(m.q, qkv + x.row * qkv_pitch(r) + x.h * r.dim,
                                               qkv_pitch(r), x.n, r.dim, s);
    clear_columns<T, D>(a, m);
    const kv_reading<T> keys = kv_reading_of(r, a.side[0], qkv, x.b, kv, 0, m.table[0]);
    const kv_reading<T> values = kv_reading_of(r, a.side[1], qkv, x.b, kv, 1, m.table[1]);
    const span top = keys_of(r, x.b, x.i0), bottom = keys_of(r, x.b, x.i0 + x.n - 1);
    softmax_rows y;
    mma_c score[tile::N], sum[D / 8];
    begin_rows(a, x, y);
#pragma unroll
    for (int d = 0; d < D / 8; d++)
        sum[d] = mma_c{};
    copies_done<true>();
#pragma unroll 1
    for (int j0 = (int)top.start / tile::keys * tile::keys; j0 < (int)bottom.end;
         j0 += tile::keys) {
        __syncthreads(); /* no warp reads the tile before any longer */
        load_side<T, D>(a, a.side[0], keys, j0, m.side[0]);
        load_side<T, D>(a, a.side[1], values, j0, m.side[1]);
        __syncthreads();
        if (a.rope) {
            rotate_keys(a, x.b, j0, tile::keys, m.side[0], tile::ld);
            __syncthreads();
        }
        product_rows<T, D, tile::N, true>(score, m.q + warp * 16 * tile::ld, m.side[0], m.box);
        add_biases<tile::N>(s, score, x.h, j0 - r.used[x.b] - x.i0 - warp * 16, 1);
        cap_scores<tile::N>(s, score);
        const bool full = j0 >= bottom.start && j0 + tile::keys <= top.end;
        softmax_tile<tile::N, D / 8>(y, score, sum, j0, full, ~0u, s.scale_log2);
        product_cols<T, D, tile::N, true>(sum, score, m.side[1], m.box);
    }
    float by[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float all = quad_sum(y.sum[i]);
        const int at = warp * 16 + lane / 4 + 8 * i;
        by[i] = add_sink2(r.sinks, x.h, y.top[i], all) / all;
        if (r.lse && lane % 4 == 0 && at < x.n)
            r.lse[(x.row + at) * r.heads + x.h] = y.top[i] * 0.69314718f + logf(all);
    }
    store_rows<T, D>(o + (x.row + warp * 16) * width + x.h * r.dim, width, x.n - warp * 16, sum, by,
                     m.q + warp * 16 * tile::ld, r.dim, s);
}

template <class T, int D>
static __global__ void __launch_bounds__(THREADS)
    kv_prompt_kernel(const __grid_constant__ kv_attending a, attn_shape s, const T *qkv, T *o)
{
    LM_DYNAMIC_SHARED(T, shared);
    const kv_rows &r = a.r;
    const int64_t tiles = tiles_of_rows(r, kv_prompt_tile<T, D>::rows);
#pragma unroll 1
    for (int64_t job = blockIdx.x; job < tiles * r.heads; job += gridDim.x) {
        const int64_t h = job % r.heads;
        tile_walk w = walk_tile(r, tiles - 1 - job / r.heads, kv_prompt_tile<T, D>::rows);
#pragma unroll 1
        while (next_piece(r, w)) {
            const kv_queries x = { w.b, h, first_of<true>(r, w.b) + w.i0, (int)w.i0, w.rows, 1 };
            __syncthreads(); /* the previous piece no longer needs the shared memory */
            if (x.n)
                prompt_rows<T, D>(a, s, x, qkv, o, shared);
            for (int t = x.n * r.dim + (int)threadIdx.x; t < w.all * r.dim; t += THREADS) {
                const int64_t at = (x.row + t / r.dim) * r.heads + h;
                o[at * r.dim + t % r.dim] = T{};
                if (r.lse && t % r.dim == 0)
                    r.lse[at] = -INFINITY;
            }
        }
    }
}

template <class T, int D> static void launch(const lm_call *call, const kv_attending &a)
{
    typedef kv_prompt_tile<T, D> tile;
    const int bytes = kv_prompt_bytes<T, D>::n + (a.tables[0] + a.tables[1]) * (int)sizeof(float);
    static_assert(kv_prompt_bytes<T, D>::n + 4 * (LM_KV_MAX_TABLE + 2 * D) * 2 <= ATTN_MOST_SHARED,
                  "every GPU has as much");
    attn_shape s = attn_shape_of(call, call->n_in, BIAS);
    s.packed = packs<T>(wide<T>::n, a.r.dim, call->in[QKV].data, call->out[0].data);
    LM_ALLOW_SHARED((kv_prompt_kernel<T, D>), (int)call->stream->shared_max);
    LM_LAUNCH((kv_prompt_kernel<T, D>), attn_grid(a.r.heads * tiles_of_rows(a.r, tile::rows)),
              THREADS, bytes, call->stream, a, s, in_ptr<const T>(call, QKV), out_ptr<T>(call, 0));
}

template <class T> bool kv_tensor_prompts(const lm_call *call, const kv_attending &a)
{
    if (a.r.dim > 256 || a.r.latent)
        return false;
    if (a.r.dim <= 64)
        launch<T, 64>(call, a);
    else
        a.r.dim <= 128 ? launch<T, 128>(call, a) : launch<T, 256>(call, a);
    return true;
}

template bool kv_tensor_prompts<bf16>(const lm_call *call, const kv_attending &a);
template bool kv_tensor_prompts<f16>(const lm_call *call, const kv_attending &a);
