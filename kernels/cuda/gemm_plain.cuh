/* SPDX-License-Identifier: Apache-2.0 */
/* gemm_plain.cuh -- the matrix product in plain CUDA (gemm_plain.cu), the fallback of gemm.cu. */
#ifndef LM_KERNELS_CUDA_GEMM_PLAIN_CUH
#define LM_KERNELS_CUDA_GEMM_PLAIN_CUH

#include "kernels/cuda/gemm.cuh"

size_t gemm_plain_work(const gemm_call *g);
void gemm_plain_run(const gemm_call *g, const lm_stream *s);

#endif
