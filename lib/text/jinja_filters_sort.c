/* SPDX-License-Identifier: Apache-2.0 */
/* jinja_filters_sort.c -- filters that order: sort, dictsort, groupby. */
#include <string.h>

#include "text/jinja_run.h"

/* "a,b": a tuple of keys. */
static lm_code keys_of(lm_jrun *r, const lm_jval *v, const lm_jval *paths, bool exact, lm_jval *out)
{
    lm_jval key, one;
    lm_code rc;

    if (paths->kind != LM_JV_STR || !memchr(paths->u.s->s, ',', paths->u.s->len))
        return lm_jpath_key(r, v, paths, exact, NULL, out);
    rc = lm_jv_seq(r, LM_JV_LIST, 0, out);
    for (const char *p = paths->u.s->s, *end = p + paths->u.s->len; !rc;) {
        const char *comma = memchr(p, ',', (size_t)(end - p));

        rc = lm_jv_lend(r, p, (size_t)((comma ? comma : end) - p), &one);
        if (!rc)
            rc = lm_jpath_key(r, v, &one, exact, NULL, &key);
        if (!rc)
            rc = lm_jv_push(r, out->u.seq, key);
        if (!comma)
            break;
        p = comma + 1;
    }
    return rc;
}

/* ---- Sorting: a stable merge of values by their keys ---- */

typedef struct {
    lm_jval key, value;
} keyed;

static lm_code merge_sort(lm_jrun *r, keyed *v, keyed *spare, size_t n, bool reverse)
{
    size_t half = n / 2, i = 0, j = half, k = 0;
    lm_code rc;

    if (n < 2)
        return LM_OK;
    rc = merge_sort(r, v, spare, half, reverse);
    if (!rc)
        rc = merge_sort(r, v + half, spare, n - half, reverse);
    while (!rc && i < half && j < n) {
        int order = 0;

        rc = lm_jv_order(r, &v[j].key, &v[i].key, "<", &order);
        spare[k++] = (reverse ? order == 1 : order == -1) ? v[j++] : v[i++];
    }
    if (rc)
        return rc;
    while (i < half)
        spare[k++] = v[i++];
    memcpy(v, spare, k * sizeof *v);
    return LM_OK;
}

static lm_code sort_keyed(lm_jrun *r, keyed *v, size_t n, bool reverse)
{
    keyed *spare = NULL;
    lm_code rc = lm_jrun_alloc(r, &spare, n + 1, sizeof *spare);

    return rc ? rc : merge_sort(r, v, spare, n, reverse);
}

static lm_code collect(lm_jrun *r, const keyed *v, size_t n, lm_jval *out)
{
    lm_code rc = lm_jv_seq(r, LM_JV_LIST, n, out);

    for (size_t i = 0; !rc && i < n; i++)
        rc = lm_jv_push(r, out->u.seq, v[i].value);
    return rc;
}

LM_JFILTER(do_sort)
{
    bool reverse = lm_jarg_truth(&arg[0], false), exact = lm_jarg_truth(&arg[1], false);
    keyed *list = NULL;
    lm_jseq all;
    lm_code rc = lm_jv_elements(r, v, &all);

    (void)c;
    if (!rc)
        rc = lm_jrun_alloc(r, &list, all.n + 1, sizeof *list);
    for (size_t i = 0; !rc && i < all.n; i++) {
        list[i].value = all.v[i];
        rc = keys_of(r, &all.v[i], &arg[2], exact, &list[i].key);
    }
    if (!rc)
        rc = sort_keyed(r, list, all.n, reverse);
    return rc ? rc : collect(r, list, all.n, out);
}

LM_JFILTER(do_dictsort)
{
    bool exact = lm_jarg_truth(&arg[0], false), reverse = lm_jarg_truth(&arg[2], false);
    bool by_value = lm_jv_is(&arg[1], "value");
    lm_jval none = { 0 };
    keyed *list = NULL;
    lm_code rc = LM_OK;

    (void)c;
    if (v->kind != LM_JV_DICT)
        return lm_jrun_fail(r, "dictsort needs a dict, not '%s'", lm_jv_type(v));
    if (arg[1].kind != LM_JV_MISSING && !by_value && !lm_jv_is(&arg[1], "key"))
        return lm_jrun_fail(r, "You can only sort by either \"key\" or \"value\"");
    rc = lm_jrun_alloc(r, &list, v->u.dict->n + 1, sizeof *list);
    for (size_t i = 0; !rc && i < v->u.dict->n; i++) {
        const lm_jpair *p = &v->u.dict->v[i];

        rc = lm_jv_pair(r, p->key, p->value, &list[i].value);
        if (!rc)
            rc = lm_jpath_key(r, by_value ? &p->value : &p->key, &none, exact, NULL, &list[i].key);
    }
    if (!rc)
        rc = sort_keyed(r, list, v->u.dict->n, reverse);
    return rc ? rc : collect(r, list, v->u.dict->n, out);
}

LM_JFILTER(do_groupby)
{
    bool exact = lm_jarg_truth(&arg[2], false), same = false;
    const lm_jval *dflt =
        arg[1].kind == LM_JV_MISSING || arg[1].kind == LM_JV_NONE ? NULL : &arg[1];
    keyed *list = NULL;
    lm_jseq all;
    lm_jval group = { 0 };
    lm_code rc = lm_jv_elements(r, v, &all);

    (void)c;
    if (!rc)
        rc = lm_jrun_alloc(r, &list, all.n + 1, sizeof *list);
    for (size_t i = 0; !rc && i < all.n; i++) {
        list[i].value = all.v[i];
        rc = lm_jpath_key(r, &all.v[i], &arg[0], exact, dflt, &list[i].key);
    }
    if (!rc)
        rc = sort_keyed(r, list, all.n, false);
    if (!rc)
        rc = lm_jv_seq(r, LM_JV_LIST, 0, out);
    for (size_t i = 0; !rc && i < all.n; i++) {
        lm_jval key = { 0 }, pair = { 0 };

        if (i)
            rc = lm_jv_equal(r, &list[i].key, &list[i - 1].key, &same);
        if (!rc && !(i && same)) {
            rc = lm_jv_seq(r, LM_JV_LIST, 0, &group);
            if (!rc)
                rc = lm_jpath_follow(r, &list[i].value, &arg[0], dflt, &key);
            if (!rc)
                rc = lm_jv_pair(r, key, group, &pair);
            if (!rc)
                rc = lm_jv_push(r, out->u.seq, pair);
        }
        if (!rc)
            rc = lm_jv_push(r, group.u.seq, list[i].value);
    }
    return rc;
}

const lm_jfilter lm_jfilters_sort[] = {
    { "sort", "reverse=,case_sensitive=,attribute=", do_sort },
    { "dictsort", "case_sensitive=,by=,reverse=", do_dictsort },
    { "groupby", "attribute,default=,case_sensitive=", do_groupby },
    { NULL, NULL, NULL },
};
