/* SPDX-License-Identifier: Apache-2.0 */
/* expert.cu -- biases of experts and their activation (kernels/expert.h); the host never reads the offsets. */
#include "kernels/cuda/rows.cuh"
#include "kernels/cuda/sigmoid.cuh"

extern "C" {
#include "kernels/expert.h"
}

enum { THREADS = 256 };

/* The group of row r; `groups`: none. */
static __device__ inline int group_of(const int32_t *offsets, int groups, int64_t r)
{
    int lo = 0, hi = groups; /* the first group that ends behind r */
    while (lo < hi) {
        const int mid = (lo + hi) / 2;
        if (offsets[mid + 1] > r)
            hi = mid;
        else
            lo = mid + 1;
    }
    return lo;
}

template <class T>
static __global__ void bias_kernel(int64_t rows, int64_t width, int groups, const T *x,
                                   const float *b, const int32_t *offsets, T *y)
{
#pragma unroll 1
    for (int64_t r = blockIdx.x; r < rows; r += gridDim.x) {
        const int g = group_of(offsets, groups, r);
        for (int64_t i = threadIdx.x; i < width; i += THREADS)
            y[r * width + i] = g < groups
                                   ? from_float<T>(to_float(x[r * width + i]) + b[g * width + i])
                                   : x[r * width + i];
    }
}

template <class T> static void grouped_bias(const lm_call *c)
{
    const int64_t rows = rows_of(&c->in[0]);
    LM_LAUNCH((bias_kernel<T>), grid_for(rows, 1, c->stream), THREADS, 0, c->stream, rows,
              width_of(&c->in[0]), (int)c->in[2].dim[0] - 1, in_ptr<const T>(c, 0),
              in_ptr<const float>(c, 1), in_ptr<const int32_t>(c, 2), out_ptr<T>(c, 0));
}

/* A thread for each number, summed over its rows in their order. */
template <class T>
static __global__ void bias_sums(int64_t count, int64_t width, const T *dy, const int32_t *offsets,
                                 bool add, float *db)
{
#pragma unroll 1
    for (int64_t i = global_thread(); i < count; i += global_threads()) {
        const int64_t g = i / width, m = i % width;
        float sum = add ? db[i] : 0;
        for (int64_t r = offsets[g]; r < offsets[g + 1]; r++)
            sum += to_float(dy[r * width + m]);
        db[i] = sum;
    }
}

template <class T> static void grouped_bias_db(const lm_call *c)
{
    const lm_grouped_bias_attr *a = (const lm_grouped_bias_attr *)c->attr;
    const int64_t width = width_of(&c->in[0]), count = a->groups * width;
    LM_LAUNCH((bias_sums<T>), grid_for(count, THREADS, c->stream), THREADS, 0, c->stream, count,
              width, in_ptr<const T>(c, 0), in_ptr<const int32_t>(c, 1), !overwrites(c, a->acc),
              out_ptr<float>(c, 0));
}

struct bounds {
    float limit, alpha;
};

/* x where it is at most `most`, NaN too; else `most`. */
static __device__ inline float bounded(float x, float most)
{
    return x > most ? most : x;
}

static __device__ inline float bounded_up(float u, float limit)
{
    return u < -limit ? -limit : bounded(u, limit);
}

template <class T> static __global__ void swiglu_pairs(int64_t count, bounds b, const T *gu, T *h)
{
#pragma unroll 1
    for (int64_t i = global_thread(); i < count; i += global_threads()) {
        const pack<T, 2> x = *(const pack<T, 2> *)(gu + 2 * i);
        const float g = bounded(to_float(x.v[0]), b.limit),
                    u = bounded_up(to_float(x.v[1]), b.limit);
        h[i] = from_float<T>((u + 1) * g / (1 + expf(-b.alpha * g)));
    }
}

template <class T>
static __global__ void swiglu_dx_pairs(int64_t count, bounds b, const T *dh, const T *gu, T *dgu)
{
#pragma unroll 1
    for (int64_t i = global_thread(); i < count; i += global_threads()) {
        const pack<T, 2> x = *(const pack<T, 2> *)(gu + 2 * i);
        const float g0 = to_float(x.v[0]), u0 = to_float(x.v[1]), d = to_float(dh[i]);
        const float g = bounded(g0, b.limit), u = bounded_up(u0, b.limit);
        const float s = sigmoid_of(b.alpha * g);
        pack<T, 2> y;
        y.v[0] = from_float<T>(g0 > b.limit ? 0.0f : d * (u + 1) * silu_slope(b.alpha * g, s));
        y.v[1] = from_float<T>(fabsf(u0) > b.limit ? 0.0f : d * g * s);
        *(pack<T, 2> *)(dgu + 2 * i) = y;
    }
}

static bounds bounds_of(const lm_call *c)
{
    const lm_clamped_swiglu_attr *a = (const lm_clamped_swiglu_attr *)c->attr;
    return { (float)a->limit, (float)a->alpha };
}

template <class T> static void clamped_swiglu(const lm_call *c)
{
    const int64_t count = lm_tensor_count(&c->out[0]);
    LM_LAUNCH((swiglu_pairs<T>), grid_for(count, THREADS, c->stream), THREADS, 0, c->stream, count,
              bounds_of(c), in_ptr<const T>(c, 0), out_ptr<T>(c, 0));
}

template <class T> static void clamped_swiglu_dx(const lm_call *c)
{
    const int64_t count = lm_tensor_count(&c->in[0]);
    LM_LAUNCH((swiglu_dx_pairs<T>), grid_for(count, THREADS, c->stream), THREADS, 0, c->stream,
              count, bounds_of(c), in_ptr<const T>(c, 0), in_ptr<const T>(c, 1), out_ptr<T>(c, 0));
}

extern "C" const lm_kernel lm_expert_cuda_kernels[] = {
    LM_CUDA_ROWS("grouped_bias", grouped_bias, nullptr),
    LM_CUDA_ROWS("grouped_bias_db", grouped_bias_db, nullptr),
    LM_CUDA_ROWS("clamped_swiglu", clamped_swiglu, nullptr),
    LM_CUDA_ROWS("clamped_swiglu_dx", clamped_swiglu_dx, nullptr),
    LM_CUDA_END,
};
