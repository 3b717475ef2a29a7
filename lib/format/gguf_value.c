/* SPDX-License-Identifier: Apache-2.0 */
/* gguf_value.c -- types of tensors, and values of keys as numbers and texts. */
#include <inttypes.h>
#include <string.h>

#include "format/gguf_impl.h"

static const lm_gguf_type types[] = {
    { 0, "f32", 1, 4, LM_DTYPE_F32 },          { 1, "f16", 1, 2, LM_DTYPE_F16 },
    { 2, "q4_0", 32, 18, LM_DTYPE_NONE },      { 3, "q4_1", 32, 20, LM_DTYPE_NONE },
    { 6, "q5_0", 32, 22, LM_DTYPE_NONE },      { 7, "q5_1", 32, 24, LM_DTYPE_NONE },
    { 8, "q8_0", 32, 34, LM_DTYPE_NONE },      { 9, "q8_1", 32, 40, LM_DTYPE_NONE },
    { 10, "q2_k", 256, 84, LM_DTYPE_NONE },    { 11, "q3_k", 256, 110, LM_DTYPE_NONE },
    { 12, "q4_k", 256, 144, LM_DTYPE_NONE },   { 13, "q5_k", 256, 176, LM_DTYPE_NONE },
    { 14, "q6_k", 256, 210, LM_DTYPE_NONE },   { 15, "q8_k", 256, 292, LM_DTYPE_NONE },
    { 16, "iq2_xxs", 256, 66, LM_DTYPE_NONE }, { 17, "iq2_xs", 256, 74, LM_DTYPE_NONE },
    { 18, "iq3_xxs", 256, 98, LM_DTYPE_NONE }, { 19, "iq1_s", 256, 50, LM_DTYPE_NONE },
    { 20, "iq4_nl", 32, 18, LM_DTYPE_NONE },   { 21, "iq3_s", 256, 110, LM_DTYPE_NONE },
    { 22, "iq2_s", 256, 82, LM_DTYPE_NONE },   { 23, "iq4_xs", 256, 136, LM_DTYPE_NONE },
    { 24, "i8", 1, 1, LM_DTYPE_I8 },           { 25, "i16", 1, 2, LM_DTYPE_I16 },
    { 26, "i32", 1, 4, LM_DTYPE_I32 },         { 27, "i64", 1, 8, LM_DTYPE_I64 },
    { 28, "f64", 1, 8, LM_DTYPE_F64 },         { 29, "iq1_m", 256, 56, LM_DTYPE_NONE },
    { 30, "bf16", 1, 2, LM_DTYPE_BF16 },       { 34, "tq1_0", 256, 54, LM_DTYPE_NONE },
    { 35, "tq2_0", 256, 66, LM_DTYPE_NONE },   { 39, "mxfp4", 32, 17, LM_DTYPE_NONE },
    { 40, "nvfp4", 64, 36, LM_DTYPE_NONE },    { 41, "q1_0", 128, 18, LM_DTYPE_NONE },
    { 42, "q2_0", 64, 18, LM_DTYPE_NONE },
};

const lm_gguf_type *lm_gguf_type_of(uint32_t type)
{
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        if (types[i].type == type)
            return &types[i];
    return NULL;
}

const uint8_t lm_gguf_kind_bytes[LM_GGUF_KINDS] = { 1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8 };

uint64_t lm_gguf_get(const uint8_t *p, int bytes)
{
    uint64_t v = 0;
    for (int i = 0; i < bytes; i++)
        v |= (uint64_t)p[i] << 8 * i;
    return v;
}

/* ---- Values ---- */

double lm_gguf_number(const lm_gguf_value *v, uint64_t i)
{
    int bytes = lm_gguf_kind_bytes[v->kind];
    uint64_t u = bytes ? lm_gguf_get(v->data + i * (uint64_t)bytes, bytes) : 0;
    uint32_t low = (uint32_t)u;
    float f;
    double d;

    switch (v->kind) {
    case LM_GGUF_I8:
        return (int8_t)u;
    case LM_GGUF_I16:
        return (int16_t)u;
    case LM_GGUF_I32:
        return (int32_t)u;
    case LM_GGUF_I64:
        return (double)(int64_t)u;
    case LM_GGUF_F32:
        memcpy(&f, &low, 4);
        return f;
    case LM_GGUF_F64:
        memcpy(&d, &u, 8);
        return d;
    default:
        return (double)u;
    }
}

static bool whole(lm_gguf_kind k)
{
    return k <= LM_GGUF_I32 || k == LM_GGUF_U64 || k == LM_GGUF_I64;
}

static lm_code wrong(const lm_gguf *g, const char *key, const char *want, lm_err *e)
{
    return lm_fail(e, LM_EFORMAT, g->where, NULL, "'%s' is not %s", key, want);
}

lm_code lm_gguf_i64_or(const lm_gguf *g, const char *key, int64_t dflt, int64_t min, int64_t max,
                       int64_t *out, bool *given, lm_err *e)
{
    const lm_gguf_value *v = lm_gguf_value_of(g, key);
    double d;

    *out = dflt;
    if (given)
        *given = v != NULL;
    if (!v)
        return LM_OK;
    if (v->array || !whole(v->kind))
        return wrong(g, key, "a whole number", e);
    d = lm_gguf_number(v, 0);
    if (!(d >= (double)min && d <= (double)max) || d >= 9e18)
        return lm_fail(e, LM_EFORMAT, g->where, NULL,
                       "'%s' is %.17g, it must be from %" PRId64 " to %" PRId64, key, d, min, max);
    *out = (int64_t)d;
    return LM_OK;
}

lm_code lm_gguf_f64_or(const lm_gguf *g, const char *key, double dflt, double *out, bool *given,
                       lm_err *e)
{
    const lm_gguf_value *v = lm_gguf_value_of(g, key);

    *out = dflt;
    if (given)
        *given = v != NULL;
    if (!v)
        return LM_OK;
    if (v->array || (!whole(v->kind) && v->kind != LM_GGUF_F32 && v->kind != LM_GGUF_F64))
        return wrong(g, key, "a number", e);
    *out = lm_gguf_number(v, 0);
    return LM_OK;
}

lm_code lm_gguf_bool_or(const lm_gguf *g, const char *key, bool dflt, bool *out, bool *given,
                        lm_err *e)
{
    const lm_gguf_value *v = lm_gguf_value_of(g, key);

    *out = dflt;
    if (given)
        *given = v != NULL;
    if (!v)
        return LM_OK;
    if (v->array || v->kind != LM_GGUF_BOOL)
        return wrong(g, key, "true or false", e);
    *out = v->data[0] != 0;
    return LM_OK;
}

lm_code lm_gguf_str(const lm_gguf *g, const char *key, lm_gguf_text *out, lm_err *e)
{
    const lm_gguf_value *v = lm_gguf_value_of(g, key);

    *out = (lm_gguf_text){ NULL, 0 };
    if (!v)
        return LM_OK;
    if (v->array || v->kind != LM_GGUF_STRING)
        return wrong(g, key, "a string", e);
    *out = (lm_gguf_text){ (const char *)v->data + 8, v->bytes - 8 };
    return LM_OK;
}

bool lm_gguf_next_str(lm_gguf_iter *it, lm_gguf_text *out)
{
    if (it->v->kind != LM_GGUF_STRING || it->i >= it->v->count)
        return false;
    out->len = lm_gguf_get(it->v->data + it->at, 8);
    out->text = (const char *)it->v->data + it->at + 8;
    it->at += 8 + out->len;
    it->i++;
    return true;
}
