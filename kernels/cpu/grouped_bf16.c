/* SPDX-License-Identifier: Apache-2.0 */
/* grouped_bf16.c -- grouped linear layers by dot products of pairs of BF16. */
#include "kernels/cpu/grouped_gemm.h"
#include "kernels/cpu/tables.h"

LM_GROUPED_KERNELS(LM_CPU_BF16)

const lm_kernel lm_grouped_bf16_kernels[] = {
    LM_GROUPED_ROWS(LM_DTYPE_BF16, LM_CPU_BF16),
    { .op = NULL },
};
