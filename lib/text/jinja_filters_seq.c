/* SPDX-License-Identifier: Apache-2.0 */
/* jinja_filters_seq.c -- filters over sequences.  Those that are generators in jinja2 give a value
 * that can be iterated once. */
#include <string.h>

#include "text/jinja_run.h"

#define UNUSED (void)arg, (void)c

/* ---- Paths: "a.b.0" ---- */

/* The value behind a path; *dflt (may be NULL) replaces undefined steps. */
lm_code lm_jpath_follow(lm_jrun *r, const lm_jval *v, const lm_jval *path, const lm_jval *dflt,
                        lm_jval *out)
{
    lm_code rc = LM_OK;

    *out = *v;
    if (path->kind != LM_JV_STR) {
        lm_jval from = *out;

        if (path->kind == LM_JV_MISSING || path->kind == LM_JV_NONE)
            return LM_OK;
        rc = lm_jrun_item(r, &from, path, out);
        if (!rc && dflt && out->kind == LM_JV_UNDEFINED)
            *out = *dflt;
        return rc;
    }
    for (const char *p = path->u.s->s, *end = p + path->u.s->len; !rc;) {
        const char *dot = memchr(p, '.', (size_t)(end - p));
        size_t n = (size_t)((dot ? dot : end) - p);
        lm_jval key, from = *out;
        int64_t number = 0;
        size_t digits = 0;

        for (; digits < n && digits < 18 && p[digits] >= '0' && p[digits] <= '9'; digits++)
            number = number * 10 + (p[digits] - '0');
        rc = lm_jv_lend(r, p, n, &key);
        if (n && digits == n)
            key = lm_jv_int(number);
        if (!rc)
            rc = lm_jrun_item(r, &from, &key, out);
        if (!rc && dflt && out->kind == LM_JV_UNDEFINED)
            *out = *dflt;
        if (!dot)
            break;
        p = dot + 1;
    }
    return rc;
}

/* What elements are compared by: the value behind the path, small letters unless `exact`. */
lm_code lm_jpath_key(lm_jrun *r, const lm_jval *v, const lm_jval *path, bool exact,
                     const lm_jval *dflt, lm_jval *out)
{
    lm_code rc = lm_jpath_follow(r, v, path, dflt, out);

    if (!rc && !exact && out->kind == LM_JV_STR)
        rc = lm_jstr_case(r, out->u.s, false, out);
    return rc;
}

/* ---- One of a sequence ---- */

LM_JFILTER(do_first)
{
    lm_jseq all;
    lm_code rc = LM_OK;

    UNUSED;
    if (v->kind == LM_JV_ITER && v->u.seq->at < v->u.seq->n) {
        *out = v->u.seq->v[v->u.seq->at++]; /* the rest stays */
        return LM_OK;
    }
    rc = lm_jv_elements(r, v, &all);
    if (rc || !all.n)
        return rc ? rc : lm_jv_undefined_hint(r, "No first item, sequence was empty.", out);
    *out = all.v[0];
    return LM_OK;
}

LM_JFILTER(do_last)
{
    lm_jseq all;
    lm_code rc;

    UNUSED;
    if (v->kind == LM_JV_ITER)
        return lm_jrun_fail(r, "'generator' object is not reversible");
    rc = lm_jv_elements(r, v, &all);
    if (rc || !all.n)
        return rc ? rc : lm_jv_undefined_hint(r, "No last item, sequence was empty.", out);
    *out = all.v[all.n - 1];
    return LM_OK;
}

static lm_code choose(lm_jrun *r, const lm_jval *v, const lm_jval *arg, int wanted, lm_jval *out)
{
    bool exact = lm_jarg_truth(&arg[0], false);
    lm_jseq all;
    lm_jval best = { 0 }, key;
    lm_code rc = lm_jv_elements(r, v, &all);

    if (!rc && !all.n)
        return lm_jv_undefined_hint(r, "No aggregated item, sequence was empty.", out);
    for (size_t i = 0; !rc && i < all.n; i++) {
        int order = wanted;

        rc = lm_jpath_key(r, &all.v[i], &arg[1], exact, NULL, &key);
        if (!rc && i)
            rc = lm_jv_order(r, &key, &best, wanted < 0 ? "<" : ">", &order);
        if (order == wanted) {
            best = key;
            *out = all.v[i];
        }
    }
    return rc;
}

LM_JFILTER(do_min)
{
    (void)c;
    return choose(r, v, arg, -1, out);
}

LM_JFILTER(do_max)
{
    (void)c;
    return choose(r, v, arg, 1, out);
}

/* ---- All of a sequence ---- */

LM_JFILTER(do_length)
{
    int64_t n;
    lm_code rc = lm_jv_length(r, v, &n);

    UNUSED;
    *out = lm_jv_int(rc ? 0 : n);
    return rc;
}

LM_JFILTER(do_list)
{
    lm_jseq all;
    lm_code rc = lm_jv_elements(r, v, &all);

    UNUSED;
    if (!rc)
        rc = lm_jv_seq(r, LM_JV_LIST, all.n, out);
    for (size_t i = 0; !rc && i < all.n; i++)
        rc = lm_jv_push(r, out->u.seq, all.v[i]);
    return rc;
}

LM_JFILTER(do_items)
{
    lm_code rc = LM_OK;

    UNUSED;
    if (v->kind != LM_JV_DICT && v->kind != LM_JV_UNDEFINED)
        return lm_jrun_fail(r, "Can only get item pairs from a mapping.");
    rc = lm_jv_seq(r, LM_JV_ITER, 0, out);
    for (size_t i = 0; !rc && v->kind == LM_JV_DICT && i < v->u.dict->n; i++) {
        lm_jval pair;

        rc = lm_jv_pair(r, v->u.dict->v[i].key, v->u.dict->v[i].value, &pair);
        if (!rc)
            rc = lm_jv_push(r, out->u.seq, pair);
    }
    return rc;
}

LM_JFILTER(do_reverse)
{
    lm_buf text = { 0 };
    lm_jseq all;
    lm_code rc = lm_jv_elements(r, v, &all);

    UNUSED;
    if (!rc && v->kind == LM_JV_STR) {
        for (size_t i = all.n; !rc && i-- > 0;)
            rc = lm_jrun_add(r, &text, all.v[i].u.s->s, all.v[i].u.s->len);
        if (!rc)
            rc = lm_jv_text(r, text.data, text.len, out);
        lm_buf_fini(&text);
        return rc;
    }
    if (!rc)
        rc = lm_jv_seq(r, v->kind == LM_JV_ITER ? LM_JV_LIST : LM_JV_ITER, all.n, out);
    for (size_t i = all.n; !rc && i-- > 0;)
        rc = lm_jv_push(r, out->u.seq, all.v[i]);
    return rc;
}

LM_JFILTER(do_join)
{
    const lm_jstr *between = NULL;
    lm_buf text = { 0 };
    lm_jseq all;
    lm_code rc = lm_jv_elements(r, v, &all);

    (void)c;
    if (!rc && arg[0].kind != LM_JV_MISSING)
        rc = lm_jv_to_str(r, &arg[0], &between);
    for (size_t i = 0; !rc && i < all.n; i++) {
        lm_jval one = all.v[i];

        if (i && between)
            rc = lm_jrun_add(r, &text, between->s, between->len);
        if (!rc)
            rc = lm_jpath_follow(r, &all.v[i], &arg[1], NULL, &one);
        if (!rc)
            rc = lm_jv_str(r, &one, &text);
    }
    if (!rc)
        rc = lm_jv_text(r, text.data, text.len, out);
    lm_buf_fini(&text);
    return rc;
}

LM_JFILTER(do_sum)
{
    lm_jseq all;
    lm_code rc = lm_jv_elements(r, v, &all);

    (void)c;
    *out = arg[1].kind == LM_JV_MISSING ? lm_jv_int(0) : arg[1];
    for (size_t i = 0; !rc && i < all.n; i++) {
        lm_jval one, before = *out;

        rc = lm_jpath_follow(r, &all.v[i], &arg[0], NULL, &one);
        if (!rc)
            rc = lm_jrun_binary(r, LM_JOP_ADD, &before, &one, out);
    }
    return rc;
}

LM_JFILTER(do_unique)
{
    bool exact = lm_jarg_truth(&arg[0], false);
    lm_jval seen, key;
    lm_jseq all;
    lm_code rc = lm_jv_elements(r, v, &all);

    (void)c;
    if (!rc)
        rc = lm_jv_dict(r, LM_JV_DICT, 0, &seen);
    if (!rc)
        rc = lm_jv_seq(r, LM_JV_ITER, 0, out);
    for (size_t i = 0; !rc && i < all.n; i++) {
        lm_jval *old = NULL;

        rc = lm_jpath_key(r, &all.v[i], &arg[1], exact, NULL, &key);
        if (!rc)
            rc = lm_jv_dict_get(r, seen.u.dict, &key, &old);
        if (rc || old)
            continue;
        rc = lm_jv_dict_set(r, seen.u.dict, key, lm_jv_none());
        if (!rc)
            rc = lm_jv_push(r, out->u.seq, all.v[i]);
    }
    return rc;
}

LM_JFILTER(do_batch)
{
    int64_t size;
    lm_jseq all;
    lm_code rc = lm_jarg_int(r, &arg[0], 0, &size);

    (void)c;
    if (!rc)
        rc = lm_jv_elements(r, v, &all);
    if (!rc && size < 1)
        return lm_jrun_fail(r, "batches need one element at least");
    if (!rc)
        rc = lm_jv_seq(r, LM_JV_ITER, 0, out);
    for (size_t i = 0; !rc && i < all.n;) {
        lm_jval group;

        rc = lm_jv_seq(r, LM_JV_LIST, 0, &group);
        for (int64_t k = 0; !rc && k < size; k++) {
            if (i < all.n)
                rc = lm_jv_push(r, group.u.seq, all.v[i++]);
            else if (arg[1].kind != LM_JV_MISSING && arg[1].kind != LM_JV_NONE)
                rc = lm_jv_push(r, group.u.seq, arg[1]);
            else
                break;
        }
        if (!rc)
            rc = lm_jv_push(r, out->u.seq, group);
    }
    return rc;
}

LM_JFILTER(do_slice)
{
    int64_t count;
    size_t from = 0;
    lm_jseq all;
    lm_code rc = lm_jarg_int(r, &arg[0], 0, &count);

    (void)c;
    if (!rc)
        rc = lm_jv_elements(r, v, &all);
    if (!rc && count < 1)
        return lm_jrun_fail(r, "integer division or modulo by zero");
    if (!rc)
        rc = lm_jv_seq(r, LM_JV_ITER, 0, out);
    for (int64_t k = 0; !rc && k < count; k++) {
        size_t rest = all.n % (size_t)count, n = all.n / (size_t)count + ((size_t)k < rest);
        lm_jval group;

        rc = lm_jv_seq(r, LM_JV_LIST, n + 1, &group);
        for (size_t i = 0; !rc && i < n; i++)
            rc = lm_jv_push(r, group.u.seq, all.v[from++]);
        if (!rc && (size_t)k >= rest && arg[1].kind != LM_JV_MISSING && arg[1].kind != LM_JV_NONE)
            rc = lm_jv_push(r, group.u.seq, arg[1]);
        if (!rc)
            rc = lm_jv_push(r, out->u.seq, group);
    }
    return rc;
}

LM_JFILTER(do_attr)
{
    const lm_jstr *name;
    lm_code rc = lm_jarg_str(r, &arg[0], "the name of an attribute", &name);

    (void)c;
    if (rc || !name)
        return rc ? rc : lm_jrun_fail(r, "attr needs the name of an attribute");
    if (v->kind == LM_JV_DICT && lm_jv_dict_at(v->u.dict, name->s, name->len))
        return lm_jv_undefined(r, &(lm_jundefined){ .type = "dict object", .name = name }, out);
    return lm_jrun_attribute(r, v, name, out);
}

const lm_jfilter lm_jfilters_seq[] = {
    { "length", "", do_length },
    { "count", "", do_length },
    { "list", "", do_list },
    { "items", "", do_items },
    { "first", "", do_first },
    { "last", "", do_last },
    { "min", "case_sensitive=,attribute=", do_min },
    { "max", "case_sensitive=,attribute=", do_max },
    { "reverse", "", do_reverse },
    { "join", "d=,attribute=", do_join },
    { "sum", "attribute=,start=", do_sum },
    { "unique", "case_sensitive=,attribute=", do_unique },
    { "batch", "linecount,fill_with=", do_batch },
    { "slice", "slices,fill_with=", do_slice },
    { "attr", "name", do_attr },
    { NULL, NULL, NULL },
};
