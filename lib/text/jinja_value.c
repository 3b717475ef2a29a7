/* SPDX-License-Identifier: Apache-2.0 */
/* jinja_value.c -- making values and asking about them. */
#include "text/jinja_value.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/text.h"
#include "text/jinja_run.h"

/* ---- Making ---- */

lm_code lm_jv_lend(lm_jrun *r, const char *s, size_t len, lm_jval *out)
{
    lm_jstr *made = NULL;
    lm_code rc = lm_jrun_alloc(r, &made, 1, sizeof *made);

    if (rc)
        return rc;
    *made = (lm_jstr){ .s = s ? s : "", .len = s ? len : 0, .chars = -1 };
    out->kind = LM_JV_STR;
    out->u.s = made;
    return LM_OK;
}

lm_code lm_jv_part(lm_jrun *r, const lm_jstr *of, const char *s, size_t len, lm_jval *out)
{
    lm_jstr *made = NULL;
    lm_code rc = lm_jrun_alloc(r, &made, 1, sizeof *made);

    if (rc)
        return rc;
    *made = (lm_jstr){ .s = s, .len = len, .chars = -1, .safe = of->safe };
    out->kind = LM_JV_STR;
    out->u.s = made;
    return LM_OK;
}

lm_code lm_jv_text(lm_jrun *r, const char *s, size_t len, lm_jval *out)
{
    char *copy = NULL;
    lm_code rc = lm_jrun_alloc(r, &copy, len + 1, 1);

    if (rc)
        return rc;
    if (len)
        memcpy(copy, s, len);
    return lm_jv_lend(r, copy, len, out);
}

lm_code lm_jv_seq(lm_jrun *r, lm_jkind kind, size_t n, lm_jval *out)
{
    lm_jseq *seq = NULL;
    lm_code rc = lm_jrun_alloc(r, &seq, 1, sizeof *seq);

    if (!rc && n)
        rc = lm_jrun_alloc(r, &seq->v, n, sizeof *seq->v);
    if (rc)
        return rc;
    seq->cap = n;
    out->kind = kind;
    out->u.seq = seq;
    return LM_OK;
}

lm_code lm_jv_push(lm_jrun *r, lm_jseq *s, lm_jval v)
{
    if (s->n == s->cap) {
        lm_jval *longer = NULL;
        size_t cap = s->cap ? s->cap * 2 : 4;
        lm_code rc = lm_jrun_alloc(r, &longer, cap, sizeof *longer);

        if (rc)
            return rc;
        if (s->n)
            memcpy(longer, s->v, s->n * sizeof *longer);
        s->v = longer;
        s->cap = cap;
    }
    s->v[s->n++] = v;
    return LM_OK;
}

lm_code lm_jv_pair(lm_jrun *r, lm_jval a, lm_jval b, lm_jval *out)
{
    lm_code rc = lm_jv_seq(r, LM_JV_TUPLE, 2, out);

    if (rc)
        return rc;
    out->u.seq->v[0] = a;
    out->u.seq->v[1] = b;
    out->u.seq->n = 2;
    return LM_OK;
}

lm_code lm_jv_dict(lm_jrun *r, lm_jkind kind, size_t n, lm_jval *out)
{
    lm_jdict *d = NULL;
    lm_code rc = lm_jrun_alloc(r, &d, 1, sizeof *d);

    if (!rc && n)
        rc = lm_jrun_alloc(r, &d->v, n, sizeof *d->v);
    if (rc)
        return rc;
    d->cap = n;
    out->kind = kind;
    out->u.dict = d;
    return LM_OK;
}

lm_code lm_jv_func(lm_jrun *r, const char *name, lm_jfn *fn, const lm_jval *self, lm_jval *out)
{
    lm_jfunc *f = NULL;
    lm_code rc = lm_jrun_alloc(r, &f, 1, sizeof *f);

    if (!rc && self)
        rc = lm_jrun_alloc(r, &f->self, 1, sizeof *f->self);
    if (rc)
        return rc;
    f->name = name;
    f->fn = fn;
    if (self)
        *f->self = *self;
    out->kind = LM_JV_FUNC;
    out->u.func = f;
    return LM_OK;
}

lm_code lm_jv_undefined(lm_jrun *r, const lm_jundefined *u, lm_jval *out)
{
    lm_jundefined *made = NULL;
    lm_code rc = lm_jrun_alloc(r, &made, 1, sizeof *made);

    if (rc)
        return rc;
    *made = *u;
    out->kind = LM_JV_UNDEFINED;
    out->u.undefined = made;
    return LM_OK;
}

lm_code lm_jv_undefined_hint(lm_jrun *r, const char *hint, lm_jval *out)
{
    return lm_jv_undefined(r, &(lm_jundefined){ .hint = hint }, out);
}

/* ---- Asking ---- */

bool lm_jv_truth(const lm_jval *v)
{
    switch (v->kind) {
    case LM_JV_MISSING:
    case LM_JV_UNDEFINED:
    case LM_JV_NONE:
        return false;
    case LM_JV_BOOL:
        return v->u.b;
    case LM_JV_INT:
        return v->u.i != 0;
    case LM_JV_FLOAT:
        return v->u.f != 0;
    case LM_JV_STR:
        return v->u.s->len != 0;
    case LM_JV_LIST:
    case LM_JV_TUPLE:
    case LM_JV_RANGE:
    case LM_JV_VIEW:
        return v->u.seq->n != 0;
    case LM_JV_DICT:
        return v->u.dict->n != 0;
    default:
        return true;
    }
}

const char *lm_jv_type(const lm_jval *v)
{
    static const char *const names[] = {
        [LM_JV_MISSING] = "missing",  [LM_JV_UNDEFINED] = "Undefined",
        [LM_JV_NONE] = "NoneType",    [LM_JV_BOOL] = "bool",
        [LM_JV_INT] = "int",          [LM_JV_FLOAT] = "float",
        [LM_JV_STR] = "str",          [LM_JV_LIST] = "list",
        [LM_JV_TUPLE] = "tuple",      [LM_JV_RANGE] = "range",
        [LM_JV_VIEW] = "dict view",   [LM_JV_ITER] = "generator",
        [LM_JV_DICT] = "dict",        [LM_JV_NAMESPACE] = "namespace",
        [LM_JV_LOOP] = "LoopContext", [LM_JV_MACRO] = "Macro",
        [LM_JV_FUNC] = "function",
    };

    return v->kind == LM_JV_VIEW ? v->u.seq->what : names[v->kind];
}

bool lm_jv_integer(const lm_jval *v, int64_t *out)
{
    if (v->kind != LM_JV_INT && v->kind != LM_JV_BOOL)
        return false;
    *out = v->kind == LM_JV_BOOL ? v->u.b : v->u.i;
    return true;
}

double lm_jv_real(const lm_jval *v)
{
    return v->kind == LM_JV_FLOAT ? v->u.f : v->kind == LM_JV_BOOL ? v->u.b : (double)v->u.i;
}

int64_t lm_jv_chars(const lm_jstr *s)
{
    int64_t n = 0;

    if (s->chars >= 0)
        return s->chars;
    for (size_t i = 0; i < s->len; i++)
        n += ((unsigned char)s->s[i] & 0xC0) != 0x80;
    return n;
}

bool lm_jv_is(const lm_jval *v, const char *text)
{
    return v->kind == LM_JV_STR && v->u.s->len == strlen(text) &&
           !memcmp(v->u.s->s, text, v->u.s->len);
}

const char *lm_jv_undefined_message(const lm_jval *v, char *buf, size_t size)
{
    const lm_jundefined *u = v->u.undefined;

    if (u->hint)
        snprintf(buf, size, "%s", u->hint);
    else if (!u->type)
        snprintf(buf, size, "'%.100s' is undefined", u->name->s);
    else if (u->name)
        snprintf(buf, size, "'%s' has no attribute '%.100s'", u->type, u->name->s);
    else
        snprintf(buf, size, "%s has no element %lld", u->type, (long long)u->index);
    return buf;
}

lm_code lm_jv_length(lm_jrun *r, const lm_jval *v, int64_t *out)
{
    switch (v->kind) {
    case LM_JV_UNDEFINED:
        *out = 0;
        return LM_OK;
    case LM_JV_STR:
        *out = lm_jv_chars(v->u.s);
        return lm_jrun_walk(r, v->u.s);
    case LM_JV_LIST:
    case LM_JV_TUPLE:
    case LM_JV_RANGE:
    case LM_JV_VIEW:
        *out = (int64_t)v->u.seq->n;
        return LM_OK;
    case LM_JV_DICT:
        *out = (int64_t)v->u.dict->n;
        return LM_OK;
    default:
        return lm_jrun_fail(r, "object of type '%s' has no len()", lm_jv_type(v));
    }
}

/* Each character a text of its own. */
static lm_code split_characters(lm_jrun *r, const lm_jstr *s, lm_jseq *out)
{
    lm_code rc = LM_OK;
    size_t n;

    for (size_t i = 0; !rc && i < s->len; i += n) {
        lm_jval one;

        lm_utf8_get(s->s + i, s->len - i, &n);
        rc = lm_jv_lend(r, s->s + i, n, &one);
        if (!rc)
            rc = lm_jv_push(r, out, one);
    }
    return rc;
}

static lm_code loop_elements(lm_jrun *r, struct lm_jloop *l, lm_jseq *out)
{
    bool more = true;
    lm_code rc = LM_OK;

    while (!rc && more) {
        lm_jval one, pair = { 0 };

        rc = lm_jloop_pull(l, &one, &more);
        if (!rc && more)
            rc = lm_jv_pair(r, one, (lm_jval){ LM_JV_LOOP, { .loop = l } }, &pair);
        if (!rc && more)
            rc = lm_jv_push(r, out, pair);
    }
    return rc;
}

lm_code lm_jv_elements(lm_jrun *r, const lm_jval *v, lm_jseq *out)
{
    lm_code rc = LM_OK;

    *out = (lm_jseq){ 0 };
    switch (v->kind) {
    case LM_JV_UNDEFINED:
        return LM_OK;
    case LM_JV_STR:
        return split_characters(r, v->u.s, out);
    case LM_JV_LIST:
    case LM_JV_TUPLE:
    case LM_JV_RANGE:
    case LM_JV_VIEW:
        out->v = v->u.seq->v;
        out->n = out->cap = v->u.seq->n;
        return LM_OK;
    case LM_JV_ITER:
        out->v = v->u.seq->v ? v->u.seq->v + v->u.seq->at : NULL;
        out->n = out->cap = v->u.seq->n - v->u.seq->at;
        v->u.seq->at = v->u.seq->n;
        return LM_OK;
    case LM_JV_DICT:
        for (size_t i = 0; !rc && i < v->u.dict->n; i++)
            rc = lm_jv_push(r, out, v->u.dict->v[i].key);
        return rc;
    case LM_JV_LOOP:
        return loop_elements(r, v->u.loop, out);
    default:
        return lm_jrun_fail(r, "'%s' object is not iterable", lm_jv_type(v));
    }
}
