/* SPDX-License-Identifier: Apache-2.0 */
/* code_rows_bf16.c -- rows of codes as numbers where the processor rounds to BF16 by itself. */
#define LM_SIMD_LEVEL LM_CPU_BF16
#include "kernels/cpu/code_rows_simd.c"
