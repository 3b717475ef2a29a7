/* SPDX-License-Identifier: Apache-2.0 */
/* fp8.cuh -- matrices of FP8 and their products on the device (kernels/fp8.h): by plain kernels, or
 * products by cuBLASLt where the stream's level says so. */
#ifndef LM_KERNELS_CUDA_FP8_CUH
#define LM_KERNELS_CUDA_FP8_CUH

#include "kernels/cuda/device.cuh"

extern "C" {
#include "kernels/fp8.h"
}

/* Symbols of the module: tests and measurements call them, too. */
extern "C" {
#pragma GCC visibility push(default)
size_t lm_cuda_fp8_gemm_work(const lm_fp8_gemm *g);
void lm_cuda_fp8_gemm(const lm_fp8_gemm *g, const lm_stream *s);

size_t lm_cuda_fp8_quantize_work(const lm_fp8_quantize *q);
void lm_cuda_fp8_quantize(const lm_fp8_quantize *q, const lm_stream *s);
#pragma GCC visibility pop
}

/* Whether block scales cost products nothing here; where not, TENSOR is the scaling to choose. */
bool fp8_block_scales(const lm_stream *s);

#endif
