/* SPDX-License-Identifier: Apache-2.0 */
/* elementwise_amx.c -- the AVX-512 maps with rounding to BF16 in one instruction. */
#undef LM_SIMD
#define LM_SIMD       amx
#define LM_SIMD_LEVEL LM_CPU_AMX
#include "kernels/cpu/elementwise_simd.c"
