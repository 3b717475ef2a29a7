/* SPDX-License-Identifier: Apache-2.0 */
/* attention_tile.cuh -- shared by attention's forward and backward (contract: kernels/attention.h).
 *
 * A block is a few warps.  Each warp owns 16 rows of a tile of queries (or of keys, in the pass for
 * keys and values), and loops over tiles of the other side in shared memory.  A warp computes two
 * kinds of products, with sums in the arrangement of mma_c:
 *   product_rows   c [16, 8N] += a [16, D] b [8N, D]^T    both in shared memory: scores
 *   product_cols   c [16, D]  += p [16, 8N] b [8N, D]     p in registers as product_rows left it
 * BF16 and F16 by mma.cuh (p rounded to T), F32 by plain sums in F32 in the same arrangement.  Head
 * sizes between the compiled ones run as the next larger size, filled up with zeros.
 *
 * A key that a query does not see has weight zero in its tile.  So a NaN in a key or query affects
 * only the rows that see it, but a NaN in a value (or, in the backward, in another factor of such a
 * product) affects all rows of the tile. */
#ifndef LM_KERNELS_CUDA_ATTENTION_TILE_CUH
#define LM_KERNELS_CUDA_ATTENTION_TILE_CUH

#include "kernels/cuda/attention_bias.cuh"
#include "kernels/cuda/attention_blocks.cuh"
#include "kernels/cuda/attention_sink.cuh"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/philox.cuh"

extern "C" {
#include "kernels/attention.h"
}

/* The shortest tile of queries for which the backward stores numbers; sizes its scratch. */
enum { ATTN_FEWEST_COLS = 16 };
/* Bytes of shared memory that a block has on every GPU from sm_80 on. */
enum { ATTN_MOST_SHARED = 99 * 1024 };

/* The launchers' part of a call, for all kernels. */
struct attn_shape {
    int64_t batch, seq, heads, kv_heads;
    int dim, vdim, window; /* vdim: of values; window 0: none */
    bool causal, packed, undivided;
    float scale, scale_log2; /* scale * log2(e), for powers of two */
    /* scale / soft_cap: scores are tanh(q.k * cap_by), and scale_log2 is that of the cap; 0: no
     * soft cap */
    float cap_by;
    bool drop;
    uint32_t threshold;
    float keep;
    uint64_t draw_hi; /* of the dropout's stream of draws */
    lm_attention_origin origin;
    const lm_step *step;
    const int32_t *lo, *hi; /* of documents; null: none */
    bias_table bias;
    float bias_by; /* 1 / scale, since scores are products of rows */
    block_mask blocks;
};

/* Elements of a row of qkv, and of o. */
__host__ __device__ inline int64_t qkv_pitch(const attn_shape &s)
{
    return (s.heads + s.kv_heads) * s.dim + s.kv_heads * s.vdim;
}
__host__ __device__ inline int64_t o_pitch(const attn_shape &s)
{
    return s.heads * s.vdim;
}
/* The size of tiles that hold both keys and values. */
__host__ __device__ inline int widest(const attn_shape &s)
{
    return s.dim > s.vdim ? s.dim : s.vdim;
}

/* lo: the number of that operand; hi is the next; bias: of that one. */
inline attn_shape attn_shape_of(const lm_call *c, int lo, int bias)
{
    const lm_attention_attr *a = (const lm_attention_attr *)c->attr;
    attn_shape s = {};
    s.batch = a->batch;
    s.seq = a->seq;
    s.heads = a->heads;
    s.kv_heads = a->kv_heads;
    s.dim = (int)a->head_dim;
    s.vdim = (int)lm_attention_value_dim(a);
    s.window = a->window > 0 && a->window < a->seq ? (int)a->window : 0;
    s.causal = a->causal;
    s.undivided = a->undivided;
    s.scale = (float)a->scale;
    s.cap_by = a->soft_cap > 0 ? (float)(a->scale / a->soft_cap) : 0;
    s.scale_log2 = (float)((a->soft_cap > 0 ? a->soft_cap : a->scale) * 1.4426950408889634);
    s.drop = a->dropout > 0;
    s.keep = 1;
    if (s.drop) {
        s.threshold = (uint32_t)dropout_threshold(a->dropout);
        s.keep = (float)(1 / (1 - a->dropout));
        s.draw_hi = rng_hi("attention dropout", (uint64_t)a->site);
        s.origin = lm_attention_origin_of(a);
    }
    s.step = c->stream->step;
    s.lo = in_ptr<const int32_t>(c, lo);
    s.hi = in_ptr<const int32_t>(c, lo + 1);
    s.bias = bias_of(c, bias, a);
    s.bias_by = (float)(1 / a->scale);
    s.blocks = blocks_of(a);
    return s;
}

/* ---- which keys query i sees: first_key <= j < end_key ---- */

__device__ inline int first_key(const attn_shape &s, int64_t b, int i)
{
    int lo = s.lo ? s.lo[b * s.seq + i] : 0, w = s.window ? i - s.window + 1 : 0;
    lo = lo > 0 ? lo : 0;
    return lo > w ? lo : w;
}
__device__ inline int end_key(const attn_shape &s, int64_t b, int i)
{
    int seq = (int)s.seq, end = s.causal ? i + 1 : s.window ? i + s.window : seq;
    int hi = s.hi ? s.hi[b * s.seq + i] : seq;
    end = end < seq ? end : seq;
    return hi < end ? hi : end;
}

/* With blocks, and so without a window: the rows of queries from i0 of sequence b and head h. */
__device__ inline query_tile tile_of(const attn_shape &s, int64_t b, int64_t h, int i0, int rows)
{
    query_tile q = {};
    if (!s.blocks.size)
        return q;
    q.origin = first_key(s, b, i0);
    q.one = q.origin == first_key(s, b, i0 + rows - 1);
    q.h = (int)h;
    q.i0 = i0 - q.origin;
    q.i1 = q.i0 + rows;
    return q;
}

/* ---- dropout: the multiplier's draw for key j of query i of (b, h) ---- */

struct attn_draws {
    uint64_t key, first; /* index of query 0, key 0 */
};
__device__ inline attn_draws draws_of(const attn_shape &s, int64_t bh)
{
    attn_draws d = { 0, 0 };
    if (s.drop) {
        d.key = micro_key(s.step);
        d.first = lm_attention_draw(&s.origin, bh / s.heads, bh % s.heads, 0);
    }
    return d;
}
/* The mask of a lane's sums that dropout keeps: bit 4n + e for register e of fragment n < N <= 8.
 * Indices of draws differ by 8 * next between fragments, by `next` between columns, by 8 * down
 * between the rows of the lane. */
__device__ inline LM_NOINLINE unsigned kept_bits(uint64_t at, uint64_t next, uint64_t down, int N,
                                                 uint64_t hi, uint64_t key, uint32_t threshold)
{
    unsigned bits = 0;
#pragma unroll 1
    for (int k = 0; k < 4 * N; k++) {
        uint64_t i = at + (uint64_t)(k / 4 * 8 + k % 2) * next + (uint64_t)(k / 2 % 2 * 8) * down;
        draws4 x = philox(i / 4, hi, key);
        uint32_t even = i & 2 ? x.v[2] : x.v[0], odd = i & 2 ? x.v[3] : x.v[1];
        bits |= (unsigned)((i & 1 ? odd : even) >= threshold) << k;
    }
    return bits;
}
/* The same for queries along the rows of a tile from query i, key j; and for keys along them. */
__device__ inline unsigned kept_queries(const attn_shape &s, const attn_draws &d, int i, int j,
                                        int N)
{
    int lane = (int)(threadIdx.x % 32);
    uint64_t seq = (uint64_t)s.origin.seq, row = (uint64_t)(i + lane / 4),
             col = (uint64_t)(j + lane % 4 * 2);
    return s.drop ? kept_bits(d.first + row * seq + col, 1, seq, N, s.draw_hi, d.key, s.threshold)
                  : ~0u;
}
__device__ inline unsigned kept_keys(const attn_shape &s, const attn_draws &d, int i, int j, int N)
{
    int lane = (int)(threadIdx.x % 32);
    uint64_t seq = (uint64_t)s.origin.seq, row = (uint64_t)(i + lane % 4 * 2),
             col = (uint64_t)(j + lane / 4);
    return s.drop ? kept_bits(d.first + row * seq + col, seq, 1, N, s.draw_hi, d.key, s.threshold)
                  : ~0u;
}

/* ---- tiles of rows in shared memory ---- */

/* Elements between rows: 16 bytes more than the row, so that 8 rows lie in different banks. */
template <class T, int D> struct tile_pitch {
    static const int n = D + 16 / (int)sizeof(T);
};

/* Words of shared memory in which a warp exchanges numbers. */
template <class T> struct warp_box {
    static const int n = sizeof(T) == 4 ? 128 : MMA_BOX;
};

/* Shared memory of a block: its tiles, and after them the boxes of its warps, if they use them. */
template <class Tile, class T, bool TENSOR> constexpr int block_bytes(void)
{
#ifndef LM_EMU
    if (TENSOR && sizeof(T) == 2)
        return Tile::bytes;
#endif
    return Tile::bytes + Tile::warps * warp_box<T>::n * 4;
}

/* Load rows 0 .. ROWS-1 of `dim` numbers from `from`, of which the first `rows` exist; the others are zeros.  All
 * threads of the block call it; with TENSOR the copies may be pending until copies_done. */
template <class T, int D, int ROWS, int THREADS, bool TENSOR>
__device__ inline void load_tile(T *to, const T *from, int64_t pitch, int rows, int dim,
                                 const attn_shape &s)
{
    const int n = wide<T>::n, ld = tile_pitch<T, D>::n;
    typedef pack<T, n> P;
    if (s.packed) {
        for (int p = (int)threadIdx.x; p < ROWS * (D / n); p += THREADS) {
            int r = p / (D / n), c = p % (D / n) * n;
            bool there = r < rows && c < dim;
            copy_pack<TENSOR>(reinterpret_cast<P *>(to + r * ld + c),
                              reinterpret_cast<const P *>(there ? from + r * pitch + c : from),
                              there);
        }
        return;
    }
    for (int p = (int)threadIdx.x; p < ROWS * D; p += THREADS) {
        int r = p / D, c = p % D;
        to[r * ld + c] = r < rows && c < dim ? from[r * pitch + c] : T{};
    }
}

/* Store the first `rows` of a warp's 16 rows of sums, `dim` numbers times `by`, through `tile`, rows of shared
 * memory that only this warp reads. */
template <class T, int D>
__device__ inline void store_rows(T *to, int64_t pitch, int rows, const mma_c *x, const float *by,
                                  T *tile, int dim, const attn_shape &s)
{
    const int n = wide<T>::n, ld = tile_pitch<T, D>::n;
    typedef pack<T, n> P;
    int lane = (int)(threadIdx.x % 32), g = lane / 4, t = lane % 4;
    __syncwarp();
#pragma unroll
    for (int d = 0; d < D / 8; d++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            tile[(g + i / 2 * 8) * ld + 8 * d + 2 * t + i % 2] =
                from_float<T>(x[d].r[i] * by[i / 2]);
    __syncwarp();
    int step = s.packed ? n : 1, across = dim / step;
    for (int p = lane; p < 16 * across; p += 32) {
        int r = p / across, c = p % across * step;
        if (r >= rows)
            break;
        if (s.packed)
            *reinterpret_cast<P *>(to + r * pitch + c) = *reinterpret_cast<P *>(tile + r * ld + c);
        else
            to[r * pitch + c] = tile[r * ld + c];
    }
}

/* ---- the two products ---- */

template <class T, int D, int N, bool TENSOR>
__device__ inline void product_rows(mma_c *c, const T *a, const T *b, uint32_t *box)
{
    const int ld = tile_pitch<T, D>::n;
    int lane = (int)(threadIdx.x % 32);
#pragma unroll
    for (int n = 0; n < N; n++)
        c[n] = mma_c{};
    if constexpr (sizeof(T) == 4) {
        typedef pack<T, 4> P;
        (void)box;
        a += lane / 4 * ld;
        b += lane % 4 * 2 * ld;
#pragma unroll 1
        for (int k = 0; k < D; k += 4) {
            P x[2] = { *reinterpret_cast<const P *>(a + k),
                       *reinterpret_cast<const P *>(a + 8 * ld + k) };
#pragma unroll
            for (int n = 0; n < N; n++) {
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    P y = *reinterpret_cast<const P *>(b + (8 * n + e) * ld + k);
#pragma unroll
                    for (int i = e; i < 4; i += 2)
#pragma unroll
                        for (int v = 0; v < 4; v++)
                            c[n].r[i] += x[i / 2].v[v] * y.v[v];
                }
            }
        }
    } else {
        a += lane % 16 * ld + lane / 16 * 8;
        b += (lane % 8 + lane / 16 * 8) * ld + lane / 8 % 2 * 8;
#pragma unroll 2
        for (int k = 0; k < D; k += 16) {
            mma_a x = ldmatrix<T, false, TENSOR>(a + k, box);
#pragma unroll
            for (int n = 0; n < N; n += 2) {
                mma_a y = ldmatrix<T, false, TENSOR>(b + 8 * n * ld + k, box);
                mma<T, TENSOR>(c[n], x, mma_b{ { y.r[0], y.r[1] } }, box);
                mma<T, TENSOR>(c[n + 1], x, mma_b{ { y.r[2], y.r[3] } }, box);
            }
        }
    }
}

template <class T, int D, int N, bool TENSOR>
__device__ inline void product_cols(mma_c *c, const mma_c *p, const T *b, uint32_t *box)
{
    const int ld = tile_pitch<T, D>::n;
    int lane = (int)(threadIdx.x % 32), g = lane / 4, t = lane % 4;
    if constexpr (sizeof(T) == 4) {
        float *x = reinterpret_cast<float *>(box); /* [16][8], 8 columns of p at a time */
#pragma unroll
        for (int n = 0; n < N; n++) {
            __syncwarp();
#pragma unroll
            for (int i = 0; i < 4; i++)
                x[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = p[n].r[i];
            __syncwarp();
#pragma unroll 1
            for (int k = 0; k < 8; k++) {
                float x0 = x[g * 8 + k], x1 = x[(g + 8) * 8 + k];
                const T *row = b + (8 * n + k) * ld + 2 * t;
#pragma unroll
                for (int d = 0; d < D / 8; d++) {
                    pack<T, 2> y = *reinterpret_cast<const pack<T, 2> *>(row + 8 * d);
                    c[d].r[0] += x0 * y.v[0];
                    c[d].r[1] += x0 * y.v[1];
                    c[d].r[2] += x1 * y.v[0];
                    c[d].r[3] += x1 * y.v[1];
                }
            }
        }
    } else {
        b += lane % 16 * ld + lane / 16 * 8;
#pragma unroll
        for (int k = 0; k < N; k += 2) {
            mma_a x = { { round_pair<T>(p[k].r[0], p[k].r[1]), round_pair<T>(p[k].r[2], p[k].r[3]),
                          round_pair<T>(p[k + 1].r[0], p[k + 1].r[1]),
                          round_pair<T>(p[k + 1].r[2], p[k + 1].r[3]) } };
#pragma unroll
            for (int d = 0; d < D / 8; d += 2) {
                mma_a y = ldmatrix<T, true, TENSOR>(b + 8 * k * ld + 8 * d, box);
                mma<T, TENSOR>(c[d], x, mma_b{ { y.r[0], y.r[1] } }, box);
                mma<T, TENSOR>(c[d + 1], x, mma_b{ { y.r[2], y.r[3] } }, box);
            }
        }
    }
}

/* Separate functions, so that kernels without biases and a soft cap keep their registers.  column: of the first number;
 * across: 1 if keys are in columns, -1 if queries are. */
__device__ inline LM_NOINLINE mma_c with_bias(mma_c c, const bias_table &b, int64_t h, int column,
                                              int across, float by)
{
#pragma unroll
    for (int i = 0; i < 4; i++)
        c.r[i] = fmaf(b.table[h * b.columns + bias_clamp(b, column + across * (i % 2 - i / 2 * 8))],
                      by, c.r[i]);
    return c;
}

/* N fragments of scores of head h; distance: key - query of the warp's first row and the first column. */
template <int N>
__device__ inline void add_biases(const attn_shape &s, mma_c *c, int64_t h, int distance,
                                  int across)
{
    if (!s.bias.table)
        return;
    const int lane = (int)threadIdx.x % 32;
    const int column = distance + s.bias.zero + across * (lane % 4 * 2 - lane / 4);
#pragma unroll
    for (int n = 0; n < N; n++)
        c[n] = with_bias(c[n], s.bias, h, column + across * 8 * n, across, s.bias_by);
}

__device__ inline LM_NOINLINE mma_c tanh_of(mma_c c, float by)
{
#pragma unroll
    for (int i = 0; i < 4; i++)
        c.r[i] = tanhf(c.r[i] * by);
    return c;
}

/* N fragments of scores: their tanh, where there is a soft cap. */
template <int N> __device__ inline void cap_scores(const attn_shape &s, mma_c *c)
{
    if (s.cap_by == 0)
        return;
#pragma unroll
    for (int n = 0; n < N; n++)
        c[n] = tanh_of(c[n], s.cap_by);
}

/* The factor of the soft cap in the gradient of a score, from the capped score. */
__device__ inline float cap_slope(const attn_shape &s, float score)
{
    return s.cap_by == 0 ? 1.0f : fmaf(-score, score, 1.0f);
}

/* Sum over the four lanes that share a row of sums. */
__device__ inline float quad_max(float x)
{
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ inline float quad_sum(float x)
{
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

/* One block for each of `jobs`, at most as many as a grid may have. */
inline unsigned attn_grid(int64_t jobs)
{
    const int64_t most = 1 << 30;
    return (unsigned)(jobs < most ? jobs : most);
}

/* ---- head sizes ---- */

/* CALL(D), D the compiled size that serves a head size up to 256.  Each size costs seconds of
 * compilation on every target, so the plain path has the smallest one, for small models, and fewer
 * of the others. */
#define LM_ATTN_FOR_DIM(tensor, dim, CALL) \
    do {                                   \
        if ((dim) <= 16 && !(tensor))      \
            CALL((tensor) ? 64 : 16);      \
        else if ((dim) <= 64)              \
            CALL(64);                      \
        else if ((dim) <= 96 && (tensor))  \
            CALL((tensor) ? 96 : 128);     \
        else if ((dim) <= 128)             \
            CALL(128);                     \
        else if ((dim) <= 192 && (tensor)) \
            CALL((tensor) ? 192 : 256);    \
        else                               \
            CALL(256);                     \
    } while (0)

/* The launchers: attention_forward.cuh and attention_backward.cuh, compiled for each type and path in a
 * few files of their own. */
template <class T, bool TENSOR> void attention_forward(const lm_call *c);
template <class T, bool TENSOR> void attention_backward(const lm_call *c);

#endif
