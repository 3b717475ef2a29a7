/* SPDX-License-Identifier: Apache-2.0 */
/* attention_backward.cuh -- attention, backward (kernels/attention.h): FlashAttention-2
 * (arXiv:2307.08691, algorithm 2) as passes without additions to memory: delta, the sums of do * o
 * over each row; a block for a tile of queries, which sums dq over the keys; a block for a tile of
 * keys, which sums dk and dv over the queries of all heads that share them.  Probabilities are
 * recomputed from the scores and lse. */
#ifndef LM_KERNELS_CUDA_ATTENTION_BACKWARD_CUH
#define LM_KERNELS_CUDA_ATTENTION_BACKWARD_CUH

#include "kernels/cuda/attention_tile.cuh"

/* Sizes such that a block has at most 99 KiB of shared memory and its threads enough registers:
 * both passes hold two tiles of `rows` rows that the warps own and two of `cols` rows over which
 * they loop. */
template <class T, int D> struct backward_tile {
    static const bool wide = sizeof(T) == 4;
    static const int warps = wide && D > 128 ? 2 : 4, threads = 32 * warps, rows = 16 * warps;
    static const int cols = D > 128 || (wide && D > 64) ? 16 : D > 64 || wide ? 32 : 64;
    static const int ld = tile_pitch<T, D>::n;
    static const int bytes = 2 * (rows + cols) * ld * (int)sizeof(T) + 4 * cols * 4;
};

/* A block's shared memory. */
template <class T, int D> struct backward_shared {
    T *a, *a2, *b, *b2; /* [rows] and [cols] rows */
    float *lse, *delta; /* [cols] */
    int *first, *end;   /* [cols] */
    uint32_t *box;      /* this warp's */
};
template <class T, int D> __device__ inline backward_shared<T, D> carve(T *at)
{
    typedef backward_tile<T, D> tile;
    backward_shared<T, D> m;
    m.a = at;
    m.a2 = m.a + tile::rows * tile::ld;
    m.b = m.a2 + tile::rows * tile::ld;
    m.b2 = m.b + tile::cols * tile::ld;
    m.lse = reinterpret_cast<float *>(m.b2 + tile::cols * tile::ld);
    m.delta = m.lse + tile::cols;
    m.first = reinterpret_cast<int *>(m.delta + tile::cols);
    m.end = m.first + tile::cols;
    m.box = reinterpret_cast<uint32_t *>(m.end + tile::cols) + threadIdx.x / 32 * warp_box<T>::n;
    return m;
}

/* Operands of the passes.  Scratch: delta [B,H,T]; first and end [B, tiles of queries], the first key that any of a
 * tile's queries sees, and the one after the last. */
template <class T> struct backward_args {
    const T *dout, *qkv;
    const float *lse;
    float *delta;
    int *first, *end;
    T *dqkv;
};

/* ---- delta and first ---- */

template <class T>
__global__ void __launch_bounds__(256)
    delta_kernel(attn_shape s, const T *dout, const T *o, float *delta)
{
    int lane = (int)(threadIdx.x % 32);
    int64_t rows = s.batch * s.seq * s.heads;
    const int dim = s.vdim;
    for (int64_t row = global_thread() / 32; row < rows; row += global_threads() / 32) {
        float sum = 0;
        for (int d = lane; d < dim; d += 32)
            sum = fmaf(to_float(dout[row * dim + d]), to_float(o[row * dim + d]), sum);
        sum = warp_sum(sum);
        int64_t n = row / s.heads, h = row % s.heads; /* n: b * seq + i */
        if (lane == 0)
            delta[(n / s.seq * s.heads + h) * s.seq + n % s.seq] = s.undivided ? 0.0f : sum;
    }
}

template <int COLS>
__global__ void __launch_bounds__(256) first_kernel(attn_shape s, int *first, int *end)
{
    int64_t tiles = (s.seq + COLS - 1) / COLS;
    for (int64_t n = global_thread(); n < s.batch * tiles; n += global_threads()) {
        int64_t b = n / tiles, i0 = n % tiles * COLS;
        int least = (int)s.seq, most = 0;
        for (int64_t i = i0; i < i0 + COLS && i < s.seq; i++) {
            int at = first_key(s, b, (int)i), past = end_key(s, b, (int)i);
            least = at < least ? at : least;
            most = past > most ? past : most;
        }
        first[n] = least;
        end[n] = most;
    }
}

/* ---- queries ---- */

/* dq of the tile of queries from i0 of head h of sequence b. */
template <class T, int D, bool TENSOR>
__device__ inline void query_rows(const attn_shape &s, const backward_args<T> &x, int64_t b,
                                  int64_t h, int i0, T *shared)
{
    typedef backward_tile<T, D> tile;
    const int N = tile::cols / 8, ld = tile::ld;
    backward_shared<T, D> m = carve<T, D>(shared);
    int warp = (int)(threadIdx.x / 32), lane = (int)(threadIdx.x % 32), seq = (int)s.seq;
    int rows = seq - i0 < tile::rows ? seq - i0 : tile::rows;
    int64_t pitch = qkv_pitch(s), kv = h / (s.heads / s.kv_heads), bh = b * s.heads + h;
    int64_t at = b * s.seq * pitch, keys = at + (s.heads + kv) * s.dim;
    int64_t values = at + (s.heads + s.kv_heads) * s.dim + kv * s.vdim;
    int64_t mine = at + i0 * pitch + h * s.dim;

    load_tile<T, D, tile::rows, tile::threads, TENSOR>(m.a, x.qkv + mine, pitch, rows, s.dim, s);
    load_tile<T, D, tile::rows, tile::threads, TENSOR>(
        m.a2, x.dout + (b * s.seq + i0) * o_pitch(s) + h * s.vdim, o_pitch(s), rows, s.vdim, s);
    int i[2], first[2], end[2];
    float lse[2], delta[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        i[r] = i0 + warp * 16 + lane / 4 + 8 * r;
        bool there = i[r] < seq;
        first[r] = there ? first_key(s, b, i[r]) : seq;
        end[r] = there ? end_key(s, b, i[r]) : 0;
        lse[r] = there ? x.lse[bh * s.seq + i[r]] * 1.44269504f : 0;
        delta[r] = there ? x.delta[bh * s.seq + i[r]] : 0;
    }
    int j0 = seq, hi = 0;
    int64_t tiles = (s.seq + tile::cols - 1) / tile::cols;
    for (int n = i0 / tile::cols; n * tile::cols < i0 + rows;
         n++) { /* rows are whole tiles of cols */
        int least = x.first[b * tiles + n];
        int most = x.end[b * tiles + n];
        j0 = least < j0 ? least : j0;
        hi = most > hi ? most : hi;
    }
    attn_draws draws = draws_of(s, bh);
    mma_c c[N], dp[N], dq[D / 8];
#pragma unroll
    for (int d = 0; d < D / 8; d++)
        dq[d] = mma_c{};
    const query_tile tile_rows = tile_of(s, b, h, i0, rows);
    for (j0 = j0 / tile::cols * tile::cols; j0 < hi; j0 += tile::cols) {
        j0 = next_tile(s.blocks, tile_rows, j0, hi, tile::cols);
        if (j0 >= hi)
            break;
        load_tile<T, D, tile::cols, tile::threads, TENSOR>(m.b, x.qkv + keys + j0 * pitch, pitch,
                                                           seq - j0, s.dim, s);
        load_tile<T, D, tile::cols, tile::threads, TENSOR>(m.b2, x.qkv + values + j0 * pitch, pitch,
                                                           seq - j0, s.vdim, s);
        copies_done<TENSOR>();
        __syncthreads();
        product_rows<T, D, N, TENSOR>(c, m.a + warp * 16 * ld, m.b, m.box);
        product_rows<T, D, N, TENSOR>(dp, m.a2 + warp * 16 * ld, m.b2, m.box);
        add_biases<N>(s, c, h, j0 - i0 - warp * 16, 1);
        cap_scores<N>(s, c);
        if (s.blocks.size) {
            const int at[2] = { i[0] - first[0], i[1] - first[1] };
            const int j[2] = { j0 - first[0], j0 - first[1] };
            hide_keys<N>(c, seen_by_rows(s.blocks, (int)h, at, j, N), LM_HIDDEN_SCORE);
        }
        unsigned kept = kept_queries(s, draws, i0 + warp * 16, j0, N);
#pragma unroll
        for (int n = 0; n < N; n++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                int r = e / 2, j = j0 + 8 * n + lane % 4 * 2 + e % 2;
                bool seen = j >= first[r] && j < end[r];
                float g = kept >> (4 * n + e) & 1 ? dp[n].r[e] * s.keep : 0.0f;
                float p = exp2f(fmaf(c[n].r[e], s.scale_log2, -lse[r]));
                c[n].r[e] = seen ? p * (g - delta[r]) * cap_slope(s, c[n].r[e]) : 0.0f;
            }
        }
        product_cols<T, D, N, TENSOR>(dq, c, m.b, m.box);
        __syncthreads(); /* no warp reads the keys any longer */
    }
    copies_done<TENSOR>();
    __syncthreads();
    const float by[2] = { s.scale, s.scale };
    store_rows<T, D>(x.dqkv + mine + warp * 16 * pitch, pitch, rows - warp * 16, dq, by,
                     m.a + warp * 16 * ld, s.dim, s);
}

template <class T, int D, bool TENSOR>
__global__ void __launch_bounds__((backward_tile<T, D>::threads))
    query_kernel(attn_shape s, backward_args<T> x)
{
    typedef backward_tile<T, D> tile;
    LM_DYNAMIC_SHARED(T, shared);
    int64_t heads = s.batch * s.heads, tiles = (s.seq + tile::rows - 1) / tile::rows;
    for (int64_t job = blockIdx.x; job < tiles * heads; job += gridDim.x) {
        int64_t bh = job % heads, i0 = (tiles - 1 - job / heads) * tile::rows;
        __syncthreads(); /* the previous job no longer needs the shared memory */
        query_rows<T, D, TENSOR>(s, x, bh / s.heads, bh % s.heads, (int)i0, shared);
    }
}

/* ---- keys and values ---- */

/* The sums of a pass: both gradients, or one of them if registers are not enough for both. */
enum { DV = 1, DK = 2 };

/* Queries from i0 of one head: their rows, and the numbers of each row. */
template <class T, int D, bool TENSOR>
__device__ inline void load_queries(const attn_shape &s, const backward_args<T> &x, int64_t b,
                                    int64_t h, int i0, const backward_shared<T, D> &m)
{
    typedef backward_tile<T, D> tile;
    int64_t pitch = qkv_pitch(s), row = b * s.seq + i0, bh = b * s.heads + h;
    int rows = (int)s.seq - i0;
    load_tile<T, D, tile::cols, tile::threads, TENSOR>(m.b, x.qkv + row * pitch + h * s.dim, pitch,
                                                       rows, s.dim, s);
    load_tile<T, D, tile::cols, tile::threads, TENSOR>(m.b2, x.dout + row * o_pitch(s) + h * s.vdim,
                                                       o_pitch(s), rows, s.vdim, s);
    for (int r = (int)threadIdx.x; r < tile::cols; r += tile::threads) {
        bool there = r < rows;
        m.lse[r] = there ? x.lse[bh * s.seq + i0 + r] * 1.44269504f : 0;
        m.delta[r] = there ? x.delta[bh * s.seq + i0 + r] : 0;
        m.first[r] = there ? first_key(s, b, i0 + r) : (int)s.seq;
        m.end[r] = there ? end_key(s, b, i0 + r) : 0;
    }
}

/* Add the contribution of the queries from i0 of head h to dk and dv of a warp's 16 keys from j0. */
template <class T, int D, int PASS, bool TENSOR>
__device__ inline void add_queries(const attn_shape &s, const attn_draws &draws, int64_t h, int i0,
                                   int j0, const backward_shared<T, D> &m, mma_c *dk, mma_c *dv)
{
    typedef backward_tile<T, D> tile;
    const int N = tile::cols / 8, ld = tile::ld;
    int warp = (int)(threadIdx.x / 32), lane = (int)(threadIdx.x % 32);
    mma_c c[N], dp[N];
    unsigned kept = kept_keys(s, draws, i0, j0, N);
    product_rows<T, D, N, TENSOR>(c, m.a + warp * 16 * ld, m.b, m.box);
    add_biases<N>(s, c, h, j0 - i0, -1);
    cap_scores<N>(s, c);
    if (s.blocks.size)
        hide_keys<N>(c, seen_by_columns(s.blocks, (int)h, i0, m.first, j0, N), LM_HIDDEN_SCORE);
#pragma unroll
    for (int n = 0; n < N; n++) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
            int r = 8 * n + lane % 4 * 2 + e % 2, j = j0 + lane / 4 + e / 2 * 8;
            bool seen = j >= m.first[r] && j < m.end[r];
            float p = exp2f(fmaf(c[n].r[e], s.scale_log2, -m.lse[r]));
            p = seen ? p : 0.0f;
            c[n].r[e] = p * cap_slope(s, c[n].r[e]);
            dp[n].r[e] = kept >> (4 * n + e) & 1 ? p * s.keep : 0.0f;
        }
    }
    if (PASS & DV)
        product_cols<T, D, N, TENSOR>(dv, dp, m.b2, m.box);
    if (PASS & DK) {
        product_rows<T, D, N, TENSOR>(dp, m.a2 + warp * 16 * ld, m.b2, m.box);
#pragma unroll
        for (int n = 0; n < N; n++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                int r = 8 * n + lane % 4 * 2 + e % 2, j = j0 + lane / 4 + e / 2 * 8;
                bool seen = j >= m.first[r] && j < m.end[r];
                float g = kept >> (4 * n + e) & 1 ? dp[n].r[e] * s.keep : 0.0f;
                c[n].r[e] = seen ? c[n].r[e] * (g - m.delta[r]) : 0.0f;
            }
        }
        product_cols<T, D, N, TENSOR>(dk, c, m.b, m.box);
    }
}

/* dk and dv of the tile of keys from j0 of key/value head kv of sequence b. */
template <class T, int D, int PASS, bool TENSOR>
__device__ inline void key_rows(const attn_shape &s, const backward_args<T> &x, int64_t b,
                                int64_t kv, int j0, T *shared)
{
    typedef backward_tile<T, D> tile;
    const int ld = tile::ld;
    backward_shared<T, D> m = carve<T, D>(shared);
    int warp = (int)(threadIdx.x / 32), seq = (int)s.seq;
    int rows = seq - j0 < tile::rows ? seq - j0 : tile::rows;
    int64_t pitch = qkv_pitch(s), group = s.heads / s.kv_heads;
    int64_t keys = (b * s.seq + j0) * pitch + (s.heads + kv) * s.dim;
    int64_t values = (b * s.seq + j0) * pitch + (s.heads + s.kv_heads) * s.dim + kv * s.vdim;
    int64_t tiles = (s.seq + tile::cols - 1) / tile::cols;
    /* Queries of [from, to) see some of the keys, unless a document starts between them. */
    int64_t i1 = s.window ? (int64_t)j0 + rows - 1 + s.window : s.seq;
    int from = s.causal                     ? j0
               : s.window && j0 >= s.window ? j0 - s.window + 1
                                            : 0,
        to = (int)(i1 < s.seq ? i1 : s.seq);
    mma_c dk[D / 8], dv[D / 8];
#pragma unroll
    for (int d = 0; d < D / 8; d++)
        dk[d] = dv[d] = mma_c{};

    load_tile<T, D, tile::rows, tile::threads, TENSOR>(m.a, x.qkv + keys, pitch, rows, s.dim, s);
    if (PASS & DK)
        load_tile<T, D, tile::rows, tile::threads, TENSOR>(m.a2, x.qkv + values, pitch, rows,
                                                           s.vdim, s);
    for (int64_t h = kv * group; h < (kv + 1) * group; h++) {
        attn_draws draws = draws_of(s, b * s.heads + h);
        for (int i0 = from / tile::cols * tile::cols; i0 < to; i0 += tile::cols) {
            const int64_t n = b * tiles + i0 / tile::cols;
            if (x.first[n] >= j0 + rows || x.end[n] <= j0)
                continue;
            const query_tile q =
                tile_of(s, b, h, i0, seq - i0 < tile::cols ? seq - i0 : tile::cols);
            if (next_tile(s.blocks, q, j0, j0 + 1, rows) != j0)
                continue;
            load_queries<T, D, TENSOR>(s, x, b, h, i0, m);
            copies_done<TENSOR>();
            __syncthreads();
            add_queries<T, D, PASS, TENSOR>(s, draws, h, i0, j0 + warp * 16, m, dk, dv);
            __syncthreads(); /* no warp reads the queries any longer */
        }
    }
    copies_done<TENSOR>();
    __syncthreads();
    const float by[2] = { s.scale, s.scale }, same[2] = { 1, 1 };
    if (PASS & DK)
        store_rows<T, D>(x.dqkv + keys + warp * 16 * pitch, pitch, rows - warp * 16, dk, by,
                         m.a + warp * 16 * ld, s.dim, s);
    if (PASS & DV)
        store_rows<T, D>(x.dqkv + values + warp * 16 * pitch, pitch, rows - warp * 16, dv, same,
                         m.a + warp * 16 * ld, s.vdim, s);
}

/* The first keys first: with causal attention they are visible to most queries. */
template <class T, int D, int PASS, bool TENSOR>
__global__ void __launch_bounds__((backward_tile<T, D>::threads),
                                  (TENSOR && D == 192 && PASS == DV ? 3 : 1))
    key_kernel(attn_shape s, backward_args<T> x)
{
    typedef backward_tile<T, D> tile;
    LM_DYNAMIC_SHARED(T, shared);
    int64_t heads = s.batch * s.kv_heads, tiles = (s.seq + tile::rows - 1) / tile::rows;
    for (int64_t job = blockIdx.x; job < tiles * heads; job += gridDim.x) {
        int64_t bk = job % heads, j0 = job / heads * tile::rows;
        __syncthreads(); /* the previous job no longer needs the shared memory */
        key_rows<T, D, PASS, TENSOR>(s, x, bk / s.kv_heads, bk % s.kv_heads, (int)j0, shared);
    }
}

/* ---- launches ---- */

template <class T, int D, int PASS, bool TENSOR>
static void launch_keys(const lm_call *c, const attn_shape &s, const backward_args<T> &x)
{
    typedef backward_tile<T, D> tile;
    int64_t jobs = s.batch * s.kv_heads * ((s.seq + tile::rows - 1) / tile::rows);
    const int bytes = block_bytes<tile, T, TENSOR>();
    LM_ALLOW_SHARED((key_kernel<T, D, PASS, TENSOR>), bytes);
    LM_LAUNCH((key_kernel<T, D, PASS, TENSOR>), attn_grid(jobs), tile::threads, bytes, c->stream, s,
              x);
}

template <class T, int D, bool TENSOR>
static void launch_backward(const lm_call *c, const attn_shape &s, const backward_args<T> &x)
{
    typedef backward_tile<T, D> tile;
    const int bytes = block_bytes<tile, T, TENSOR>();
    static_assert(bytes <= ATTN_MOST_SHARED, "every GPU has as much");
    static_assert(tile::cols >= ATTN_FEWEST_COLS && tile::rows % tile::cols == 0,
                  "as first has it");
    int64_t jobs = s.batch * s.heads * ((s.seq + tile::rows - 1) / tile::rows);
    int64_t tiles = (s.seq + tile::cols - 1) / tile::cols;
    LM_LAUNCH((first_kernel<tile::cols>), grid_for(s.batch * tiles, 256, c->stream), 256, 0,
              c->stream, s, x.first, x.end);
    LM_ALLOW_SHARED((query_kernel<T, D, TENSOR>), bytes);
    LM_LAUNCH((query_kernel<T, D, TENSOR>), attn_grid(jobs), tile::threads, bytes, c->stream, s, x);
    if constexpr (D <= 128) {
        launch_keys<T, D, DV | DK, TENSOR>(c, s, x);
    } else {
        launch_keys<T, D, DV, TENSOR>(c, s, x);
        launch_keys<T, D, DK, TENSOR>(c, s, x);
    }
}

template <class T, bool TENSOR> void attention_backward(const lm_call *c)
{
    attn_shape s = attn_shape_of(c, 4, 6);
    const T *dout = in_ptr<const T>(c, 0), *qkv = in_ptr<const T>(c, 1), *o = in_ptr<const T>(c, 2);
    int64_t rows = s.batch * s.seq * s.heads;
    if (rows == 0)
        return;
    const int64_t tiles = (s.seq + ATTN_FEWEST_COLS - 1) / ATTN_FEWEST_COLS;
    float *delta = static_cast<float *>(c->work);
    int *first = reinterpret_cast<int *>(delta + rows);
    backward_args<T> x = { dout,
                           qkv,
                           in_ptr<const float>(c, 3),
                           delta,
                           first,
                           first + s.batch * tiles,
                           out_ptr<T>(c, 0) };
    s.packed = packs<T>(wide<T>::n, s.dim, dout, qkv, x.dqkv) && s.vdim % wide<T>::n == 0;
    LM_LAUNCH((delta_kernel<T>), grid_for(rows, 8, c->stream), 256, 0, c->stream, s, dout, o,
              delta);
#define BACKWARD(D) launch_backward<T, D, TENSOR>(c, s, x)
    LM_ATTN_FOR_DIM(TENSOR, widest(s), BACKWARD);
#undef BACKWARD
}

#endif
