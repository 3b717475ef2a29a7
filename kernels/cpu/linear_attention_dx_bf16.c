/* SPDX-License-Identifier: Apache-2.0 */
/* linear_attention_dx_bf16.c -- the backward of linear attention in BF16, with the products of its chunks by dot products of
 * pairs (AVX512-BF16). */
#undef LM_SIMD
#define LM_SIMD       bf16
#define LM_SIMD_LEVEL LM_CPU_BF16
#define LA_PAIRS
#include "kernels/cpu/linear_attention_dx_simd.c"
