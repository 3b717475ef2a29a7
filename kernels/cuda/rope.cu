/* SPDX-License-Identifier: Apache-2.0 */
/* rope.cu -- rotary position embedding, in place or from one array to another. */
#include "kernels/cuda/grid2d.cuh"

extern "C" {
#include "kernels/rope.h"
}

/* A row's work in packs of N elements: `half` pairs of packs for each head that is rotated; then,
 * unless in place (copied = 0), `kept` packs behind the rotated part of each of these heads, and
 * the value heads as they are.  All sizes but rotary are in packs, so that nvcc sees which
 * addresses are aligned. */
struct rope_shape {
    int64_t rows, rotary;
    uint32_t width, head, half, pairs, kept, kept_all, copied;
};

template <class T, int N>
__device__ inline void turn(const rope_shape &s, uint32_t k, float sign, const float *angle,
                            const pack<T, N> *x, pack<T, N> *y)
{
    uint32_t j = k % s.half, at = k / s.half * s.head + j;
    pack<T, N> u = x[at], v = x[at + s.half];
    const int M = N < 4 ? N : 4;
    typedef pack<float, M> angles;
    angles cs[N / M], sn[N / M];
#pragma unroll
    for (int m = 0; m < N / M; m++) {
        cs[m] = ((const angles *)angle)[j * (N / M) + m];
        sn[m] = ((const angles *)angle)[(s.half + j) * (N / M) + m];
    }
#pragma unroll
    for (int i = 0; i < N; i++) {
        float a = to_float(u.v[i]), b = to_float(v.v[i]), cosine = cs[i / M].v[i % M];
        float sine = sign * sn[i / M].v[i % M];
        u.v[i] = from_float<T>(a * cosine - b * sine);
        v.v[i] = from_float<T>(b * cosine + a * sine);
    }
    y[at] = u;
    y[at + s.half] = v;
}

template <class T, int N>
__global__ void rope_kernel(rope_shape s, float sign, const int32_t *pos, const float *table,
                            const T *x, T *y)
{
    typedef pack<T, N> part;
    int64_t r = grid2d_row(), place = r < s.rows ? pos[r] : 0;
#pragma unroll 1
    for (; r < s.rows; r += grid2d_rows()) {
        const float *angle = table + place * s.rotary;
        const part *from = (const part *)x + r * s.width;
        part *to = (part *)y + r * s.width;
        if (r + grid2d_rows() < s.rows) /* before the next row's angles are requested */
            place = pos[r + grid2d_rows()];
#pragma unroll 1
        for (int64_t i = grid2d_col(); i < s.pairs; i += grid2d_cols())
            turn(s, (uint32_t)i, sign, angle, from, to);
#pragma unroll 1
        for (int64_t i = grid2d_col(); i < s.copied; i += grid2d_cols()) {
            uint32_t k = (uint32_t)i, at = s.width - s.copied + k;
            if (k < s.kept_all)
                at = k / s.kept * s.head + 2 * s.half + k % s.kept;
            to[at] = from[at];
        }
    }
}

template <class T, int N> static void run_rope(const lm_call *c)
{
    const lm_rope_attr *a = (const lm_rope_attr *)c->attr;
    const T *x = in_ptr<const T>(c, 0);
    T *y = out_ptr<T>(c, 0);
    int64_t turned = a->heads + a->kv_heads;
    rope_shape s = {};
    s.rows = rows_of(&c->in[0]);
    s.rotary = a->rotary_dim;
    s.width = (uint32_t)(width_of(&c->in[0]) / N);
    s.head = (uint32_t)(a->head_dim / N);
    s.half = (uint32_t)(a->rotary_dim / 2 / N);
    s.pairs = (uint32_t)turned * s.half;
    if (x != y) {
        s.kept = s.head - 2 * s.half;
        s.kept_all = (uint32_t)turned * s.kept;
        s.copied = s.kept_all + (uint32_t)a->kv_heads * s.head;
    }
    grid2d over = grid2d_for(s.rows, s.pairs > s.copied ? s.pairs : s.copied, c->stream);
    LM_LAUNCH((rope_kernel<T, N>), over.grid, over.block, 0, c->stream, s,
              a->inverse ? -1.0f : 1.0f, in_ptr<const int32_t>(c, 1), in_ptr<const float>(c, 2), x,
              y);
}

template <class T> static void rope(const lm_call *c)
{
    const int n = wide<T>::n;
    const lm_rope_attr *a = (const lm_rope_attr *)c->attr;
    bool packed = packs<T>(n, a->head_dim, c->in[0].data, c->out[0].data) &&
                  a->rotary_dim % (2 * n) == 0 && packs<float>(4, a->rotary_dim, c->in[2].data);
    if (packed)
        run_rope<T, n>(c);
    else
        run_rope<T, 1>(c);
}

extern "C" const lm_kernel lm_rope_cuda_kernels[] = { LM_CUDA_ROWS("rope", rope, nullptr),
                                                      LM_CUDA_END };
