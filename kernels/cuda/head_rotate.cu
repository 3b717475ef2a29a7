/* SPDX-License-Identifier: Apache-2.0 */
/* head_rotate.cu -- heads times a Hadamard matrix (kernels/kv.h), in place or from one array to another.
 *
 * A block of B numbers lies in the registers of up to 32 lanes, E in each: number i is at bit positions (pack, lane, number
 * in the pack), from the highest on.  The butterflies over bits of packs and numbers stay in a lane, those over bits of lanes
 * are shuffles.  Heads of up to 256 numbers take at most 8 in a lane, about 32 registers; 1024 take 32, 128 registers. */
#include "kernels/cuda/device.cuh"

extern "C" {
#include "kernels/kv.h"
}

struct rotation {
    int64_t rows;
    uint32_t heads, turned[3]; /* of a row; the ends of q, k, v among them */
    bool turn[3], in_place;
    uint32_t blocks, lanes; /* blocks of a head; lanes of a block, a power of two */
    uint32_t dim, part;     /* numbers of a head; those of its blocks */
    float scale;
};

static __device__ inline bool turns(const rotation &r, uint32_t head)
{
    return head < r.turned[0] ? r.turn[0] : head < r.turned[1] ? r.turn[1] : r.turn[2];
}

/* All butterflies of a block; every lane of the warp calls it. */
template <int E, int N> static __device__ inline void hadamard(float *v, uint32_t lanes)
{
#pragma unroll
    for (int o = 1; o < E; o *= 2) {
#pragma unroll
        for (int i = 0; i < E; i++)
            if (!(i & o)) {
                float a = v[i], b = v[i + o];
                v[i] = a + b;
                v[i + o] = a - b;
            }
    }
#pragma unroll 1
    for (uint32_t o = 1; o < lanes; o *= 2) {
        const bool high = threadIdx.x & o;
#pragma unroll
        for (int i = 0; i < E; i++) {
            float other = __shfl_xor_sync(0xffffffffu, v[i], (int)o);
            v[i] = high ? other - v[i] : v[i] + other;
        }
    }
}

/* E numbers of a lane in packs of N.  Lanes without a block take part in shuffles alone. */
template <class T, int E, int N>
static __global__ void __launch_bounds__(256) head_rotate_kernel(rotation r, const T *x, T *y)
{
    typedef pack<T, N> part;
    const uint32_t lane = threadIdx.x % r.lanes;
    const int64_t all = r.rows * r.heads * r.blocks, step = global_threads() / r.lanes;
    const int64_t first = global_thread() / r.lanes,
                  warp = (global_thread() - threadIdx.x % 32) / r.lanes;
#pragma unroll 1
    for (int64_t w = warp, i = first; w < all; w += step, i += step) {
        const bool turn = i < all && turns(r, (uint32_t)(i / r.blocks % r.heads));
        const bool there = i < all && (turn || !r.in_place);
        const int64_t at =
            i / r.blocks * (r.dim / N) + i % r.blocks * (int64_t)(r.lanes * E / N) + lane;
        float v[E];
#pragma unroll
        for (int m = 0; m < E / N; m++) {
            part p = {};
            if (there)
                p = ((const part *)x)[at + m * r.lanes];
            if (there && !turn)
                ((part *)y)[at + m * r.lanes] = p;
#pragma unroll
            for (int e = 0; e < N; e++)
                v[m * N + e] = to_float(p.v[e]);
        }
        hadamard<E, N>(v, r.lanes);
#pragma unroll
        for (int m = 0; m < E / N; m++) {
            part p;
#pragma unroll
            for (int e = 0; e < N; e++)
                p.v[e] = from_float<T>(v[m * N + e] * r.scale);
            if (there && turn)
                ((part *)y)[at + m * r.lanes] = p;
        }
    }
}

/* The numbers of heads behind their blocks. */
template <class T>
static __global__ void __launch_bounds__(256) copy_rest_kernel(rotation r, const T *x, T *y)
{
    const uint32_t rest = r.dim - r.part;
    const int64_t all = r.rows * r.heads * rest;
#pragma unroll 1
    for (int64_t i = global_thread(); i < all; i += global_threads()) {
        const int64_t at = i / rest * r.dim + r.part + i % rest;
        y[at] = x[at];
    }
}

template <class T, int E, int N> static void run(const lm_call *c, const rotation &r)
{
    int64_t threads = r.rows * r.heads * r.blocks * r.lanes;
    LM_LAUNCH((head_rotate_kernel<T, E, N>), grid_for(threads, 256, c->stream), 256, 0, c->stream,
              r, in_ptr<const T>(c, 0), out_ptr<T>(c, 0));
}

/* Blocks of B numbers by the fewest registers: at most 32 lanes. */
template <class T, int N> static void run_block(const lm_call *c, rotation r, int64_t B)
{
    const int64_t E = B <= 32 * N ? N : B / 32;
    r.lanes = (uint32_t)(B / E);
    if (E == N)
        run<T, N, N>(c, r);
    else if (E == 2 && N < 2)
        run < T, N<2 ? 2 : N, N>(c, r);
    else if (E == 4 && N < 4)
        run < T, N<4 ? 4 : N, N>(c, r);
    else if (E == 8 && N < 8)
        run < T, N<8 ? 8 : N, N>(c, r);
    else if (E == 16)
        run<T, 16, N>(c, r);
    else
        run<T, 32, N>(c, r);
}

template <class T> static void head_rotate(const lm_call *c)
{
    const int n = wide<T>::n;
    const lm_head_rotate_attr *a = (const lm_head_rotate_attr *)c->attr;
    const int64_t part = lm_head_rotate_part(a), B = part & -part;
    rotation r = {};
    r.rows = rows_of(&c->in[0]);
    r.heads = (uint32_t)(a->heads + 2 * a->kv_heads);
    r.turned[0] = (uint32_t)a->heads;
    r.turned[1] = (uint32_t)(a->heads + a->kv_heads);
    r.turned[2] = r.heads;
    r.turn[0] = a->q;
    r.turn[1] = a->k;
    r.turn[2] = a->v;
    r.in_place = c->in[0].data == c->out[0].data;
    r.blocks = (uint32_t)(part / B);
    r.dim = (uint32_t)a->head_dim;
    r.part = (uint32_t)part;
    r.scale = (float)(1 / sqrt((double)B));
    if (packs<T>(n, B, c->in[0].data, c->out[0].data) && a->head_dim % n == 0)
        run_block<T, n>(c, r, B);
    else
        run_block<T, 1>(c, r, B);
    if (r.part < r.dim && !r.in_place)
        LM_LAUNCH((copy_rest_kernel<T>),
                  grid_for(r.rows * r.heads * (r.dim - r.part), 256, c->stream), 256, 0, c->stream,
                  r, in_ptr<const T>(c, 0), out_ptr<T>(c, 0));
}

extern "C" const lm_kernel lm_head_rotate_cuda_kernels[] = {
    LM_CUDA_ROWS("head_rotate", head_rotate, nullptr), LM_CUDA_END
};
