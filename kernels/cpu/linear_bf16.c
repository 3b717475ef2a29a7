/* SPDX-License-Identifier: Apache-2.0 */
/* linear_bf16.c -- the linear layer by dot products of pairs of BF16. */
#include "kernels/cpu/linear_gemm.h"
#include "kernels/cpu/tables.h"

LM_LINEAR_KERNELS(LM_CPU_BF16)

const lm_kernel lm_linear_bf16_kernels[] = {
    LM_LINEAR_ROWS(LM_DTYPE_BF16, LM_CPU_BF16),
    { .op = NULL },
};
