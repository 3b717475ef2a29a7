/* SPDX-License-Identifier: Apache-2.0 */
/* code_rows.h -- rows of codes as numbers, on vectors: the bits of lm_code_rows_numbers in plain C; and their
 * products with few rows of x, whose numbers stay in registers. */
#ifndef LM_KERNELS_CPU_CODE_ROWS_H
#define LM_KERNELS_CPU_CODE_ROWS_H

#include "numeric/code_rows.h"

extern const lm_code_rows_coder lm_code_rows_avx2, lm_code_rows_avx512, lm_code_rows_bf16;

enum { LM_CODE_SUMS_X = 4 }; /* rows of x that lm_code_rows_sums takes at most */

/* Sums of products of rows in codes with m rows of x: sum [row][LM_CODE_SUMS_X].  p: the codes of f, read as t (F32
 * or BF16).  x: F32, rows of cols numbers without gaps; for m > 2 all LM_CODE_SUMS_X rows can be read.  A sum has the
 * bits of lm_gemm_impl.small_m's on the decoded numbers, except: a sum of 0 may have either sign, and a sum is NaN, of
 * any bits, if one of the numbers rounded to BF16 is not finite.  False: not of this format or this number of columns;
 * rows = 0 asks for no more than that. */
typedef bool (*lm_code_rows_sums)(const lm_format *f, lm_dtype t, const uint8_t *p, int64_t rows,
                                  int64_t cols, const float *x, int m, float *sum);
extern const lm_code_rows_sums lm_code_rows_sums_avx2, lm_code_rows_sums_avx512,
    lm_code_rows_sums_bf16; /* NULL: none */

#endif
