/* SPDX-License-Identifier: Apache-2.0 */
/* sigmoid.cuh -- the sigmoid with the accurate exponential, of gates and routers (that of linear layers is in gelu.cuh), and
 * the slope of SiLU. */
#ifndef LM_KERNELS_CUDA_SIGMOID_CUH
#define LM_KERNELS_CUDA_SIGMOID_CUH

#include "kernels/cuda/device.cuh"

__device__ inline float sigmoid_of(float z)
{
    return 1 / (1 + expf(-z));
}

/* Of x sigmoid(x), s being that sigmoid. */
__device__ inline float silu_slope(float x, float s)
{
    return s * fmaf(x, 1 - s, 1.0f);
}

#endif
