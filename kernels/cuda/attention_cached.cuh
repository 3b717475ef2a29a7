/* SPDX-License-Identifier: Apache-2.0 */
/* attention_cached.cuh -- shared by the kernels of cached attention: sizes, the keys visible to a
 * row, and the functions of each file. */
#ifndef LM_KERNELS_CUDA_ATTENTION_CACHED_CUH
#define LM_KERNELS_CUDA_ATTENTION_CACHED_CUH

#include "kernels/cuda/attention_bias.cuh"
#include "kernels/cuda/attention_blocks.cuh"
#include "kernels/cuda/attention_sink.cuh"
#include "kernels/cuda/device.cuh"

extern "C" {
#include "kernels/attention.h"
}

/* Larger heads are processed row by row; prompts among ragged rows by wider tiles, up to MOST_WIDE. */
enum { MOST_TILED = 256, MOST_WIDE = 1024 };

struct cached {
    int64_t batch, seq, heads, kv_heads, room, window;
    int dim, vdim, group; /* vdim: of values */
    int vline;            /* from one value of a cache to the next */
    bool causal, undivided;
    bool shared;           /* keys hold the values */
    bool reads;            /* nothing is appended */
    float scale, soft_cap; /* soft_cap 0: none */
    const int32_t *used, *fresh;
    /* ragged rows and pages (kernels/attention.h); null: absent */
    const int32_t *first, *kind, *table;
    int64_t rows;    /* of qkv */
    int page, width; /* positions of a page; pages of a sequence */
    float *lse;
    const float *sinks;
    bias_table bias;
    block_mask blocks;
};

/* The operand that the sinks are, of attention_cached and of attention_step, and the bias of the former; -1: none. */
enum { CACHED_SINKS = 6, STEP_SINKS = 7, CACHED_BIAS = 7, STEP_BIAS = -1 };

inline cached cached_of(const lm_call *call, int sinks, int bias)
{
    const lm_attention_attr *a = (const lm_attention_attr *)call->attr;
    cached c = {};
    c.batch = a->batch;
    c.seq = a->seq;
    c.heads = a->heads;
    c.kv_heads = a->kv_heads;
    c.group = (int)(a->heads / a->kv_heads);
    c.room = call->out[1].dim[2];
    c.window = a->window;
    c.dim = (int)a->head_dim;
    c.vdim = (int)lm_attention_value_dim(a);
    c.shared = call->out[2].ndim == 0;
    c.vline = c.shared ? c.dim : c.vdim;
    c.causal = a->causal;
    c.undivided = a->undivided;
    c.reads = a->reads;
    c.scale = (float)a->scale;
    c.soft_cap = (float)a->soft_cap;
    c.used = in_ptr<const int32_t>(call, 1);
    c.fresh = in_ptr<const int32_t>(call, 2);
    c.rows = call->in[0].dim[0];
    c.page = (int)call->out[1].dim[2];
    c.width = 1;
    c.sinks = in_ptr<const float>(call, sinks);
    if (bias >= 0)
        c.bias = bias_of(call, bias, a);
    c.blocks = blocks_of(a);
    return c;
}

/* The size of tiles that hold both keys and values. */
inline int widest(const cached &c)
{
    return c.dim > c.vdim ? c.dim : c.vdim;
}

/* The cache that holds the values. */
template <class T> inline T *cached_values(const lm_call *call)
{
    return out_ptr<T>(call, call->out[2].ndim ? 2 : 1);
}

/* The operands of attention_cached alone. */
inline cached served_of(const lm_call *call)
{
    cached c = cached_of(call, CACHED_SINKS, CACHED_BIAS);
    c.first = in_ptr<const int32_t>(call, 3);
    c.kind = in_ptr<const int32_t>(call, 4);
    c.table = in_ptr<const int32_t>(call, 5);
    c.lse = out_ptr<float>(call, 3);
    if (call->n_in > 5 && call->in[5].ndim) {
        c.width = (int)call->in[5].dim[1];
        c.room = c.page * (int64_t)c.width;
    }
    return c;
}

/* Rows are ragged, positions in pages, or lse is wanted: kernels run in their SERVED instance.  There are shapes alone for work(). */
inline bool is_served(const lm_call *call)
{
    return (call->n_in > 3 && call->in[3].ndim) || (call->n_in > 5 && call->in[5].ndim) ||
           (call->n_out > 3 && call->out[3].ndim);
}

/* The first row of sequence b. */
template <bool SERVED> __device__ inline int64_t first_of(const cached &c, int64_t b)
{
    return SERVED && c.first ? c.first[b] : b * c.seq;
}

/* The sequence of a row: that of the last first row at or before it; batch if the row belongs to none. */
template <bool SERVED> __device__ inline int64_t sequence_of(const cached &c, int64_t row)
{
    if (!SERVED || !c.first)
        return row / c.seq;
    if (row >= c.first[c.batch])
        return c.batch;
    int64_t lo = 0, hi = c.batch;
    while (hi - lo > 1) {
        int64_t mid = (lo + hi) / 2;
        if (c.first[mid] <= row)
            lo = mid;
        else
            hi = mid;
    }
    return lo;
}

/* Sides of a cache. */
enum { OF_KEYS, OF_VALUES };

/* Numbers from one line of a side to the next. */
template <int SIDE> __device__ inline int line_of(const cached &c)
{
    return SIDE == OF_KEYS ? c.dim : c.vline;
}

/* The element of a side at which position j of sequence b begins, for key/value head kv. */
template <bool SERVED, int SIDE>
__device__ inline int64_t cache_at(const cached &c, int64_t b, int64_t kv, int64_t j)
{
    if (!SERVED || !c.table)
        return ((b * c.kv_heads + kv) * c.room + j) * line_of<SIDE>(c);
    const int at = (int)j, page = at / c.page;
    return (((int64_t)c.table[b * c.width + page] * c.kv_heads + kv) * c.page + at % c.page) *
           line_of<SIDE>(c);
}

/* Keys or values of a sequence and key/value head, counted from one of its positions on. */
template <class T, bool SERVED, int SIDE> struct cache_lines {
    T *x; /* of that position; SERVED: of the cache */
    int64_t b, kv, from;
    __device__ inline T *at(const cached &c, int64_t j) const
    {
        if constexpr (SERVED)
            return x + cache_at<true, SIDE>(c, b, kv, from + j);
        else
            return x + j * line_of<SIDE>(c);
    }
};

template <bool SERVED, int SIDE, class T>
__device__ inline cache_lines<T, SERVED, SIDE> lines_of(const cached &c, T *cache, int64_t b,
                                                        int64_t kv, int64_t from)
{
    if constexpr (SERVED)
        return { cache, b, kv, from };
    else
        return { cache + cache_at<false, SIDE>(c, b, kv, from), b, kv, from };
}

__host__ __device__ inline int64_t qkv_pitch(const cached &c)
{
    if (c.reads)
        return c.heads * c.dim;
    return (c.heads + c.kv_heads) * c.dim + (c.shared ? 0 : c.kv_heads * c.vdim);
}

/* Positions of a sequence that the caches hold once the new ones are appended. */
__device__ inline int64_t held_of(const cached &c, int64_t b)
{
    return c.used[b] + (c.reads ? 0 : c.fresh[b]);
}

/* Keys [start, end) that query i of sequence b sees; none for a row of padding. */
struct span {
    int64_t start, end;
};

__device__ inline span keys_of(const cached &c, int64_t b, int64_t i)
{
    const int64_t at = c.used[b] + i, held = held_of(c, b);
    span s = { 0, 0 };
    if (i >= c.fresh[b])
        return s;
    s.end = c.causal || c.window <= 0 ? held : at + c.window;
    s.end = c.causal ? at + 1 : s.end < held ? s.end : held;
    if (c.window > 0 && at - c.window + 1 > 0)
        s.start = at - c.window + 1;
    return s;
}

/* Tiles of rows for prompts in their SERVED instance: of all rows where they are ragged, else of each sequence. */
__host__ __device__ inline int64_t tiles_of_rows(const cached &c, int most)
{
    return c.first ? (c.rows + most - 1) / most : c.batch * ((c.seq + most - 1) / most);
}

/* The pieces of a tile, of one sequence each: rows i0.. of b, of which `rows` are real and `all` are to be stored. */
struct tile_walk {
    int64_t b, i0, at, end; /* at: the next row of qkv; end: of the tile */
    int rows, all;
};

__device__ inline tile_walk walk_tile(const cached &c, int64_t tile, int most)
{
    tile_walk w = {};
    if (c.first) {
        w.at = tile * most;
        w.end = w.at + most < c.rows ? w.at + most : c.rows;
        return w;
    }
    const int64_t tiles = (c.seq + most - 1) / most, i0 = tile % tiles * most;
    w.at = tile / tiles * c.seq + i0;
    w.end = w.at + (c.seq - i0 < most ? c.seq - i0 : most);
    return w;
}

/* Go on to the next piece of the tile; false at its end.  Of ragged rows only those of prompts, without padding. */
__device__ inline bool next_piece(const cached &c, tile_walk &w)
{
    while (w.at < w.end) {
        w.b = sequence_of<true>(c, w.at);
        if (w.b == c.batch)
            return false;
        const int64_t first = first_of<true>(c, w.b);
        int64_t end = c.first && c.first[w.b + 1] < w.end ? c.first[w.b + 1] : w.end;
        w.i0 = w.at - first;
        w.all = (int)(end - w.at);
        w.at = end;
        const int64_t left = c.fresh[w.b] - w.i0;
        w.rows = left < 0 ? 0 : left < w.all ? (int)left : w.all;
        if (!c.first)
            return true;
        w.all = w.rows;
        if (w.rows && c.kind[w.b] == LM_ROWS_PROMPT)
            return true;
    }
    return false;
}

/* A score of query row i of sequence b and head h with the key at position j, which is not behind it, after the blocks,
 * the bias and the soft cap. */
__device__ inline float capped(const cached &c, float score, int64_t b, int64_t i, int64_t h, int j)
{
    if (c.blocks.size && !sees_key(c.blocks, (int)h, c.used[b] + (int)i, j))
        return -INFINITY;
    if (c.bias.table)
        score += bias_at(c.bias, h, j - c.used[b] - i);
    return c.soft_cap > 0 ? c.soft_cap * tanhf(score / c.soft_cap) : score;
}

template <class T, int N> __device__ inline pack<T, N> load(const T *p)
{
    return *reinterpret_cast<const pack<T, N> *>(p);
}

template <class T, int N> __device__ inline void store(T *p, const pack<T, N> &v)
{
    *reinterpret_cast<pack<T, N> *>(p) = v;
}

/* Four numbers of a row in shared memory, and their part of a product of rows. */
typedef pack<float, 4> four;

__device__ inline float dot(four a, four b, float sum)
{
#pragma unroll
    for (int e = 0; e < 4; e++)
        sum = fmaf(a.v[e], b.v[e], sum);
    return sum;
}

/* A softmax whose scores so far are all -inf counts from 0: exp gives zeros, not NaN. */
__device__ inline float base_of(float max)
{
    return max == -INFINITY ? 0.0f : max;
}

/* The operators on the query and key heads of a row before attention; null: none. */
struct row_front {
    const int32_t *pos;
    const float *table, *wq, *wk;
    int rotary;
    float eps;
    bool plus_one;
};

/* attention_step.cu: row by row.  With one row a sequence attend_rows appends its key and value;
 * with more rows they are in the cache already.  Scratch SIZE_MAX: the heads are too wide. */
size_t attend_rows_work(const cached &c);
template <class T>
void attend_rows(const lm_call *call, const cached &c, const row_front &front, bool packed);
/* The SERVED instance: of ragged rows those of new tokens. */
template <class T> void attend_served_rows(const lm_call *call, const cached &c, bool packed);

/* kv_attention.cu: prompts among ragged rows whose heads are too wide for tiles, up to MOST_WIDE, after their keys were
 * appended. */
template <class T> void attend_wide_prompts(const lm_call *call, const cached &c, bool packed);

/* attention_cached_tensor.cu: prompts by tensor cores, after their keys were appended. */
template <class T> void tensor_tiles(const lm_call *call, const cached &c, bool packed);

#endif
