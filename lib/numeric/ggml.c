/* SPDX-License-Identifier: Apache-2.0 */
/* ggml.c -- the table of GGUF's quantised blocks. */
#include "numeric/ggml.h"

#include <strings.h>

#include "numeric/ggml_blocks.h"

#define BOTH(t)  lm_##t##_encode, lm_##t##_weigh, lm_##t##_decode
#define ALIKE(t) lm_##t##_encode, NULL, lm_##t##_decode /* importance changes nothing */
#define READ(t)  NULL, NULL, lm_##t##_decode

static const lm_ggml_type types[] = {
    { "q4_0", 2, 32, 18, BOTH(q4_0) },      { "q4_1", 3, 32, 20, BOTH(q4_1) },
    { "q5_0", 6, 32, 22, BOTH(q5_0) },      { "q5_1", 7, 32, 24, BOTH(q5_1) },
    { "q8_0", 8, 32, 34, ALIKE(q8_0) },     { "q2_k", 10, 256, 84, BOTH(q2_k) },
    { "q3_k", 11, 256, 110, BOTH(q3_k) },   { "q4_k", 12, 256, 144, BOTH(q4_k) },
    { "q5_k", 13, 256, 176, BOTH(q5_k) },   { "q6_k", 14, 256, 210, BOTH(q6_k) },
    { "iq4_nl", 20, 32, 18, BOTH(iq4_nl) }, { "iq4_xs", 23, 256, 136, BOTH(iq4_xs) },
    { "mxfp4", 39, 32, 17, READ(mxfp4) },   { "nvfp4", 40, 64, 36, READ(nvfp4) },
    { "q1_0", 41, 128, 18, READ(q1_0) },    { "q2_0", 42, 64, 18, READ(q2_0) },
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
    return lm_fail(
        e, LM_EUSAGE, name,
        "choose q4_0, q4_1, q5_0, q5_1, q8_0, q2_k, q3_k, q4_k, q5_k, q6_k, iq4_nl, iq4_xs",
        "unknown block type");
}

const lm_ggml_type *lm_ggml_of(uint32_t ggml_type)
{
    for (int i = 0; i < N_TYPES; i++)
        if (types[i].ggml_type == ggml_type)
            return &types[i];
    return NULL;
}
