/* SPDX-License-Identifier: Apache-2.0 */
/* divergence_amx.c -- the AVX-512 divergence with its products on AMX tiles. */
#undef LM_SIMD
#define LM_SIMD       amx
#define LM_SIMD_LEVEL LM_CPU_AMX
#include "kernels/cpu/divergence_simd.c"
