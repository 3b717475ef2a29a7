/* SPDX-License-Identifier: Apache-2.0 */
/* ggml.c -- the block formats of ggml, 32 channels of a token with one scale (numeric/format.h). */
#include "kv/methods/methods.h"

enum { ROTATE };

#define TABLE(id, rotate)                                                      \
    static const lm_hyper hyper_##id[] = {                                     \
        { "rotate", rotate, 0, 1, "Hadamard rotation of the head", "off on" }, \
        LM_KV_ALONE(0),                                                        \
        { 0 },                                                                 \
    };

static lm_code form(const lm_kv_ask *q, lm_kv_side *out, lm_err *e)
{
    lm_kv_format f = q->method->base;
    f.axis = LM_KV_TOKEN;
    f.group = 32;
    f.scale = LM_DTYPE_F16;
    f.ggml = true;
    if (f.levels == LM_KV_TABLE) {
        f.n_table = 16;
        lm_kv_iq4_table(f.table);
    }
    if (q->site->head_dim % 32)
        return lm_fail(e, LM_EUSAGE, q->name, "choose int8 or int4",
                       "heads of %lld numbers are not blocks of 32", (long long)q->site->head_dim);
    out->rotate = q->h[ROTATE] != 0;
    return lm_kv_put_format(&f, q, out, e);
}

#define BLOCK(id, bits_, levels_, rotate, text)       \
    TABLE(id, rotate)                                 \
    const lm_kv_method lm_kv_##id = {                 \
        .name = #id,                                  \
        .about = text,                                \
        .hyper = hyper_##id,                          \
        .form = form,                                 \
        .base = { .bits = bits_, .levels = levels_ }, \
    };

BLOCK(q8_0, 8, LM_KV_SYM, 0, "ggml's 8-bit blocks")
BLOCK(q5_1, 5, LM_KV_ASYM, 1, "ggml's 5-bit blocks with minima, rotated")
BLOCK(q5_0, 5, LM_KV_SYM, 1, "ggml's 5-bit blocks, rotated")
BLOCK(q4_1, 4, LM_KV_ASYM, 1, "ggml's 4-bit blocks with minima, rotated")
BLOCK(q4_0, 4, LM_KV_SYM, 1, "ggml's 4-bit blocks, rotated")
BLOCK(iq4_nl, 4, LM_KV_TABLE, 1, "ggml's 4-bit blocks with levels of a table, rotated")
