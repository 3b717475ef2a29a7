/* SPDX-License-Identifier: Apache-2.0 */
/* kv_keep_amx.c -- masses of tokens with products by tiles of BF16. */
#undef LM_SIMD
#define LM_SIMD       amx
#define LM_SIMD_LEVEL LM_CPU_AMX
#define MASS_TILES
#include "kernels/cpu/attention_amx.h"
#include "kernels/cpu/kv_keep_simd.c"
