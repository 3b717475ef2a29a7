/* SPDX-License-Identifier: Apache-2.0 */
/* plain.c -- keys and values as numbers of a type. */
#include "kv/methods/methods.h"

static const lm_hyper hyper[] = { { 0 } };

static lm_code form(const lm_kv_ask *q, lm_kv_side *out, lm_err *e)
{
    (void)e;
    if (q->method->plain != LM_DTYPE_NONE)
        out->plain = q->method->plain;
    return LM_OK;
}

#define PLAIN(id, type, text)         \
    const lm_kv_method lm_kv_##id = { \
        .name = #id,                  \
        .about = text,                \
        .hyper = hyper,               \
        .form = form,                 \
        .plain = type,                \
    };

PLAIN(auto, LM_DTYPE_NONE, "numbers of the type of activations")
PLAIN(f32, LM_DTYPE_F32, "FP32")
PLAIN(f16, LM_DTYPE_F16, "FP16")
PLAIN(bf16, LM_DTYPE_BF16, "BF16")
