/* SPDX-License-Identifier: Apache-2.0 */
/* attention_cached.cu -- attention over key/value caches (kernels/attention.h): appending keys and
 * values, prompts, and the choice of kernels.
 *
 * For prompts, tiles of queries loop over tiles of keys with an online softmax; by tensor cores in
 * attention_cached_tensor.cu.  One row a sequence (decoding): attention_step.cu.  Grids depend on
 * shapes only, never on how full the caches are. */
#include "kernels/cuda/attention_cached.cuh"

enum { THREADS = 128, TILE = 16 };

/* ---- appending: new keys and values after those in the cache ---- */

template <class T, int N, bool SERVED>
static __global__ void append(cached c, const T *qkv, T *keys, T *values)
{
    const int64_t pitch = qkv_pitch(c), of_queries = c.heads * c.dim;
    const int64_t key_packs = c.kv_heads * (c.dim / N), packs = (pitch - of_queries) / N;
    const int64_t all = (SERVED ? c.rows : c.batch * c.seq) * packs;
#pragma unroll 1
    for (int64_t t = global_thread(); t < all; t += global_threads()) {
        int64_t row = t / packs, x = t % packs;
        int64_t b = sequence_of<SERVED>(c, row), i = row - first_of<SERVED>(c, b);
        if ((SERVED && b == c.batch) || i >= c.fresh[b])
            continue;
        const bool value = x >= key_packs;
        const int each = (value ? c.vdim : c.dim) / N, y = (int)(value ? x - key_packs : x);
        const int64_t j = c.used[b] + i, head = y / each;
        T *to = value ? values + cache_at<SERVED, OF_VALUES>(c, b, head, j)
                      : keys + cache_at<SERVED, OF_KEYS>(c, b, head, j);
        store<T, N>(to + y % each * N, load<T, N>(qkv + row * pitch + of_queries + x * N));
    }
}

/* Rows of o that are not real become zeros, and their lse -inf: ragged rows. */
template <class T> static __global__ void clear_rows(cached c, T *o)
{
    const int64_t width = c.heads * c.vdim, all = c.rows * width;
#pragma unroll 1
    for (int64_t t = global_thread(); t < all; t += global_threads()) {
        int64_t row = t / width, b = sequence_of<true>(c, row);
        if (b < c.batch && row - first_of<true>(c, b) < c.fresh[b])
            continue;
        o[t] = T{};
        if (c.lse && t % c.vdim == 0)
            c.lse[t / c.vdim] = -INFINITY;
    }
}

/* ---- tiles of queries and keys ---- */

/* Rows of the queries of a head. */
template <class T> struct query_lines {
    const T *from;
    int64_t pitch;
    __device__ inline const T *at(const cached &, int64_t r) const
    {
        return from + r * pitch;
    }
};

/* Lines of `dim` numbers as floats; zeros after the last one and beyond the width. */
template <class T, int D, class LINES>
static __device__ inline void load_tile(const cached &c, float *to, const LINES &lines, int dim,
                                        int rows, int most, bool packed)
{
    const int N = wide<T>::n, ld = D + 4;
    if (packed) {
#pragma unroll 1
        for (int t = (int)threadIdx.x; t < most * (D / N); t += THREADS) {
            int r = t / (D / N), d = t % (D / N) * N;
            pack<T, N> v = {};
            if (r < rows && d < dim)
                v = load<T, N>(lines.at(c, r) + d);
#pragma unroll
            for (int e = 0; e < N; e++)
                to[r * ld + d + e] = to_float(v.v[e]);
        }
        return;
    }
#pragma unroll 1
    for (int t = (int)threadIdx.x; t < most * D; t += THREADS) {
        int r = t / D, d = t % D;
        to[r * ld + d] = r < rows && d < dim ? to_float(lines.at(c, r)[d]) : 0.0f;
    }
}

/* A tile of queries of head h: rows i0.. of sequence b, `rows` of which are real; the results of `all` are stored.
 * Eight threads share a query.  Thread c of them has the scores of keys c, c + 8, ... of a tile, and columns 4c .. 4c+3
 * of every 32. */
template <class T, int D, int KEYS, bool SERVED>
static __device__ inline void attend_tile(const cached &c, const T *qkv, T *o, const T *keys,
                                          const T *values, bool packed, int64_t b, int64_t h,
                                          int64_t i0, int rows, int64_t all_rows)
{
    const int ld = D + 4;
    __shared__ four query[TILE * ld / 4], side[KEYS * ld / 4]; /* keys, then values */
    __shared__ float weight[TILE][KEYS + 1];
    const int r = (int)threadIdx.x / 8, mine = (int)threadIdx.x % 8;
    const int64_t row = first_of<SERVED>(c, b) + i0, kv = h / c.group;
    span seen = keys_of(c, b, i0 + r);
    int64_t start = 0, end = 0;
    if (rows) { /* of the tile: the first row sees the first key, the last row the last */
        start = keys_of(c, b, i0).start;
        end = keys_of(c, b, i0 + rows - 1).end;
    }
    if (SERVED && c.kind) /* so that the sums do not depend on where a prompt was cut */
        start -= start % KEYS;
    __syncthreads();
    const query_lines<T> queries = { qkv + row * qkv_pitch(c) + h * c.dim, qkv_pitch(c) };
    load_tile<T, D>(c, &query[0].v[0], queries, c.dim, rows, TILE, packed);
    four sum[D / 32] = {};
    float max = -INFINITY, all = 0;
    const int at = rows ? (int)(c.used[b] + i0) : 0;
    const query_tile tile = { (int)h, at, at + rows, 0, true };
#pragma unroll 1
    for (int64_t j0 = start; j0 < end; j0 += KEYS) {
        j0 = next_tile(c.blocks, tile, (int)j0, (int)end, KEYS);
        if (j0 >= end)
            break;
        int there = end - j0 < KEYS ? (int)(end - j0) : KEYS;
        float s[KEYS / 8], top = max;
        __syncthreads();
        load_tile<T, D>(c, &side[0].v[0], lines_of<SERVED, OF_KEYS>(c, keys, b, kv, j0), c.dim,
                        there, KEYS, packed);
        __syncthreads();
#pragma unroll
        for (int k = 0; k < KEYS / 8; k++)
            s[k] = 0;
#pragma unroll 2
        for (int d = 0; d < (c.dim + 3) / 4; d++) {
            four q = query[r * ld / 4 + d];
#pragma unroll
            for (int k = 0; k < KEYS / 8; k++)
                s[k] = dot(q, side[(mine + 8 * k) * ld / 4 + d], s[k]);
        }
#pragma unroll
        for (int k = 0; k < KEYS / 8; k++) {
            int64_t j = j0 + mine + 8 * k;
            const bool visible = j >= seen.start && j < seen.end;
            s[k] = visible ? capped(c, s[k] * c.scale, b, i0 + r, h, (int)j) : -INFINITY;
            top = fmaxf(top, s[k]);
        }
        for (int x = 1; x < 8; x *= 2)
            top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, x));
        float shrink = expf(max - base_of(top)), fresh = 0;
#pragma unroll
        for (int k = 0; k < KEYS / 8; k++) {
            float p = expf(s[k] - base_of(top));
            fresh += p;
            weight[r][mine + 8 * k] = rounded<T>(p);
        }
        for (int x = 1; x < 8; x *= 2)
            fresh += __shfl_xor_sync(0xffffffffu, fresh, x);
        max = top;
        all = fmaf(all, shrink, fresh);
#pragma unroll
        for (int x = 0; x < D / 32; x++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                sum[x].v[e] *= shrink;
        __syncthreads();
        load_tile<T, D>(c, &side[0].v[0], lines_of<SERVED, OF_VALUES>(c, values, b, kv, j0), c.vdim,
                        there, KEYS, packed);
        __syncthreads();
#pragma unroll 4
        for (int k = 0; k < there; k++) {
            float w = weight[r][k];
#pragma unroll
            for (int x = 0; x < D / 32; x++) {
                four v = side[k * ld / 4 + mine + 8 * x];
#pragma unroll
                for (int e = 0; e < 4; e++)
                    sum[x].v[e] = fmaf(w, v.v[e], sum[x].v[e]);
            }
        }
    }
    if (r >= all_rows)
        return; /* __syncthreads: every thread reaches the same number of them */
    T *to = o + ((row + r) * c.heads + h) * c.vdim;
    const float fade = add_sink(c.sinks, h, max, all);
    const float by = row_factor(c.undivided, fade, max, all);
    if (SERVED && c.lse && mine == 0)
        c.lse[(row + r) * c.heads + h] = r < rows ? row_lse(c.undivided, max, all) : -INFINITY;
#pragma unroll
    for (int x = 0; x < D / 32; x++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            int d = 4 * (mine + 8 * x) + e;
            if (d < c.vdim)
                to[d] = from_float<T>(r < rows ? sum[x].v[e] * by : 0.0f);
        }
}

template <class T, int D, int KEYS>
static __global__ void __launch_bounds__(THREADS)
    attend_tiles(cached c, const T *qkv, T *o, const T *keys, const T *values, bool packed)
{
    const int64_t tiles = (c.seq + TILE - 1) / TILE, items = c.batch * c.heads * tiles;
#pragma unroll 1
    for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
        int64_t i0 = item % tiles * TILE, bh = item / tiles, h = bh % c.heads, b = bh / c.heads;
        int64_t left = c.fresh[b] - i0;
        int rows = left < 0 ? 0 : left < TILE ? (int)left : TILE;
        attend_tile<T, D, KEYS, false>(c, qkv, o, keys, values, packed, b, h, i0, rows, c.seq - i0);
    }
}

/* Pages, and ragged rows: a block has TILE rows of qkv, with one or more sequences. */
template <class T, int D, int KEYS>
static __global__ void __launch_bounds__(THREADS)
    attend_served_tiles(cached c, const T *qkv, T *o, const T *keys, const T *values, bool packed)
{
    const int64_t tiles = tiles_of_rows(c, TILE), items = c.heads * tiles;
#pragma unroll 1
    for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
        const int64_t h = item / tiles;
        tile_walk w = walk_tile(c, item % tiles, TILE);
#pragma unroll 1
        while (next_piece(c, w))
            attend_tile<T, D, KEYS, true>(c, qkv, o, keys, values, packed, w.b, h, w.i0, w.rows,
                                          w.all);
    }
}

/* ---- launchers ---- */

static bool in_tiles(const cached &c)
{
    return c.seq > 1 && widest(c) <= MOST_TILED;
}

static size_t work(const lm_call *call, int)
{
    cached c = is_served(call) ? served_of(call) : cached_of(call, CACHED_SINKS, CACHED_BIAS);
    if (c.seq > 0)
        return in_tiles(c) ? 0 : attend_rows_work(c);
    c.seq = 1; /* the new tokens of ragged rows */
    return widest(c) <= MOST_WIDE ? attend_rows_work(c) : SIZE_MAX;
}

template <class T, int D, int KEYS>
static void run_tiles(const lm_call *call, const cached &c, bool packed)
{
    lm_stream *s = call->stream;
    int64_t items = c.batch * c.heads * ((c.seq + TILE - 1) / TILE);
    const T *qkv = in_ptr<const T>(call, 0), *keys = out_ptr<const T>(call, 1),
            *values = cached_values<const T>(call);
    if (is_served(call))
        LM_LAUNCH((attend_served_tiles<T, D, KEYS>),
                  grid_for(c.heads * tiles_of_rows(c, TILE), 1, s), THREADS, 0, s, c, qkv,
                  out_ptr<T>(call, 0), keys, values, packed);
    else
        LM_LAUNCH((attend_tiles<T, D, KEYS>), grid_for(items, 1, s), THREADS, 0, s, c, qkv,
                  out_ptr<T>(call, 0), keys, values, packed);
}

template <class T, int N> static void run_append(const lm_call *call, const cached &c)
{
    lm_stream *s = call->stream;
    if (c.reads)
        return;
    const int grid = grid_for(c.rows * ((qkv_pitch(c) - c.heads * c.dim) / N), 256, s);
    const T *qkv = in_ptr<const T>(call, 0);
    if (is_served(call))
        LM_LAUNCH((append<T, N, true>), grid, 256, 0, s, c, qkv, out_ptr<T>(call, 1),
                  cached_values<T>(call));
    else
        LM_LAUNCH((append<T, N, false>), grid, 256, 0, s, c, qkv, out_ptr<T>(call, 1),
                  cached_values<T>(call));
}

template <class T> static void plain_tiles(const lm_call *call, const cached &c, bool packed)
{
    if (widest(c) <= 64)
        run_tiles<T, 64, 32>(call, c, packed);
    else if (widest(c) <= 128)
        run_tiles<T, 128, 32>(call, c, packed);
    else
        run_tiles<T, 256, 16>(call, c, packed);
}

template <class T, bool TENSOR>
static void run_prompts(const lm_call *call, const cached &c, bool packed)
{
    if constexpr (TENSOR)
        tensor_tiles<T>(call, c, packed);
    else
        plain_tiles<T>(call, c, packed);
}

template <class T> static bool packed_rows(const lm_call *call, const cached &c)
{
    return packs<T>(wide<T>::n, c.dim, call->in[0].data, call->out[0].data, call->out[1].data,
                    cached_values<T>(call)) &&
           c.vdim % wide<T>::n == 0;
}

/* Ragged rows, pages, statistics: new keys and values first, then each kind of rows by its kernel. */
template <class T, bool TENSOR> static void attention_served(const lm_call *call)
{
    lm_stream *s = call->stream;
    cached c = served_of(call);
    bool packed = packed_rows<T>(call, c);
    if (packed)
        run_append<T, wide<T>::n>(call, c);
    else
        run_append<T, 1>(call, c);
    if (c.first)
        LM_LAUNCH((clear_rows<T>), grid_for(c.rows * c.heads * c.vdim, 256, s), 256, 0, s, c,
                  out_ptr<T>(call, 0));
    if (c.first || !in_tiles(c))
        attend_served_rows<T>(call, c, packed);
    if (c.first && widest(c) > MOST_TILED)
        attend_wide_prompts<T>(call, c, packed);
    else if (c.first || in_tiles(c))
        run_prompts<T, TENSOR>(call, c, packed);
}

template <class T, bool TENSOR> static void attention_cached(const lm_call *call)
{
    const int N = wide<T>::n;
    if (is_served(call)) {
        attention_served<T, TENSOR>(call);
        return;
    }
    cached c = cached_of(call, CACHED_SINKS, CACHED_BIAS);
    bool packed = packed_rows<T>(call, c);
    if (c.seq > 1 && packed)
        run_append<T, N>(call, c);
    else if (c.seq > 1)
        run_append<T, 1>(call, c);
    if (in_tiles(c))
        run_prompts<T, TENSOR>(call, c, packed);
    else
        attend_rows<T>(call, c, row_front{}, packed);
}

static size_t step_work(const lm_call *call, int)
{
    return attend_rows_work(cached_of(call, STEP_SINKS, STEP_BIAS));
}

template <class T> static void attention_step(const lm_call *call)
{
    const lm_attention_step_attr *a = (const lm_attention_step_attr *)call->attr;
    cached c = cached_of(call, STEP_SINKS,
                         STEP_BIAS); /* its attributes begin with those of attention_cached */
    row_front front = { in_ptr<const int32_t>(call, 3),
                        in_ptr<const float>(call, 4),
                        in_ptr<const float>(call, 5),
                        in_ptr<const float>(call, 6),
                        (int)a->rotary_dim,
                        (float)a->eps,
                        a->plus_one };
    attend_rows<T>(call, c, front, packed_rows<T>(call, c));
}

#define ROW(type, dtype, level, tensor)                                        \
    {                                                                          \
        "attention_cached", dtype, level, attention_cached<type, tensor>, work \
    }

extern "C" const lm_kernel lm_attention_cached_cuda_kernels[] = {
    ROW(float, LM_DTYPE_F32, LM_CUDA_PLAIN, false),
    ROW(bf16, LM_DTYPE_BF16, LM_CUDA_PLAIN, false),
    ROW(f16, LM_DTYPE_F16, LM_CUDA_PLAIN, false),
    ROW(bf16, LM_DTYPE_BF16, LM_CUDA_TENSOR, true),
    ROW(f16, LM_DTYPE_F16, LM_CUDA_TENSOR, true),
    LM_CUDA_ROWS("attention_step", attention_step, step_work),
    LM_CUDA_END
};
