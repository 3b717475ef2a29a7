/* SPDX-License-Identifier: Apache-2.0 */
/* rope_bf16.c -- the AVX-512 rotation with rounding to BF16 in one instruction. */
#undef LM_SIMD
#define LM_SIMD       bf16
#define LM_SIMD_LEVEL LM_CPU_BF16
#include "kernels/cpu/rope_simd.c"
