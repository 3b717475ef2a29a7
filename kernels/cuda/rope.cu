/* rope.cu -- rotary position embedding, in place or from one array to another. */
#include "kernels/cuda/plane.cuh"

extern "C" {
#include "kernels/rope.h"
}

/* A row is `all` heads of which the first `turned` are rotated.  Its work in packs of N elements: per
 * rotated head `half` pairs of packs; then, unless in place (copied = 0), `kept` packs behind the
 * rotated part of each of these heads, and the value heads as they are. */
struct rope_shape {
    int64_t rows, width, head, half_dim, rotary;
    uint32_t pairs, half, kept, kept_all, copied;
};

template <class T, int N>
__device__ inline void turn(const rope_shape &s, uint32_t k, float sign, const float *angle,
                            const T *x, T *y)
{
    typedef pack<T, N> part;
    int64_t j = (int64_t)(k % s.half) * N, at = (int64_t)(k / s.half) * s.head + j;
    part u = *(const part *)(x + at), v = *(const part *)(x + at + s.half_dim);
    const int M = N < 4 ? N : 4;
    typedef pack<float, M> angles;
#pragma unroll
    for (int m = 0; m < N; m += M) {
        angles cs = *(const angles *)(angle + j + m);
        angles sn = *(const angles *)(angle + s.half_dim + j + m);
#pragma unroll
        for (int i = 0; i < M; i++) {
            float a = to_float(u.v[m + i]), b = to_float(v.v[m + i]);
            float w = sign * sn.v[i];
            u.v[m + i] = from_float<T>(a * cs.v[i] - b * w);
            v.v[m + i] = from_float<T>(b * cs.v[i] + a * w);
        }
    }
    *(part *)(y + at) = u;
    *(part *)(y + at + s.half_dim) = v;
}

template <class T, int N>
__global__ void rope_kernel(rope_shape s, float sign, const int32_t *pos, const float *table,
                            const T *x, T *y)
{
    typedef pack<T, N> part;
    uint32_t items = s.pairs + s.copied;
#pragma unroll 1
    for (int64_t r = plane_row(); r < s.rows; r += plane_rows()) {
        const float *angle = table + (int64_t)pos[r] * s.rotary;
        const T *from = x + r * s.width;
        T *to = y + r * s.width;
#pragma unroll 1
        for (int64_t i = plane_col(); i < items; i += plane_cols()) {
            uint32_t k = (uint32_t)i;
            if (k < s.pairs) {
                turn<T, N>(s, k, sign, angle, from, to);
                continue;
            }
            k -= s.pairs;
            int64_t at;
            if (k < s.kept_all)
                at = (int64_t)(k / s.kept) * s.head + s.rotary + (int64_t)(k % s.kept) * N;
            else
                at = s.width - (int64_t)(s.copied - k) * N;
            *(part *)(to + at) = *(const part *)(from + at);
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
    s.width = width_of(&c->in[0]);
    s.head = a->head_dim;
    s.half_dim = a->rotary_dim / 2;
    s.rotary = a->rotary_dim;
    s.half = (uint32_t)(s.half_dim / N);
    s.pairs = (uint32_t)turned * s.half;
    if (x != y) {
        s.kept = (uint32_t)((a->head_dim - a->rotary_dim) / N);
        s.kept_all = (uint32_t)turned * s.kept;
        s.copied = s.kept_all + (uint32_t)(a->kv_heads * a->head_dim / N);
    }
    plane p = plane_for(s.rows, (int64_t)s.pairs + s.copied, c->stream);
    LM_LAUNCH((rope_kernel<T, N>), p.grid, p.block, 0, c->stream, s, a->inverse ? -1.0f : 1.0f,
              in_ptr<const int32_t>(c, 1), in_ptr<const float>(c, 2), x, y);
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
