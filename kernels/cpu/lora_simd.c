/* SPDX-License-Identifier: Apache-2.0 */
/* lora_simd.c -- the low-rank paths at the AVX2 and AVX-512 levels. */
#include "kernels/cpu/lora_gemm.h"
#include "kernels/cpu/tables.h"

#ifdef __AVX512F__
LM_LORA_KERNELS(LM_CPU_AVX512)
#define LEVEL LM_CPU_AVX512
#else
LM_LORA_KERNELS(LM_CPU_AVX2)
#define LEVEL LM_CPU_AVX2
#endif

const lm_kernel LM_TABLE_NAME(lora, LM_SIMD)[] = {
    LM_LORA_ROWS(LM_DTYPE_F32, LEVEL),
    LM_LORA_ROWS(LM_DTYPE_BF16, LEVEL),
    { .op = NULL },
};
