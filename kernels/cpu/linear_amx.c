/* SPDX-License-Identifier: Apache-2.0 */
/* linear_amx.c -- the linear layer on AMX tiles (BF16). */
#include "kernels/cpu/linear_gemm.h"
#include "kernels/cpu/tables.h"

LM_LINEAR_KERNELS(LM_CPU_AMX)

const lm_kernel lm_linear_amx_kernels[] = {
    LM_LINEAR_ROWS(LM_DTYPE_BF16, LM_CPU_AMX),
    { .op = NULL },
};
