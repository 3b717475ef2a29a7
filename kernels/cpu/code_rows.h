/* SPDX-License-Identifier: Apache-2.0 */
/* code_rows.h -- rows of codes as numbers, on vectors: the bits of lm_code_rows_numbers in plain C. */
#ifndef LM_KERNELS_CPU_CODE_ROWS_H
#define LM_KERNELS_CPU_CODE_ROWS_H

#include "numeric/code_rows.h"

extern const lm_code_rows_coder lm_code_rows_avx2, lm_code_rows_avx512, lm_code_rows_amx;

#endif
