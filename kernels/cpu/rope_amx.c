/* SPDX-License-Identifier: Apache-2.0 */
/* rope_amx.c -- the AVX-512 rotation with rounding to BF16 in one instruction. */
#undef LM_SIMD
#define LM_SIMD       amx
#define LM_SIMD_LEVEL LM_CPU_AMX
#include "kernels/cpu/rope_simd.c"
