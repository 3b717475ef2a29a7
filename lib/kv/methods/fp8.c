/* SPDX-License-Identifier: Apache-2.0 */
/* fp8.c -- numbers of 8 bits with an exponent: x = s * fp8(x / s), beyond the largest number that one.
 *
 *   scale=1      s = 1, a plain conversion
 *   scale=token  s = largest magnitude of the head at a token / largest number (E4M3 448, E5M2 57,344), in F16 */
#include "kv/methods/methods.h"

enum { SCALE };

static const lm_hyper hyper[] = {
    { "scale", 0, 0, 1, "what has a scale of its own", "1 token" },
    LM_KV_ALONE(0),
    { 0 },
};

static lm_code form(const lm_kv_ask *q, lm_kv_side *out, lm_err *e)
{
    const lm_kv_format f = { .bits = 8,
                             .axis = LM_KV_TOKEN,
                             .levels = LM_KV_FLOAT8,
                             .float8 = q->method->base.float8,
                             .scale = q->h[SCALE] == 0 ? LM_DTYPE_NONE : LM_DTYPE_F16,
                             .constant = 1 };
    return lm_kv_put_format(&f, q, out, e);
}

#define FLOAT8(id, type, text)        \
    const lm_kv_method lm_kv_##id = { \
        .name = #id,                  \
        .about = text,                \
        .hyper = hyper,               \
        .form = form,                 \
        .base = { .float8 = type },   \
    };

FLOAT8(fp8_e4m3, LM_DTYPE_F8E4M3, "FP8 with 4 bits of exponent")
FLOAT8(fp8_e5m2, LM_DTYPE_F8E5M2, "FP8 with 5 bits of exponent")
