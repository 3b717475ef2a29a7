/* SPDX-License-Identifier: Apache-2.0 */
/* head_amx.c -- the AVX-512 head with its three products on AMX tiles. */
#undef LM_SIMD
#define LM_SIMD       amx
#define LM_SIMD_LEVEL LM_CPU_AMX
#include "kernels/cpu/head_simd.c"
