/* SPDX-License-Identifier: Apache-2.0 */
/* code_kind.h -- the formats of weights (numeric/format.h) that kernels here read in their codes (code_rows.cuh); weights in
 * others are decoded when they are loaded. */
#ifndef LM_KERNELS_CUDA_CODE_KIND_H
#define LM_KERNELS_CUDA_CODE_KIND_H

#include "numeric/format.h"

typedef enum {
    LM_CODE_MXFP4,
    LM_CODE_FP8_128, /* fp8_e4m3_128 */
    LM_CODE_Q8_0,
    LM_CODE_Q4_0,
    LM_CODE_Q4_1,
    LM_CODE_Q5_0,
    LM_CODE_Q5_1,
    LM_CODE_IQ4_NL,
    LM_CODE_Q4_K,
    LM_CODE_Q5_K,
    LM_CODE_Q6_K,
    LM_CODE_KINDS,
} lm_code_kind;

/* LM_CODE_KINDS: none of them. */
lm_code_kind lm_code_kind_of(const lm_format *f);

#endif
