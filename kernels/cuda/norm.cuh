/* SPDX-License-Identifier: Apache-2.0 */
/* norm.cuh -- shared by the kernels of the norm family: the distribution of rows over threads, sums
 * of a row, and sums over rows.
 *
 * A row belongs to a group of threads (threadIdx.x; whole warps, at most GROUP), of which each has
 * the same columns of every row: packs of N, PACKS of them where rows are kept in registers.  A
 * block has blockDim.y groups and goes over the rows with a stride.  The whole next row is
 * requested before the current one is summed, so that memory does not idle: with GROUP threads a
 * multiprocessor has 1024 packs, 16 KiB, of each operand in flight. */
#ifndef LM_KERNELS_CUDA_NORM_CUH
#define LM_KERNELS_CUDA_NORM_CUH

#include "kernels/cuda/pair.cuh"

extern "C" {
#include "kernels/norm.h"
}

enum { GROUP = 512, PACKS = 2 };

/* ---- rows over threads, on the host ---- */

struct row_split {
    dim3 block;
    bool kept;     /* a thread keeps PACKS packs of a row; else it has more, and reads them again */
    int64_t there; /* blocks on a multiprocessor */
};

/* For rows of `units` packs; kept: in registers if they fit. */
static inline row_split lay_rows(int64_t units, bool kept)
{
    kept = kept && units <= PACKS * GROUP;
    int64_t per = kept ? (int64_t)PACKS : (units + GROUP - 1) / GROUP;
    int64_t group = units ? (units + per * 32 - 1) / (per * 32) * 32 : 32;
    int64_t groups = group < GROUP / 2 ? GROUP / 2 / group : 1;
    return row_split{ dim3((unsigned)group, (unsigned)groups), kept, GROUP / (group * groups) };
}

/* As many blocks as the device holds at once: each processes many rows, so that all end at about
 * the same time. */
static inline unsigned rows_grid(const row_split *l, int64_t rows, const lm_stream *s)
{
    int64_t blocks = (rows + l->block.y - 1) / l->block.y, most = l->there * s->sms;
    return (unsigned)(blocks < 1 ? 1 : blocks < most ? blocks : most);
}

/* ---- packs ---- */

/* N numbers of a row in their own type, as the words that they are read in: an array of 16-bit
 * numbers would take a register each. */
template <class T, int N> struct held {
    static const int n = (N * (int)sizeof(T) + 3) / 4;
    uint32_t w[n];
};

/* Read in one access. */
template <class T, int N> static __device__ inline held<T, N> load(const T *p)
{
    held<T, N> h;
    static_assert(held<T, N>::n == 1 || held<T, N>::n == 4, "one number, or 16 bytes");
    if (N * sizeof(T) == 2) {
        h.w[0] = *reinterpret_cast<const uint16_t *>(p);
    } else if (N * sizeof(T) == 4) {
        h.w[0] = *reinterpret_cast<const uint32_t *>(p);
    } else {
        uint4 v = *reinterpret_cast<const uint4 *>(p);
        const uint32_t w[4] = { v.x, v.y, v.z, v.w };
        for (int i = 0; i < held<T, N>::n; i++)
            h.w[i] = w[i];
    }
    return h;
}

/* By an intrinsic, as the compiler splits the assignment of 16 bytes. */
template <class T, int N> static __device__ inline void store(T *p, const held<T, N> &h)
{
    const int last = held<T, N>::n - 1;
    if (N * sizeof(T) == 2)
        *reinterpret_cast<uint16_t *>(p) = (uint16_t)h.w[0];
    else if (N * sizeof(T) == 4)
        *reinterpret_cast<uint32_t *>(p) = h.w[0];
    else
        __stcg(reinterpret_cast<uint4 *>(p),
               make_uint4(h.w[0], h.w[last / 3], h.w[last / 3 * 2], h.w[last]));
}

/* The j-th number. */
template <class T, int N> static __device__ inline float nth(const held<T, N> &h, int j)
{
    return j % 2 ? high<T>(h.w[j / 2]) : low<T>(h.w[j / 2]);
}
template <int N> static __device__ inline float nth(const held<float, N> &h, int j)
{
    return __uint_as_float(h.w[j]);
}

/* x rounded to T. */
template <class T, int N> static __device__ inline void hold(held<T, N> *h, const float (&x)[N])
{
    for (int j = 0; j < N; j += 2)
        h->w[j / 2] = round_pair<T>(x[j], j + 1 < N ? x[j + 1] : 0);
}
template <int N> static __device__ inline void hold(held<float, N> *h, const float (&x)[N])
{
    for (int j = 0; j < N; j++)
        h->w[j] = __float_as_uint(x[j]);
}

/* F32 numbers beside a row, in packs of 4 where N allows. */
template <int N> static __device__ inline void load_floats(float (&out)[N], const float *p)
{
    const int M = N % 4 ? 1 : 4;
    for (int j = 0; j < N; j += M) {
        pack<float, M> v = *reinterpret_cast<const pack<float, M> *>(p + j);
        for (int k = 0; k < M; k++)
            out[j + k] = v.v[k];
    }
}

/* Weights in use: with plus_one 1 + w. */
template <int N>
static __device__ inline void load_weights(float (&out)[N], const float *p, bool plus_one)
{
    load_floats<N>(out, p);
    for (int j = 0; plus_one && j < N; j++)
        out[j] += 1;
}

template <int N> static __device__ inline void store_floats(float *p, const float (&x)[N])
{
    const int M = N % 4 ? 1 : 4;
    for (int j = 0; j < N; j += M) {
        pack<float, M> v;
        for (int k = 0; k < M; k++)
            v.v[k] = x[j + k];
        *reinterpret_cast<pack<float, M> *>(p + j) = v;
    }
}

/* Packs of each operand in flight in a thread that reads rows again. */
enum { FLIGHT = 4 };

/* ---- sums of a row ---- */

/* Sum *a, and *b if wanted, over each group of the block; every thread of a group gets the same
 * bits.  All threads of the block call it.  `turn` starts at 0 and is changed only here: successive
 * calls store their sums in different places, so one barrier is enough.  After it each thread adds
 * the few sums of the warps itself, which is faster than another exchange between lanes. */
static __device__ inline void row_sums(float *a, float *b, bool want_b, int *turn)
{
    typedef pack<float, 2> two;
    __shared__ two part[2][GROUP / 32];
    const int warps = (int)blockDim.x / 32, first = (int)threadIdx.y * warps;
    two x = { { warp_sum(*a), want_b ? warp_sum(*b) : 0 } };
    if (warps > 1) {
        two *mine = part[*turn] + first;
        if (threadIdx.x % 32 == 0)
            mine[threadIdx.x / 32] = x;
        __syncthreads();
        x = mine[0];
#pragma unroll 4
        for (int w = 1; w < warps; w++) {
            two y = mine[w];
            x.v[0] += y.v[0];
            x.v[1] += y.v[1];
        }
        *turn ^= 1;
    }
    *a = x.v[0];
    *b = want_b ? x.v[1] : *b;
}

/* ---- sums over rows: parts of them, then the parts in order ---- */

/* Columns of c->work [parts][width], or [parts][2][width] when there is out1, to the outputs. */
void lm_cuda_fold(const lm_call *c, int64_t parts, int64_t width, float *out0, float *out1,
                  lm_acc acc);
/* The same if the second output has `more` columns instead of as many as the first. */
void lm_cuda_fold_unlike(const lm_call *c, int64_t parts, int64_t width, int64_t more, float *out0,
                         float *out1, lm_acc acc);

#endif
