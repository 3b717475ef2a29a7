/* SPDX-License-Identifier: Apache-2.0 */
/* divergence_bf16.c -- the AVX-512 divergence with products by dot products of pairs. */
#undef LM_SIMD
#define LM_SIMD       bf16
#define LM_SIMD_LEVEL LM_CPU_BF16
#include "kernels/cpu/divergence_simd.c"
