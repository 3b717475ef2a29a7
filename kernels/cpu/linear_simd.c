/* SPDX-License-Identifier: Apache-2.0 */
/* linear_simd.c -- the linear layer at the AVX2 and AVX-512 levels. */
#include "kernels/cpu/linear_gemm.h"
#include "kernels/cpu/tables.h"

#ifdef __AVX512F__
LM_LINEAR_KERNELS(LM_CPU_AVX512)
#define LEVEL LM_CPU_AVX512
#else
LM_LINEAR_KERNELS(LM_CPU_AVX2)
#define LEVEL LM_CPU_AVX2
#endif

const lm_kernel LM_TABLE_NAME(linear, LM_SIMD)[] = {
    LM_LINEAR_ROWS(LM_DTYPE_F32, LEVEL),
    LM_LINEAR_ROWS(LM_DTYPE_BF16, LEVEL),
    { .op = NULL },
};
