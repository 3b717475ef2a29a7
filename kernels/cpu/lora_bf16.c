/* SPDX-License-Identifier: Apache-2.0 */
/* lora_bf16.c -- the low-rank paths by dot products of pairs of BF16. */
#include "kernels/cpu/lora_gemm.h"
#include "kernels/cpu/tables.h"

LM_LORA_KERNELS(LM_CPU_BF16)

const lm_kernel lm_lora_bf16_kernels[] = {
    LM_LORA_ROWS(LM_DTYPE_BF16, LM_CPU_BF16),
    { .op = NULL },
};
