/* SPDX-License-Identifier: Apache-2.0 */
/* code_few_f16.cu -- products of few rows of F16 with weights in codes. */
#include "kernels/cuda/code_few_kernel.cuh"

template void code_few_as<f16>(const code_few *f, const lm_stream *s);
