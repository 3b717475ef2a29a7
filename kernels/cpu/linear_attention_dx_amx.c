/* SPDX-License-Identifier: Apache-2.0 */
/* linear_attention_dx_amx.c -- the backward of linear attention in BF16 with the products of its chunks on tiles (AMX). */
#undef LM_SIMD
#define LM_SIMD       amx
#define LM_SIMD_LEVEL LM_CPU_AMX
#define LA_PAIRS
#include "kernels/cpu/linear_attention_dx_simd.c"
