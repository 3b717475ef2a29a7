/* SPDX-License-Identifier: Apache-2.0 */
/* ggml.c -- the table of GGUF's quantised blocks. */
#include "numeric/ggml.h"

#include <strings.h>

#include "numeric/ggml_blocks.h"

static const lm_ggml_type types[] = {
    { "q4_0", 2, 32, 18, lm_q4_0_encode, NULL, lm_q4_0_decode },
    { "q4_1", 3, 32, 20, lm_q4_1_encode, NULL, lm_q4_1_decode },
    { "q5_0", 6, 32, 22, lm_q5_0_encode, NULL, lm_q5_0_decode },
    { "q5_1", 7, 32, 24, lm_q5_1_encode, NULL, lm_q5_1_decode },
    { "q8_0", 8, 32, 34, lm_q8_0_encode, NULL, lm_q8_0_decode },
    { "q4_k", 12, 256, 144, lm_q4_k_encode, NULL, lm_q4_k_decode },
    { "q5_k", 13, 256, 176, lm_q5_k_encode, NULL, lm_q5_k_decode },
    { "q6_k", 14, 256, 210, lm_q6_k_encode, NULL, lm_q6_k_decode },
};
enum { N_TYPES = sizeof(types) / sizeof(types[0]) };

const lm_ggml_type *lm_ggml_at(int i)
{
    return i >= 0 && i < N_TYPES ? &types[i] : NULL;
}

lm_code lm_ggml_find(const char *name, const lm_ggml_type **out, lm_err *e)
{
    for (int i = 0; i < N_TYPES; i++)
        if (!strcasecmp(types[i].name, name)) {
            *out = &types[i];
            return LM_OK;
        }
    *out = NULL;
    return lm_fail(e, LM_EUSAGE, name, "choose q4_0, q4_1, q5_0, q5_1, q8_0, q4_k, q5_k or q6_k",
                   "unknown block type");
}

const lm_ggml_type *lm_ggml_of(uint32_t ggml_type)
{
    for (int i = 0; i < N_TYPES; i++)
        if (types[i].ggml_type == ggml_type)
            return &types[i];
    return NULL;
}
