/* gelu.cuh -- the activations of linear layers and their slopes, for what maps them over memory
 * (elementwise.cu) and for what joins them to a product (gemm_plain.cu).
 *
 * F32 is held to 1e-6, so nothing here cancels and functions are the accurate ones; 16-bit types
 * take the GPU's quick exponential and quotient, good to some 1e-6 each. */
#ifndef LM_KERNELS_CUDA_GELU_CUH
#define LM_KERNELS_CUDA_GELU_CUH

#include "kernels/cuda/device.cuh"

extern "C" {
#include "kernels/linear.h"
}

template <class T> __device__ inline float exp_for(float x)
{
#ifndef LM_EMU
    if (sizeof(T) == 2)
        return __expf(x);
#endif
    return expf(x);
}

template <class T> __device__ inline float over(float a, float b)
{
#ifndef LM_EMU
    if (sizeof(T) == 2)
        return __fdividef(a, b);
#endif
    return a / b;
}

template <class T> __device__ inline float sigmoid(float x)
{
    return over<T>(1, 1 + exp_for<T>(-x));
}

template <class T> __device__ inline float silu(float x)
{
    return over<T>(x, 1 + exp_for<T>(-x));
}

/* 0.5 (1 + tanh(u)) is the logistic function of 2u; this is 2u and, divided by x, its slope. */
#define TWICE_ROOT_2_PI 1.5957691216f /* 2 sqrt(2/pi) */
#define CUBIC           0.044715f

template <class T> __device__ inline float gelu_tanh(float x)
{
    float u = TWICE_ROOT_2_PI * x * fmaf(CUBIC * x, x, 1);
    return over<T>(x, 1 + exp_for<T>(-u));
}

template <class T> __device__ inline float gelu_tanh_slope(float x)
{
    float s = sigmoid<T>(TWICE_ROOT_2_PI * x * fmaf(CUBIC * x, x, 1));
    float du = TWICE_ROOT_2_PI * fmaf(3 * CUBIC * x, x, 1);
    /* beyond |x| = 20 the slope is a step; du would overflow there and meet a zero */
    return fabsf(x) > 20 ? s : fmaf(s * (1 - s) * x, du, s);
}

/* The normal distribution function, without cancellation for negative x. */
__device__ inline float normal_cdf(float x)
{
    return 0.5f * erfcf(-0.70710678f * x);
}

__device__ inline float gelu_erf(float x)
{
    return x * normal_cdf(x);
}

template <class T> __device__ inline float gelu_erf_slope(float x)
{
    return fmaf(x * 0.39894228f, exp_for<T>(-0.5f * x * x), normal_cdf(x));
}

/* f of a layer's function and f', GELU or GELU_EXACT; T: what x is rounded to. */
template <class T> __device__ inline float gelu_of(lm_act act, float x)
{
    return act == LM_ACT_GELU ? gelu_tanh<T>(x) : gelu_erf(x);
}

template <class T> __device__ inline float gelu_slope_of(lm_act act, float x)
{
    return act == LM_ACT_GELU ? gelu_tanh_slope<T>(x) : gelu_erf_slope<T>(x);
}

#endif
