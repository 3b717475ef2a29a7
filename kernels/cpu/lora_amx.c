/* SPDX-License-Identifier: Apache-2.0 */
/* lora_amx.c -- the low-rank paths on AMX tiles (BF16). */
#include "kernels/cpu/lora_gemm.h"
#include "kernels/cpu/tables.h"

LM_LORA_KERNELS(LM_CPU_AMX)

const lm_kernel lm_lora_amx_kernels[] = {
    LM_LORA_ROWS(LM_DTYPE_BF16, LM_CPU_AMX),
    { .op = NULL },
};
