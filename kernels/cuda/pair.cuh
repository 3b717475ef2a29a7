/* SPDX-License-Identifier: Apache-2.0 */
/* pair.cuh -- two numbers of 16 bits in one register, the lower one in its low half: as in memory;
 * one register for each would double the number of registers. */
#ifndef LM_KERNELS_CUDA_PAIR_CUH
#define LM_KERNELS_CUDA_PAIR_CUH

#include "kernels/cuda/device.cuh"

template <class T> __device__ inline uint32_t pair_bits(T lo, T hi)
{
    return lo.bits | (uint32_t)hi.bits << 16;
}
template <class T> __device__ inline float low(uint32_t pair)
{
    return to_float(T{ (uint16_t)pair });
}
template <class T> __device__ inline float high(uint32_t pair)
{
    return to_float(T{ (uint16_t)(pair >> 16) });
}

/* Two neighbours rounded to T. */
template <class T> __device__ inline uint32_t round_pair(float lo, float hi)
{
    return pair_bits(from_float<T>(lo), from_float<T>(hi));
}
#ifndef LM_EMU
template <> __device__ inline uint32_t round_pair<bf16>(float lo, float hi)
{
    __nv_bfloat162 x = __floats2bfloat162_rn(lo, hi);
    return pair_bits(bf16{ __bfloat16_as_ushort(x.x) }, bf16{ __bfloat16_as_ushort(x.y) });
}
template <> __device__ inline uint32_t round_pair<f16>(float lo, float hi)
{
    __half2 x = __floats2half2_rn(lo, hi);
    return pair_bits(f16{ __half_as_ushort(x.x) }, f16{ __half_as_ushort(x.y) });
}
#endif

#endif
