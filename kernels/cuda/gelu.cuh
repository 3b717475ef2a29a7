/* SPDX-License-Identifier: Apache-2.0 */
/* gelu.cuh -- the activations of linear layers and their slopes, for the maps over memory
 * (elementwise.cu) and for products with an epilogue (gemm_plain.cu).
 *
 * F32 results are accurate to 1e-6: no term cancels, and the exponential is the accurate one;
 * 16-bit types use the exponential of the GPU, accurate to about 1e-6.  Quotients are accurate to
 * two units in the last place. */
#ifndef LM_KERNELS_CUDA_GELU_CUH
#define LM_KERNELS_CUDA_GELU_CUH

#include "kernels/cuda/device.cuh"

extern "C" {
#include "kernels/linear.h"
}

/* 2^x, and 0 where that is below 2^-126. */
__device__ inline float exp2_quick(float x)
{
#ifndef LM_EMU
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    float y = exp2f(x);
    return y < 0x1p-126f ? 0 : y;
#endif
}

template <class T> __device__ inline float exp_for(float x)
{
    return sizeof(T) == 2 ? exp2_quick(x * 1.4426950409f) : expf(x);
}

/* For |b| from 2^-126; 0 where it is larger than 2^126. */
__device__ inline float over(float a, float b)
{
#ifndef LM_EMU
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(b));
#else
    float r = fabsf(b) > 0x1p126f ? 0 : 1 / b;
#endif
    return a * r;
}

template <class T> __device__ inline float sigmoid(float x)
{
    return over(1, 1 + exp_for<T>(-x));
}

template <class T> __device__ inline float silu(float x)
{
    return over(x, 1 + exp_for<T>(-x));
}

/* 0.5 (1 + tanh(u)) is the logistic function of 2u; this is 2u and, divided by x, its slope. */
#define TWICE_ROOT_2_PI 1.5957691216f /* 2 sqrt(2/pi) */
#define CUBIC           0.044715f

template <class T> __device__ inline float gelu_tanh(float x)
{
    float u = x * fmaf(TWICE_ROOT_2_PI * CUBIC * x, x, TWICE_ROOT_2_PI);
    return over(x, 1 + exp_for<T>(-u));
}

template <class T> __device__ inline float gelu_tanh_slope(float x)
{
    float s = sigmoid<T>(x * fmaf(TWICE_ROOT_2_PI * CUBIC * x, x, TWICE_ROOT_2_PI));
    float du = fmaf(TWICE_ROOT_2_PI * 3 * CUBIC * x, x, TWICE_ROOT_2_PI);
    /* beyond |x| = 20 the slope is a step; du would overflow there and meet a zero */
    return fabsf(x) > 20 ? s : fmaf(s * (1 - s) * x, du, s);
}

/* exp(-x^2 / 2) */
template <class T> __device__ inline float bell_at(float x)
{
    return sizeof(T) == 2 ? exp2_quick(-0.7213475204f * x * x) : expf(-0.5f * x * x);
}

/* The normal distribution function of -|x|; `bell` is exp(-x^2/2).  It is bell times a polynomial
 * without constant term in t = 1 / (1 + |x| / 4), fitted to |x| <= 5 for the least relative error,
 * 4e-8 before it is rounded. */
__device__ inline float normal_tail(float x, float bell)
{
    float t = over(1, fmaf(0.25f, fabsf(x), 1)), p = -0.09591052f;
    p = fmaf(p, t, 0.36129221f);
    p = fmaf(p, t, -0.30389765f);
    p = fmaf(p, t, 0.31745502f);
    p = fmaf(p, t, 0.0051088752f);
    p = fmaf(p, t, 0.11777613f);
    p = fmaf(p, t, 0.098175943f);
    return p * (t * bell);
}

template <class T> __device__ inline float gelu_erf(float x)
{
    float tail = normal_tail(x, bell_at<T>(x));
    /* 1e4: the tail is 0 there, and 0 times infinity would be NaN; a NaN comes through the tail */
    return fmaf(-fabsf(fminf(x, 1e4f)), tail, fmaxf(x, 0));
}

template <class T> __device__ inline float gelu_erf_slope(float x)
{
    float bell = bell_at<T>(x), tail = normal_tail(x, bell);
    return fmaf(x * 0.39894228f, bell, x > 0 ? 1 - tail : tail);
}

/* f of a layer's function and f', GELU or GELU_EXACT; T: what x is rounded to. */
template <class T> __device__ inline float gelu_of(lm_activation act, float x)
{
    return act == LM_ACT_GELU ? gelu_tanh<T>(x) : gelu_erf<T>(x);
}

template <class T> __device__ inline float gelu_slope_of(lm_activation act, float x)
{
    return act == LM_ACT_GELU ? gelu_tanh_slope<T>(x) : gelu_erf_slope<T>(x);
}

#endif
