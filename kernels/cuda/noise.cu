/* SPDX-License-Identifier: Apache-2.0 */
/* noise.cu -- counted random noise (kernels/noise.h): one read and one write of memory. */
#include "kernels/cuda/philox.cuh"

extern "C" {
#include "kernels/noise.h"
}

static const int threads = 256;

__device__ inline float normal_quantile(uint32_t draw)
{
    const float centre[] = LM_NOISE_CENTRE, tail[] = LM_NOISE_TAIL;
    const uint32_t whole = draw >> 8;
    /* u and 1 - u as multiples of 2^-24 plus a half: neither is rounded in its own tail. */
    const float u = fmaf((float)whole, 0x1p-24f, 0x1p-25f);
    const float v = fmaf((float)(0xffffff - whole), 0x1p-24f, 0x1p-25f);
    const float w = -logf(4 * u * v);
    const bool near = w < 5;
    const float x = near ? w - 2.5f : sqrtf(w) - 3;
    float p = near ? centre[0] : tail[0];
#pragma unroll
    for (int i = 1; i < LM_NOISE_TERMS; i++)
        p = fmaf(p, x, near ? centre[i] : tail[i]);
    return 1.41421356f * (u - v) * p;
}

__device__ inline float with_noise(float x, uint32_t draw, float amount, lm_noise_kind kind)
{
    if (kind == LM_NOISE_ADDED)
        return fmaf(amount, normal_quantile(draw), x);
    if (kind == LM_NOISE_WEIGHED)
        return x * amount * normal_quantile(draw);
    return x * fmaf(amount, fmaf((float)(draw >> 8), 0x1p-23f, 0x1p-24f - 1), 1.0f);
}

/* A thread takes the four elements of one block of draws; the first block may begin before the tensor, and the last may
 * end behind it. */
template <class T>
__global__ void noise_kernel(int64_t count, uint64_t hi, float amount, lm_noise_kind kind,
                             const lm_step *run, const T *x, T *y)
{
    uint64_t base = dropout_base(run, (uint64_t)count, &hi), key = run->seed;
    int64_t skip = (int64_t)(base % 4);
#pragma unroll 1
    for (int64_t b = global_thread(); 4 * b - skip < count; b += global_threads()) {
        draws4 d = philox(base / 4 + (uint64_t)b, hi, key);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int64_t i = 4 * b - skip + j;
            if (i >= 0 && i < count)
                y[i] = from_float<T>(with_noise(to_float(x[i]), d.v[j], amount, kind));
        }
    }
}

template <class T>
__global__ void noise_part(int64_t count, lm_origin origin, uint64_t hi, float amount,
                           lm_noise_kind kind, const lm_step *run, const T *x, T *y)
{
    over_part(count, origin, hi, run, [=](int64_t i, uint32_t draw) {
        y[i] = from_float<T>(with_noise(to_float(x[i]), draw, amount, kind));
    });
}

template <class T> static void noise(const lm_call *c)
{
    const lm_noise_attr *a = (const lm_noise_attr *)c->attr;
    int64_t count = lm_tensor_count(&c->in[0]);
    const lm_stream *s = c->stream;
    if (a->origin.count) {
        LM_LAUNCH((noise_part<T>), grid_for(count, 4 * threads, s), threads, 0, s, count, a->origin,
                  rng_hi("noise", (uint64_t)a->site), (float)a->amount, a->kind, s->step,
                  in_ptr<const T>(c, 0), out_ptr<T>(c, 0));
        return;
    }
    LM_LAUNCH((noise_kernel<T>), grid_for(count, 4 * threads, s), threads, 0, s, count,
              rng_hi("noise", (uint64_t)a->site), (float)a->amount, a->kind, s->step,
              in_ptr<const T>(c, 0), out_ptr<T>(c, 0));
}

extern "C" const lm_kernel lm_noise_cuda_kernels[] = {
    LM_CUDA_ROWS("noise", noise, nullptr),
    LM_CUDA_END,
};
