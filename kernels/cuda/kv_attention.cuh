/* SPDX-License-Identifier: Apache-2.0 */
/* kv_attention.cuh -- shared by the kernels of kv_attention: a call's rows and sides, and the functions of each file. */
#ifndef LM_KERNELS_CUDA_KV_ATTENTION_CUH
#define LM_KERNELS_CUDA_KV_ATTENTION_CUH

#include "kernels/cuda/kv_tile.cuh"

enum { THREADS = 128, PART = 128 }; /* of a block; tokens of a part */

enum {
    QKV,
    USED,
    FRESH,
    FIRST,
    KIND,
    TABLE,
    KEYS,
    VALUES,
    SLOT,
    KTAIL,
    VTAIL,
    ROPE,
    PLACE,
    SINKS,
    BIAS
};

struct kv_attending {
    kv_rows r;
    kv_side side[2];
    int64_t parts, seq;     /* of new tokens: parts of the room, rows of a sequence */
    float *out, *max, *sum; /* partial results by row of new tokens, head and part */
    /* cached keys are rotated by rows of `rope` (R numbers): those of `place` [B,places], or of tokens */
    const float *rope;
    const int32_t *place;
    int rotary, places;
    int tables[2]; /* numbers of shared memory */
    bool packed;
};

/* Some queries of one sequence and key/value head: number q is row i0 + q / heads, head h + q % heads. */
struct kv_queries {
    int64_t b, h, row; /* row: of qkv, of query 0 */
    int i0, n, heads;
};

/* Rotate the cached keys among tokens [j0, j0 + n) of a tile; behind a barrier. */
template <class S>
static __device__ inline void rotate_keys(const kv_attending &a, int64_t b, int j0, int n, S *keys,
                                          int ld)
{
    const int half = a.rotary / 2, used = a.r.used[b], end = used - j0 < n ? used - j0 : n;
#pragma unroll 1
    for (int i = (int)threadIdx.x; i < end * half; i += THREADS) {
        const int row = i / half, d = i % half, j = j0 + row;
        const int64_t at = a.place ? a.place[b * a.places + j] : j;
        const float c = a.rope[at * a.rotary + d], s = a.rope[at * a.rotary + half + d];
        S *x = keys + row * ld + d;
        const float u = to_float(x[0]), v = to_float(x[half]);
        x[0] = from_float<S>(u * c - v * s);
        x[half] = from_float<S>(v * c + u * s);
    }
}

/* Row i of new tokens: its sequence and its place there; a ragged sequence has at most one. */
struct kv_token {
    int64_t b, i, row;
    bool real;
};

static __device__ inline kv_token token_at(const kv_attending &a, int64_t i)
{
    kv_token t = { i / a.seq, i % a.seq, 0, false };
    t.row = first_of<true>(a.r, t.b) + t.i;
    t.real = t.i < a.r.fresh[t.b] && (!a.r.first || a.r.kind[t.b] == LM_ROWS_TOKEN);
    return t;
}

/* With LM_CUDA=tensor, where these serve a call's formats and head; otherwise false, and nothing is launched.
 * kv_attention_tensor.cu: prompts by tensor cores.  kv_attention_integer.cu: partial results of new tokens by
 * products of integers. */
template <class T> bool kv_tensor_prompts(const lm_call *call, const kv_attending &a);
template <class T> bool kv_integer_parts(const lm_call *call, const kv_attending &a);

#endif
