/* SPDX-License-Identifier: Apache-2.0 */
/* latent.cu -- rows of latent attention (kernels/latent.h): a thread a number of a row,
 * neighbouring threads neighbouring numbers; sums over latents by a warp. */
#include "kernels/cuda/device.cuh"

extern "C" {
#include "kernels/latent.h"
}

enum { BLOCK = 256 };

template <class T> struct latent_args {
    lm_latent_attr a;
    int64_t rows;
    const T *q, *kv, *k, *c, *w, *dy, *z;
    const int32_t *pos;
    const float *table;
    T *y, *dq, *dkv, *dk;
};

/* Of number j of R: its partner, and whether it is the first of the pair. */
__device__ inline bool is_first(const lm_latent_attr &a, int64_t j)
{
    return a.pairs ? j % 2 == 0 : j < a.rotary_dim / 2;
}

__device__ inline int64_t partner_of(const lm_latent_attr &a, int64_t j)
{
    int64_t step = a.pairs ? 1 : a.rotary_dim / 2;
    return is_first(a, j) ? j + step : j - step;
}

/* Number j of the rotation of x, whose partner there is `other`; sign -1: back. */
template <class T>
__device__ inline float turned(const latent_args<T> &s, int64_t row, int64_t j, float sign, float x,
                               float other)
{
    int64_t half = s.a.rotary_dim / 2;
    int64_t at = s.pos[row] * s.a.rotary_dim + (s.a.pairs ? j / 2 : j % half);
    float sine = sign * s.table[at + half];
    return x * s.table[at] + (is_first(s.a, j) ? -other : other) * sine;
}

template <class T>
__device__ inline T turned_at(const latent_args<T> &s, int64_t row, int64_t j, float sign,
                              const T *x)
{
    return from_float<T>(turned(s, row, j, sign, to_float(x[j]), to_float(x[partner_of(s.a, j)])));
}

template <class T> static __global__ void __launch_bounds__(BLOCK) rows_kernel(latent_args<T> s)
{
    int64_t H = s.a.heads, A = s.a.content_dim, R = s.a.rotary_dim, E = s.a.value_dim, D = A + R;
    int64_t width = 2 * H * D + H * E;
    for (int64_t i = global_thread(); i < s.rows * width; i += global_threads()) {
        int64_t row = i / width, at = i % width, h = at % (H * D) / D, j = at % D;
        if (at >= 2 * H * D) {
            at -= 2 * H * D;
            s.y[i] = s.kv[(row * H + at / E) * (A + E) + A + at % E];
        } else if (at < H * D) {
            const T *q = s.q + (row * H + h) * D;
            s.y[i] = j < A ? q[j] : turned_at(s, row, j - A, 1.0f, q + A);
        } else {
            s.y[i] = j < A ? s.kv[(row * H + h) * (A + E) + j]
                           : turned_at(s, row, j - A, 1.0f, s.k + row * R);
        }
    }
}

template <class T>
__device__ inline float sum_heads(const latent_args<T> &s, const T *keys, int64_t j)
{
    float sum = 0;
    for (int64_t h = 0; h < s.a.heads; h++)
        sum += to_float(keys[h * (s.a.content_dim + s.a.rotary_dim) + s.a.content_dim + j]);
    return sum;
}

template <class T> static __global__ void __launch_bounds__(BLOCK) back_kernel(latent_args<T> s)
{
    int64_t H = s.a.heads, A = s.a.content_dim, R = s.a.rotary_dim, E = s.a.value_dim, D = A + R;
    int64_t width = 2 * H * D + H * E, queries = H * D, both = queries + H * (A + E);
    for (int64_t i = global_thread(); i < s.rows * (both + R); i += global_threads()) {
        int64_t row = i / (both + R), at = i % (both + R);
        const T *dy = s.dy + row * width, *keys = dy + queries, *values = keys + queries;
        if (at < queries) {
            int64_t h = at / D, j = at % D;
            if (s.dq)
                s.dq[row * queries + at] =
                    j < A ? dy[at] : turned_at(s, row, j - A, -1.0f, dy + h * D + A);
        } else if (at < both) {
            at -= queries;
            int64_t h = at / (A + E), j = at % (A + E);
            if (s.dkv)
                s.dkv[row * (both - queries) + at] =
                    j < A ? keys[h * D + j] : values[h * E + j - A];
        } else if (s.dk) {
            int64_t j = at - both;
            float x = sum_heads(s, keys, j), other = sum_heads(s, keys, partner_of(s.a, j));
            s.dk[row * R + j] = from_float<T>(turned(s, row, j, -1.0f, x, other));
        }
    }
}

template <class T> static __global__ void __launch_bounds__(BLOCK) queries_kernel(latent_args<T> s)
{
    int64_t H = s.a.heads, A = s.a.content_dim, R = s.a.rotary_dim, L = s.a.latent_dim;
    int64_t width = (H + 1) * (L + R);
    for (int64_t i = global_thread(); i < s.rows * width; i += global_threads()) {
        int64_t row = i / width, h = i % width / (L + R), j = i % (L + R);
        const T *q = s.q + (row * H + h) * (A + R);
        const T *w = s.w + h * (A + s.a.value_dim) * L + j;
        if (h == H) {
            s.y[i] = j < L ? s.c[row * L + j] : turned_at(s, row, j - L, 1.0f, s.k + row * R);
        } else if (j >= L) {
            s.y[i] = turned_at(s, row, j - L, 1.0f, q + A);
        } else {
            float sum = 0;
            for (int64_t p = 0; p < A; p++)
                sum = fmaf(to_float(q[p]), to_float(w[p * L]), sum);
            s.y[i] = from_float<T>(sum);
        }
    }
}

/* A warp a number. */
template <class T> static __global__ void __launch_bounds__(BLOCK) values_kernel(latent_args<T> s)
{
    int64_t H = s.a.heads, E = s.a.value_dim, L = s.a.latent_dim, all = s.rows * H * E;
    int64_t lane = threadIdx.x % 32;
    for (int64_t i = global_thread() / 32; i < all; i += global_threads() / 32) {
        int64_t h = i / E % H;
        const T *z = s.z + i / E * L;
        const T *w = s.w + (h * (s.a.content_dim + E) + s.a.content_dim + i % E) * L;
        float sum = 0;
        for (int64_t l = lane; l < L; l += 32)
            sum = fmaf(to_float(z[l]), to_float(w[l]), sum);
        sum = warp_sum(sum);
        if (lane == 0)
            s.y[i] = from_float<T>(sum);
    }
}

template <class T> static latent_args<T> args_of(const lm_call *c)
{
    latent_args<T> s = {};
    s.a = *(const lm_latent_attr *)c->attr;
    s.rows = c->in[0].dim[0];
    return s;
}

template <class T> static void latent_rows(const lm_call *c)
{
    latent_args<T> s = args_of<T>(c);
    s.q = in_ptr<const T>(c, 0);
    s.kv = in_ptr<const T>(c, 1);
    s.k = in_ptr<const T>(c, 2);
    s.pos = in_ptr<const int32_t>(c, 3);
    s.table = in_ptr<const float>(c, 4);
    s.y = out_ptr<T>(c, 0);
    LM_LAUNCH((rows_kernel<T>), grid_for(lm_tensor_count(&c->out[0]), BLOCK, c->stream), BLOCK, 0,
              c->stream, s);
}

template <class T> static void latent_rows_dx(const lm_call *c)
{
    latent_args<T> s = args_of<T>(c);
    s.dy = in_ptr<const T>(c, 0);
    s.pos = in_ptr<const int32_t>(c, 1);
    s.table = in_ptr<const float>(c, 2);
    s.dq = out_ptr<T>(c, 0);
    s.dkv = out_ptr<T>(c, 1);
    s.dk = out_ptr<T>(c, 2);
    LM_LAUNCH((back_kernel<T>), grid_for(lm_tensor_count(&c->in[0]), BLOCK, c->stream), BLOCK, 0,
              c->stream, s);
}

template <class T> static void latent_queries(const lm_call *c)
{
    latent_args<T> s = args_of<T>(c);
    s.q = in_ptr<const T>(c, 0);
    s.c = in_ptr<const T>(c, 1);
    s.k = in_ptr<const T>(c, 2);
    s.w = in_ptr<const T>(c, 3);
    s.pos = in_ptr<const int32_t>(c, 4);
    s.table = in_ptr<const float>(c, 5);
    s.y = out_ptr<T>(c, 0);
    LM_LAUNCH((queries_kernel<T>), grid_for(lm_tensor_count(&c->out[0]), BLOCK, c->stream), BLOCK,
              0, c->stream, s);
}

template <class T> static void latent_values(const lm_call *c)
{
    latent_args<T> s = args_of<T>(c);
    s.z = in_ptr<const T>(c, 0);
    s.w = in_ptr<const T>(c, 1);
    s.y = out_ptr<T>(c, 0);
    LM_LAUNCH((values_kernel<T>), grid_for(lm_tensor_count(&c->out[0]), BLOCK / 32, c->stream),
              BLOCK, 0, c->stream, s);
}

extern "C" const lm_kernel lm_latent_cuda_kernels[] = {
    LM_CUDA_ROWS("latent_rows", latent_rows, nullptr),
    LM_CUDA_ROWS("latent_rows_dx", latent_rows_dx, nullptr),
    LM_CUDA_ROWS("latent_queries", latent_queries, nullptr),
    LM_CUDA_ROWS("latent_values", latent_values, nullptr),
    LM_CUDA_END,
};
