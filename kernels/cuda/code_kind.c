/* SPDX-License-Identifier: Apache-2.0 */
/* code_kind.c -- see code_kind.h. */
#include "kernels/cuda/code_kind.h"

#include <string.h>

/* The module has no registry of formats of its own: it knows them by their names. */
lm_code_kind lm_code_kind_of(const lm_format *f)
{
    static const char *const names[LM_CODE_KINDS] = {
        [LM_CODE_MXFP4] = "mxfp4", [LM_CODE_FP8_128] = "fp8_e4m3_128",
        [LM_CODE_Q8_0] = "q8_0",   [LM_CODE_Q4_0] = "q4_0",
        [LM_CODE_Q4_1] = "q4_1",   [LM_CODE_Q5_0] = "q5_0",
        [LM_CODE_Q5_1] = "q5_1",   [LM_CODE_IQ4_NL] = "iq4_nl",
        [LM_CODE_Q4_K] = "q4_k",   [LM_CODE_Q5_K] = "q5_k",
        [LM_CODE_Q6_K] = "q6_k",
    };
    int k = 0;
    while (k < LM_CODE_KINDS && strcmp(f->name, names[k]))
        k++;
    return (lm_code_kind)k;
}
