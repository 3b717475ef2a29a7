/* SPDX-License-Identifier: Apache-2.0 */
/* jinja_compare.c -- equality, order, membership, and dictionaries, which need them. */
#include <string.h>

#include "text/jinja_run.h"

/* ---- Comparing ---- */

static lm_code equal_seq(lm_jrun *r, const lm_jseq *a, const lm_jseq *b, bool *out)
{
    lm_code rc = LM_OK;

    *out = a->n == b->n;
    for (size_t i = 0; !rc && *out && i < a->n; i++)
        rc = lm_jv_equal(r, &a->v[i], &b->v[i], out);
    return rc;
}

static lm_code equal_dict(lm_jrun *r, const lm_jdict *a, const lm_jdict *b, bool *out)
{
    lm_code rc = LM_OK;

    *out = a->n == b->n;
    for (size_t i = 0; !rc && *out && i < a->n; i++) {
        lm_jval *other = NULL;

        rc = lm_jv_dict_get(r, b, &a->v[i].key, &other);
        *out = other != NULL;
        if (!rc && other)
            rc = lm_jv_equal(r, &a->v[i].value, other, out);
    }
    return rc;
}

static bool equal_numbers(const lm_jval *a, const lm_jval *b)
{
    int64_t i, j;

    if (lm_jv_integer(a, &i) && lm_jv_integer(b, &j))
        return i == j;
    return lm_jv_real(a) == lm_jv_real(b);
}

lm_code lm_jv_equal(lm_jrun *r, const lm_jval *a, const lm_jval *b, bool *out)
{
    lm_code rc = lm_jrun_work(r, 1);

    *out = false;
    if (rc)
        return rc;
    if (lm_jv_is_number(a) && lm_jv_is_number(b)) {
        *out = equal_numbers(a, b);
        return LM_OK;
    }
    if (a->kind != b->kind)
        return LM_OK;
    switch (a->kind) {
    case LM_JV_NONE:
    case LM_JV_UNDEFINED:
        *out = true;
        return LM_OK;
    case LM_JV_STR:
        *out = a->u.s->len == b->u.s->len && !memcmp(a->u.s->s, b->u.s->s, a->u.s->len);
        return lm_jrun_work(r, *out ? a->u.s->len / 64 : 0);
    case LM_JV_LIST:
    case LM_JV_TUPLE:
    case LM_JV_RANGE:
    case LM_JV_DICT:
        rc = lm_jrun_enter(r);
        if (rc)
            return rc;
        rc = a->kind == LM_JV_DICT ? equal_dict(r, a->u.dict, b->u.dict, out)
                                   : equal_seq(r, a->u.seq, b->u.seq, out);
        lm_jrun_leave(r);
        return rc;
    default:
        *out = a->u.seq == b->u.seq; /* the same object */
        return LM_OK;
    }
}

static lm_code order_seq(lm_jrun *r, const lm_jseq *a, const lm_jseq *b, const char *op, int *out)
{
    lm_code rc = lm_jrun_enter(r);
    bool same = true;

    if (rc)
        return rc;
    *out = 0;
    for (size_t i = 0; !rc && same && i < a->n && i < b->n; i++) {
        rc = lm_jv_equal(r, &a->v[i], &b->v[i], &same);
        if (!rc && !same)
            rc = lm_jv_order(r, &a->v[i], &b->v[i], op, out);
    }
    if (same)
        *out = (a->n > b->n) - (a->n < b->n);
    lm_jrun_leave(r);
    return rc;
}

lm_code lm_jv_order(lm_jrun *r, const lm_jval *a, const lm_jval *b, const char *op, int *out)
{
    char message[200];
    int64_t i, j;
    lm_code rc = lm_jrun_work(r, 1);

    *out = 0;
    if (rc)
        return rc;
    if (lm_jv_integer(a, &i) && lm_jv_integer(b, &j)) {
        *out = (i > j) - (i < j);
        return LM_OK;
    }
    if (lm_jv_is_number(a) && lm_jv_is_number(b)) {
        double x = lm_jv_real(a), y = lm_jv_real(b);

        *out = x == y ? 0 : x < y ? -1 : x > y ? 1 : 2; /* 2: not a number */
        return LM_OK;
    }
    if (a->kind == LM_JV_STR &&
        b->kind == LM_JV_STR) { /* the order of UTF-8 is that of code points */
        size_t n = a->u.s->len < b->u.s->len ? a->u.s->len : b->u.s->len;
        int cmp = memcmp(a->u.s->s, b->u.s->s, n);

        *out =
            cmp ? (cmp > 0) - (cmp < 0) : (a->u.s->len > b->u.s->len) - (a->u.s->len < b->u.s->len);
        return LM_OK;
    }
    if (a->kind == b->kind && (a->kind == LM_JV_LIST || a->kind == LM_JV_TUPLE))
        return order_seq(r, a->u.seq, b->u.seq, op, out);
    if (a->kind == LM_JV_UNDEFINED || b->kind == LM_JV_UNDEFINED)
        return lm_jrun_fail(
            r, "%s",
            lm_jv_undefined_message(a->kind == LM_JV_UNDEFINED ? a : b, message, sizeof message));
    return lm_jrun_fail(r, "'%s' not supported between instances of '%s' and '%s'", op,
                        lm_jv_type(a), lm_jv_type(b));
}

lm_code lm_jv_within(lm_jrun *r, const lm_jval *a, const lm_jval *b, bool *out)
{
    char message[200];
    lm_jseq all;
    lm_jval *value = NULL;
    lm_code rc;

    *out = false;
    if (b->kind == LM_JV_STR) {
        if (a->kind == LM_JV_UNDEFINED)
            return lm_jrun_fail(r, "%s", lm_jv_undefined_message(a, message, sizeof message));
        if (a->kind != LM_JV_STR)
            return lm_jrun_fail(r, "'in <string>' requires string as left operand, not %s",
                                lm_jv_type(a));
        *out = !a->u.s->len || memmem(b->u.s->s, b->u.s->len, a->u.s->s, a->u.s->len);
        return lm_jrun_work(r, b->u.s->len / 64);
    }
    if (b->kind == LM_JV_DICT) {
        rc = lm_jv_dict_get(r, b->u.dict, a, &value);
        *out = value != NULL;
        return rc;
    }
    if (b->kind != LM_JV_UNDEFINED && !lm_jv_is_seq(b) && b->kind != LM_JV_LOOP)
        return lm_jrun_fail(r, "argument of type '%s' is not iterable", lm_jv_type(b));
    rc = lm_jv_elements(r, b, &all);
    for (size_t i = 0; !rc && !*out && i < all.n; i++)
        rc = lm_jv_equal(r, a, &all.v[i], out);
    return rc;
}

/* ---- Dictionaries ---- */

static bool can_hash(const lm_jval *v)
{
    if (v->kind == LM_JV_TUPLE)
        for (size_t i = 0; i < v->u.seq->n; i++)
            if (v->u.seq->v[i].kind == LM_JV_TUPLE || !can_hash(&v->u.seq->v[i]))
                return false; /* tuples in tuples are refused too: no template has them as keys */
    return v->kind != LM_JV_LIST && v->kind != LM_JV_DICT;
}

const lm_jval *lm_jv_dict_at(const lm_jdict *d, const char *key, size_t len)
{
    for (size_t i = 0; i < d->n; i++) {
        const lm_jval *k = &d->v[i].key;

        if (k->kind == LM_JV_STR && k->u.s->len == len && !memcmp(k->u.s->s, key, len))
            return &d->v[i].value;
    }
    return NULL;
}

lm_code lm_jv_dict_get(lm_jrun *r, const lm_jdict *d, const lm_jval *key, lm_jval **out)
{
    lm_code rc = lm_jrun_work(r, d->n / 16);

    *out = NULL;
    if (rc)
        return rc;
    if (key->kind == LM_JV_STR) {
        *out = (lm_jval *)(uintptr_t)lm_jv_dict_at(d, key->u.s->s, key->u.s->len);
        return LM_OK;
    }
    if (!can_hash(key))
        return lm_jrun_fail(r, "unhashable type: '%s'", lm_jv_type(key));
    for (size_t i = 0; !rc && !*out && i < d->n; i++) {
        bool same = false;

        rc = lm_jv_equal(r, &d->v[i].key, key, &same);
        if (same)
            *out = &d->v[i].value;
    }
    return rc;
}

lm_code lm_jv_dict_set(lm_jrun *r, lm_jdict *d, lm_jval key, lm_jval value)
{
    lm_jval *old = NULL;
    lm_code rc = lm_jv_dict_get(r, d, &key, &old);

    if (rc)
        return rc;
    if (old) {
        *old = value;
        return LM_OK;
    }
    if (d->n == d->cap) {
        lm_jpair *longer = NULL;
        size_t cap = d->cap ? d->cap * 2 : 4;

        rc = lm_jrun_alloc(r, &longer, cap, sizeof *longer);
        if (rc)
            return rc;
        if (d->n)
            memcpy(longer, d->v, d->n * sizeof *longer);
        d->v = longer;
        d->cap = cap;
    }
    d->v[d->n++] = (lm_jpair){ key, value };
    return LM_OK;
}
