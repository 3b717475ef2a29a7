/* SPDX-License-Identifier: Apache-2.0 */
/* jinja_tests.c -- the tests behind "is", and those that select and selectattr name. */
#include <string.h>

#include "text/jinja_run.h"

#define UNUSED (void)r, (void)arg

static lm_code is_defined(lm_jrun *r, const lm_jval *v, const lm_jval *arg, bool *out)
{
    UNUSED;
    *out = v->kind != LM_JV_UNDEFINED;
    return LM_OK;
}
static lm_code is_undefined(lm_jrun *r, const lm_jval *v, const lm_jval *arg, bool *out)
{
    UNUSED;
    *out = v->kind == LM_JV_UNDEFINED;
    return LM_OK;
}
static lm_code is_none(lm_jrun *r, const lm_jval *v, const lm_jval *arg, bool *out)
{
    UNUSED;
    *out = v->kind == LM_JV_NONE;
    return LM_OK;
}
static lm_code is_boolean(lm_jrun *r, const lm_jval *v, const lm_jval *arg, bool *out)
{
    UNUSED;
    *out = v->kind == LM_JV_BOOL;
    return LM_OK;
}
static lm_code is_true(lm_jrun *r, const lm_jval *v, const lm_jval *arg, bool *out)
{
    UNUSED;
    *out = v->kind == LM_JV_BOOL && v->u.b;
    return LM_OK;
}
static lm_code is_false(lm_jrun *r, const lm_jval *v, const lm_jval *arg, bool *out)
{
    UNUSED;
    *out = v->kind == LM_JV_BOOL && !v->u.b;
    return LM_OK;
}
static lm_code is_integer(lm_jrun *r, const lm_jval *v, const lm_jval *arg, bool *out)
{
    UNUSED;
    *out = v->kind == LM_JV_INT;
    return LM_OK;
}
static lm_code is_float(lm_jrun *r, const lm_jval *v, const lm_jval *arg, bool *out)
{
    UNUSED;
    *out = v->kind == LM_JV_FLOAT;
    return LM_OK;
}
static lm_code is_number(lm_jrun *r, const lm_jval *v, const lm_jval *arg, bool *out)
{
    UNUSED;
    *out = lm_jv_is_number(v);
    return LM_OK;
}
static lm_code is_string(lm_jrun *r, const lm_jval *v, const lm_jval *arg, bool *out)
{
    UNUSED;
    *out = v->kind == LM_JV_STR;
    return LM_OK;
}
static lm_code is_mapping(lm_jrun *r, const lm_jval *v, const lm_jval *arg, bool *out)
{
    UNUSED;
    *out = v->kind == LM_JV_DICT;
    return LM_OK;
}
/* What has a length and indices: dictionaries and undefined values too. */
static lm_code is_sequence(lm_jrun *r, const lm_jval *v, const lm_jval *arg, bool *out)
{
    UNUSED;
    *out = v->kind == LM_JV_LIST || v->kind == LM_JV_TUPLE || v->kind == LM_JV_RANGE ||
           v->kind == LM_JV_STR || v->kind == LM_JV_DICT || v->kind == LM_JV_UNDEFINED;
    return LM_OK;
}
static lm_code is_iterable(lm_jrun *r, const lm_jval *v, const lm_jval *arg, bool *out)
{
    UNUSED;
    *out = lm_jv_is_seq(v) || v->kind == LM_JV_STR || v->kind == LM_JV_DICT ||
           v->kind == LM_JV_UNDEFINED || v->kind == LM_JV_LOOP;
    return LM_OK;
}
static lm_code is_callable(lm_jrun *r, const lm_jval *v, const lm_jval *arg, bool *out)
{
    UNUSED;
    *out = v->kind == LM_JV_MACRO || v->kind == LM_JV_FUNC || v->kind == LM_JV_UNDEFINED ||
           v->kind == LM_JV_LOOP;
    return LM_OK;
}
static lm_code is_escaped(lm_jrun *r, const lm_jval *v, const lm_jval *arg, bool *out)
{
    UNUSED;
    (void)v;
    *out = false;
    return LM_OK;
}

static lm_code is_cased(lm_jrun *r, const lm_jval *v, bool upper, bool *out)
{
    const lm_jstr *s;
    lm_code rc = lm_jv_to_str(r, v, &s);

    *out = !rc && lm_jstr_cased(s, upper);
    return rc ? rc : lm_jrun_work(r, s->len);
}
static lm_code is_upper(lm_jrun *r, const lm_jval *v, const lm_jval *arg, bool *out)
{
    (void)arg;
    return is_cased(r, v, true, out);
}
static lm_code is_lower(lm_jrun *r, const lm_jval *v, const lm_jval *arg, bool *out)
{
    (void)arg;
    return is_cased(r, v, false, out);
}

/* v % by == rest */
static lm_code leaves(lm_jrun *r, const lm_jval *v, const lm_jval *by, int64_t rest, bool *out)
{
    lm_jval left, wanted = lm_jv_int(rest);
    lm_code rc = lm_jrun_binary(r, LM_JOP_MOD, v, by, &left);

    return rc ? rc : lm_jv_equal(r, &left, &wanted, out);
}
static lm_code is_odd(lm_jrun *r, const lm_jval *v, const lm_jval *arg, bool *out)
{
    lm_jval two = lm_jv_int(2);

    (void)arg;
    return leaves(r, v, &two, 1, out);
}
static lm_code is_even(lm_jrun *r, const lm_jval *v, const lm_jval *arg, bool *out)
{
    lm_jval two = lm_jv_int(2);

    (void)arg;
    return leaves(r, v, &two, 0, out);
}
static lm_code is_divisible(lm_jrun *r, const lm_jval *v, const lm_jval *arg, bool *out)
{
    return leaves(r, v, &arg[0], 0, out);
}

static lm_code is_same(lm_jrun *r, const lm_jval *v, const lm_jval *arg, bool *out)
{
    *out = false;
    if (v->kind != arg[0].kind)
        return LM_OK;
    if (lm_jv_is_seq(v) || v->kind == LM_JV_DICT) {
        *out = v->u.seq == arg[0].u.seq;
        return LM_OK;
    }
    return lm_jv_equal(r, v, &arg[0], out);
}
static lm_code is_filter(lm_jrun *r, const lm_jval *v, const lm_jval *arg, bool *out)
{
    UNUSED;
    *out = v->kind == LM_JV_STR && lm_jfilter_named(v->u.s->s, v->u.s->len);
    return LM_OK;
}
static lm_code is_test(lm_jrun *r, const lm_jval *v, const lm_jval *arg, bool *out)
{
    UNUSED;
    *out = v->kind == LM_JV_STR && lm_jtest_named(v->u.s->s, v->u.s->len);
    return LM_OK;
}

static lm_code is_eq(lm_jrun *r, const lm_jval *v, const lm_jval *arg, bool *out)
{
    return lm_jv_equal(r, v, &arg[0], out);
}
static lm_code is_ne(lm_jrun *r, const lm_jval *v, const lm_jval *arg, bool *out)
{
    lm_code rc = lm_jv_equal(r, v, &arg[0], out);

    *out = !*out;
    return rc;
}
static lm_code is_in(lm_jrun *r, const lm_jval *v, const lm_jval *arg, bool *out)
{
    return lm_jv_within(r, v, &arg[0], out);
}
static lm_code ordered(lm_jrun *r, const lm_jval *v, const lm_jval *arg, const char *op, bool *out)
{
    int order = 0;
    lm_code rc = lm_jv_order(r, v, &arg[0], op, &order);

    *out = !rc && order != 2 && ((op[0] == '<' ? order < 0 : order > 0) || (op[1] && !order));
    return rc;
}
static lm_code is_lt(lm_jrun *r, const lm_jval *v, const lm_jval *arg, bool *out)
{
    return ordered(r, v, arg, "<", out);
}
static lm_code is_le(lm_jrun *r, const lm_jval *v, const lm_jval *arg, bool *out)
{
    return ordered(r, v, arg, "<=", out);
}
static lm_code is_gt(lm_jrun *r, const lm_jval *v, const lm_jval *arg, bool *out)
{
    return ordered(r, v, arg, ">", out);
}
static lm_code is_ge(lm_jrun *r, const lm_jval *v, const lm_jval *arg, bool *out)
{
    return ordered(r, v, arg, ">=", out);
}

static const lm_jtest tests[] = {
    { "defined", "", is_defined },     { "undefined", "", is_undefined },
    { "none", "", is_none },           { "boolean", "", is_boolean },
    { "true", "", is_true },           { "false", "", is_false },
    { "integer", "", is_integer },     { "float", "", is_float },
    { "number", "", is_number },       { "string", "", is_string },
    { "mapping", "", is_mapping },     { "sequence", "", is_sequence },
    { "iterable", "", is_iterable },   { "callable", "", is_callable },
    { "escaped", "", is_escaped },     { "upper", "", is_upper },
    { "lower", "", is_lower },         { "odd", "", is_odd },
    { "even", "", is_even },           { "divisibleby", "num", is_divisible },
    { "sameas", "other", is_same },    { "filter", "", is_filter },
    { "test", "", is_test },           { "in", "seq", is_in },
    { "eq", "other", is_eq },          { "==", "other", is_eq },
    { "equalto", "other", is_eq },     { "ne", "other", is_ne },
    { "!=", "other", is_ne },          { "lt", "other", is_lt },
    { "<", "other", is_lt },           { "lessthan", "other", is_lt },
    { "le", "other", is_le },          { "<=", "other", is_le },
    { "gt", "other", is_gt },          { ">", "other", is_gt },
    { "greaterthan", "other", is_gt }, { "ge", "other", is_ge },
    { ">=", "other", is_ge },
};

const lm_jtest *lm_jtest_named(const char *name, size_t len)
{
    for (size_t i = 0; i < sizeof tests / sizeof *tests; i++)
        if (strlen(tests[i].name) == len && !memcmp(tests[i].name, name, len))
            return &tests[i];
    return NULL;
}

lm_code lm_jtest_apply(lm_jrun *r, const lm_jtest *t, const lm_jval *v, const lm_jcall *c,
                       bool *out)
{
    lm_jval arg[LM_JARGS_MAX];
    lm_code rc = lm_jcall_bind(r, c, t->name, t->params, arg);

    return rc ? rc : t->fn(r, v, arg, out);
}
