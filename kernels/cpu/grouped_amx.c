/* SPDX-License-Identifier: Apache-2.0 */
/* grouped_amx.c -- grouped linear layers on AMX tiles (BF16). */
#include "kernels/cpu/grouped_gemm.h"
#include "kernels/cpu/tables.h"

LM_GROUPED_KERNELS(LM_CPU_AMX)

const lm_kernel lm_grouped_amx_kernels[] = {
    LM_GROUPED_ROWS(LM_DTYPE_BF16, LM_CPU_AMX),
    { .op = NULL },
};
