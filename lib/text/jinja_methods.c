/* SPDX-License-Identifier: Apache-2.0 */
/* jinja_methods.c -- the methods of list, dict and numbers that a template may call: those that
 * change nothing. */
#include <string.h>

#include "text/jinja_run.h"

/* ---- Lists ---- */

static lm_code do_list_count(lm_jrun *r, const lm_jval *self, const lm_jcall *c, lm_jval *out)
{
    int64_t n = 0;
    LM_JBIND("count", "value");

    for (size_t i = 0; !rc && i < self->u.seq->n; i++) {
        bool same;

        rc = lm_jv_equal(r, &self->u.seq->v[i], &arg[0], &same);
        n += same;
    }
    *out = lm_jv_int(n);
    return rc;
}

static lm_code do_list_index(lm_jrun *r, const lm_jval *self, const lm_jcall *c, lm_jval *out)
{
    bool same = false;
    size_t i = 0;
    LM_JBIND("index", "value");

    for (; !rc && i < self->u.seq->n; i++) {
        rc = lm_jv_equal(r, &self->u.seq->v[i], &arg[0], &same);
        if (same)
            break;
    }
    *out = lm_jv_int((int64_t)i);
    return rc || same ? rc : lm_jrun_fail(r, "the value is not in the list");
}

static lm_code do_list_copy(lm_jrun *r, const lm_jval *self, const lm_jcall *c, lm_jval *out)
{
    LM_JBIND("copy", "");
    *out = *self; /* nothing can change it */
    return LM_OK;
}

/* ---- Dictionaries ---- */

static lm_code do_get(lm_jrun *r, const lm_jval *self, const lm_jcall *c, lm_jval *out)
{
    lm_jval *v = NULL;
    LM_JBIND("get", "key,default=");

    rc = lm_jv_dict_get(r, self->u.dict, &arg[0], &v);
    *out = v ? *v : arg[1].kind == LM_JV_MISSING ? lm_jv_none() : arg[1];
    return rc;
}

static lm_code view(lm_jrun *r, const lm_jval *self, const lm_jcall *c, int which, lm_jval *out)
{
    static const char *const names[] = { "dict_keys", "dict_values", "dict_items" };
    const lm_jdict *d = self->u.dict;
    LM_JBIND(names[which] + 5, "");

    rc = lm_jv_seq(r, LM_JV_VIEW, d->n, out);
    for (size_t i = 0; !rc && i < d->n; i++) {
        lm_jval v = which == 0 ? d->v[i].key : d->v[i].value;

        if (which == 2)
            rc = lm_jv_pair(r, d->v[i].key, d->v[i].value, &v);
        if (!rc)
            rc = lm_jv_push(r, out->u.seq, v);
    }
    if (!rc)
        out->u.seq->what = names[which];
    return rc;
}
static lm_code do_keys(lm_jrun *r, const lm_jval *self, const lm_jcall *c, lm_jval *out)
{
    return view(r, self, c, 0, out);
}
static lm_code do_values(lm_jrun *r, const lm_jval *self, const lm_jcall *c, lm_jval *out)
{
    return view(r, self, c, 1, out);
}
static lm_code do_items(lm_jrun *r, const lm_jval *self, const lm_jcall *c, lm_jval *out)
{
    return view(r, self, c, 2, out);
}

static lm_code do_is_integer(lm_jrun *r, const lm_jval *self, const lm_jcall *c, lm_jval *out)
{
    double f = lm_jv_real(self);
    LM_JBIND("is_integer", "");

    *out = lm_jv_bool(f == (double)(int64_t)(f > -9e18 && f < 9e18 ? f : 0) || f <= -9e18 ||
                      f >= 9e18);
    return LM_OK;
}

/* ---- Tables ---- */

static const lm_jmethod of_list[] = {
    { "count", do_list_count }, { "index", do_list_index }, { "copy", do_list_copy },
    { "append", NULL },         { "clear", NULL },          { "pop", NULL },
    { "reverse", NULL },        { "insert", NULL },         { "sort", NULL },
    { "extend", NULL },         { "remove", NULL },         { NULL, NULL },
};
static const lm_jmethod of_tuple[] = { { "count", do_list_count },
                                       { "index", do_list_index },
                                       { NULL, NULL } };
static const lm_jmethod of_dict[] = {
    { "get", do_get },        { "keys", do_keys }, { "values", do_values }, { "items", do_items },
    { "copy", do_list_copy }, { "clear", NULL },   { "pop", NULL },         { "popitem", NULL },
    { "setdefault", NULL },   { "update", NULL },  { NULL, NULL },
};
static const lm_jmethod of_number[] = { { "is_integer", do_is_integer }, { NULL, NULL } };

static const lm_jmethod *method_named(const lm_jmethod *m, const lm_jstr *name)
{
    for (; m && m->name; m++)
        if (strlen(m->name) == name->len && !memcmp(m->name, name->s, name->len))
            return m;
    return NULL;
}

lm_code lm_jmethod_of(lm_jrun *r, const lm_jval *of, const lm_jstr *name, bool *found, bool *unsafe,
                      lm_jval *out)
{
    const lm_jmethod *m = of->kind == LM_JV_STR     ? lm_jmethods_text
                          : of->kind == LM_JV_LIST  ? of_list
                          : of->kind == LM_JV_TUPLE ? of_tuple
                          : of->kind == LM_JV_DICT  ? of_dict
                          : lm_jv_is_number(of)     ? of_number
                                                    : NULL;

    m = method_named(m, name);
    if (!m && of->kind == LM_JV_STR)
        m = method_named(lm_jmethods_split, name);
    *unsafe = m && !m->fn;
    *found = m && m->fn;
    return *found ? lm_jv_func(r, m->name, m->fn, of, out) : LM_OK;
}
