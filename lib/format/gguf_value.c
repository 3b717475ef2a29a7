/* SPDX-License-Identifier: Apache-2.0 */
/* gguf_value.c -- values of keys as numbers and texts. */
#include <inttypes.h>
#include <string.h>

#include "format/gguf_impl.h"

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
