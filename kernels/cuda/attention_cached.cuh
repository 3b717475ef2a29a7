/* SPDX-License-Identifier: Apache-2.0 */
/* attention_cached.cuh -- shared by the kernels of cached attention: sizes, the keys visible to a
 * row, and the functions of each file. */
#ifndef LM_KERNELS_CUDA_ATTENTION_CACHED_CUH
#define LM_KERNELS_CUDA_ATTENTION_CACHED_CUH

#include "kernels/cuda/device.cuh"

extern "C" {
#include "kernels/attention.h"
}

enum { MOST_TILED = 256 }; /* larger heads are processed row by row */

struct cached {
    int64_t batch, seq, heads, kv_heads, room, window;
    int dim, group;
    bool causal;
    float scale, soft_cap; /* soft_cap 0: none */
    const int32_t *used, *fresh;
};

inline cached cached_of(const lm_call *call)
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
    c.causal = a->causal;
    c.scale = (float)a->scale;
    c.soft_cap = (float)a->soft_cap;
    c.used = in_ptr<const int32_t>(call, 1);
    c.fresh = in_ptr<const int32_t>(call, 2);
    return c;
}

__device__ inline int64_t qkv_pitch(const cached &c)
{
    return (c.heads + 2 * c.kv_heads) * c.dim;
}

/* Keys [start, end) that query i of sequence b sees; none for a row of padding. */
struct span {
    int64_t start, end;
};

__device__ inline span keys_of(const cached &c, int64_t b, int64_t i)
{
    int64_t used = c.used[b], fresh = c.fresh[b], at = used + i;
    span s = { 0, 0 };
    if (i >= fresh)
        return s;
    s.end = c.causal ? at + 1 : used + fresh;
    if (c.window > 0 && at - c.window + 1 > 0)
        s.start = at - c.window + 1;
    return s;
}

/* A score after the soft cap. */
__device__ inline float capped(const cached &c, float score)
{
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

/* attention_cached_tensor.cu: prompts by tensor cores, after their keys were appended. */
template <class T> void tensor_tiles(const lm_call *call, const cached &c, bool packed);

#endif
