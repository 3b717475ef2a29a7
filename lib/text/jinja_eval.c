/* SPDX-License-Identifier: Apache-2.0 */
/* jinja_eval.c -- expressions evaluated. */
#include <string.h>

#include "text/jinja_run.h"

/* ---- Collections ---- */

static lm_code eval_items(lm_jrun *r, const lm_jnode *n, lm_jval *out)
{
    lm_jval made = { 0 };
    lm_code rc = n->kind == LM_JN_DICT
                     ? lm_jv_dict(r, LM_JV_DICT, n->n / 2, &made)
                     : lm_jv_seq(r, n->kind == LM_JN_LIST ? LM_JV_LIST : LM_JV_TUPLE, n->n, &made);

    for (size_t i = 0; !rc && i < n->n; i++) {
        lm_jval v, key;

        rc = lm_jrun_eval(r, n->item[i], &v);
        if (!rc && n->kind != LM_JN_DICT) {
            made.u.seq->v[made.u.seq->n++] = v;
        } else if (!rc) {
            key = v;
            rc = lm_jrun_eval(r, n->item[++i], &v);
            if (!rc)
                rc = lm_jv_dict_set(r, made.u.dict, key, v);
        }
    }
    *out = made;
    return rc;
}

static lm_code eval_concat(lm_jrun *r, const lm_jnode *n, lm_jval *out)
{
    lm_buf text = { 0 };
    lm_code rc = LM_OK;

    for (size_t i = 0; !rc && i < n->n; i++) {
        lm_jval v;

        rc = lm_jrun_eval(r, n->item[i], &v);
        if (!rc)
            rc = lm_jv_str(r, &v, &text);
    }
    if (!rc)
        rc = lm_jv_text(r, text.data, text.len, out);
    lm_buf_fini(&text);
    return rc;
}

/* ---- Comparisons ---- */

static lm_code compare(lm_jrun *r, lm_jop op, const lm_jval *a, const lm_jval *b, bool *out)
{
    static const char *const names[] = { "==", "!=", "<", "<=", ">", ">=" };
    int order = 0;
    lm_code rc;

    if (op == LM_JOP_EQ || op == LM_JOP_NE) {
        rc = lm_jv_equal(r, a, b, out);
        *out ^= op == LM_JOP_NE;
        return rc;
    }
    if (op == LM_JOP_IN || op == LM_JOP_NOT_IN) {
        rc = lm_jv_within(r, a, b, out);
        *out ^= op == LM_JOP_NOT_IN;
        return rc;
    }
    rc = lm_jv_order(r, a, b, names[op], &order);
    *out = order != 2 && (op == LM_JOP_LT   ? order < 0
                          : op == LM_JOP_LE ? order <= 0
                          : op == LM_JOP_GT ? order > 0
                                            : order >= 0);
    return rc;
}

static lm_code eval_compare(lm_jrun *r, const lm_jnode *n, lm_jval *out)
{
    lm_jval a, b;
    bool yes = true;
    lm_code rc = lm_jrun_eval(r, n->a, &a);

    for (size_t i = 0; !rc && yes && i < n->n; i++) {
        rc = lm_jrun_eval(r, n->item[i], &b);
        r->at = n;
        if (!rc)
            rc = compare(r, n->ops[i], &a, &b, &yes);
        a = b;
    }
    *out = lm_jv_bool(yes);
    return rc;
}

/* ---- Calls ---- */

/* Values of the arguments of a call, filter or test. */
static lm_code eval_arguments(lm_jrun *r, const lm_jnode *n, size_t spare, lm_jcall *out)
{
    lm_jval star = { 0 }, pairs = { 0 };
    lm_jseq more = { 0 };
    size_t extra = 0;
    lm_code rc = LM_OK;

    *out = (lm_jcall){ 0 };
    if (!n->n && !n->n_kw && !n->star && !n->star_star && !spare)
        return LM_OK;
    if (n->star)
        rc = lm_jrun_eval(r, n->star, &star);
    if (!rc && n->star)
        rc = lm_jv_elements(r, &star, &more);
    if (!rc && n->star_star)
        rc = lm_jrun_eval(r, n->star_star, &pairs);
    if (!rc && n->star_star && pairs.kind != LM_JV_DICT)
        return lm_jrun_fail(r, "argument after ** must be a mapping, not %s", lm_jv_type(&pairs));
    extra = pairs.kind == LM_JV_DICT ? pairs.u.dict->n : 0;
    if (!rc)
        rc = lm_jrun_alloc(r, &out->pos, n->n + more.n + 1, sizeof *out->pos);
    if (!rc)
        rc = lm_jrun_alloc(r, &out->kw, n->n_kw + extra + spare + 1, sizeof *out->kw);
    if (!rc)
        rc = lm_jrun_alloc(r, &out->name, n->n_kw + extra + spare + 1, sizeof *out->name);
    for (size_t i = 0; !rc && i < n->n; i++)
        rc = lm_jrun_eval(r, n->item[i], &out->pos[out->n++]);
    for (size_t i = 0; !rc && i < more.n; i++)
        out->pos[out->n++] = more.v[i];
    for (size_t i = 0; !rc && i < n->n_kw; i++) {
        out->name[i] = n->kw_name[i];
        rc = lm_jrun_eval(r, n->kw[i], &out->kw[out->n_kw++]);
    }
    for (size_t i = 0; !rc && i < extra; i++) {
        if (pairs.u.dict->v[i].key.kind != LM_JV_STR)
            return lm_jrun_fail(r, "keywords must be strings");
        out->name[out->n_kw] = pairs.u.dict->v[i].key.u.s;
        out->kw[out->n_kw++] = pairs.u.dict->v[i].value;
    }
    r->at = n;
    return rc;
}

lm_code lm_jrun_call(lm_jrun *r, const lm_jval *f, const lm_jcall *c, lm_jval *out)
{
    if (f->kind == LM_JV_FUNC)
        return f->u.func->fn(r, f->u.func->self, c, out);
    if (f->kind == LM_JV_MACRO)
        return lm_jmacro_call(r, f->u.macro, c, out);
    if (f->kind == LM_JV_UNDEFINED)
        return lm_jrun_fail_undefined(r, f);
    return lm_jrun_fail(r, "'%s' object is not callable", lm_jv_type(f));
}

static lm_code eval_call(lm_jrun *r, const lm_jnode *n, lm_jval *out)
{
    lm_jval f;
    lm_jcall c;
    lm_code rc = lm_jrun_eval(r, n->a, &f);

    if (!rc)
        rc = eval_arguments(r, n, 1, &c);
    r->at = n;
    return rc ? rc : lm_jrun_call(r, &f, &c, out);
}

/* A call block: the call with a function more, named caller. */
static lm_code call_with_caller(lm_jrun *r, const lm_jnode *n, lm_jval *out)
{
    struct lm_jmacro *m = NULL;
    lm_jstr *name = NULL;
    lm_jval f;
    lm_jcall c;
    lm_code rc = lm_jrun_eval(r, n->a->a, &f);

    if (!rc)
        rc = eval_arguments(r, n->a, 1, &c);
    if (!rc)
        rc = lm_jrun_alloc(r, &m, 1, sizeof *m);
    if (!rc)
        rc = lm_jrun_alloc(r, &name, 1, sizeof *name);
    if (rc)
        return rc;
    m->node = n->macro;
    m->scope = r->scope;
    r->macros++;
    *name = (lm_jstr){ "caller", 6, 6, false };
    c.name[c.n_kw] = name;
    c.kw[c.n_kw++] = (lm_jval){ LM_JV_MACRO, { .macro = m } };
    r->at = n;
    return lm_jrun_call(r, &f, &c, out);
}

lm_code lm_jrun_filter(lm_jrun *r, const lm_jnode *n, const lm_jval *v, lm_jval *out)
{
    lm_jval operand = *v;
    lm_jcall c;
    lm_code rc = LM_OK;

    if (!n) {
        *out = *v;
        return LM_OK;
    }
    if (n->a)
        rc = lm_jrun_filter(r, n->a, v, &operand);
    r->at = n;
    if (!rc && !n->entry)
        return lm_jrun_fail(r, "no filter is named '%.60s'", n->text->s);
    if (!rc)
        rc = eval_arguments(r, n, 0, &c);
    return rc ? rc : lm_jfilter_apply(r, n->entry, &operand, &c, out);
}

static lm_code eval_filter(lm_jrun *r, const lm_jnode *n, lm_jval *out)
{
    lm_jval v;
    lm_jcall c;
    lm_code rc;

    r->at = n;
    if (!n->entry)
        return lm_jrun_fail(r, "no filter is named '%.60s'", n->text->s);
    rc = lm_jrun_eval(r, n->a, &v);
    if (!rc)
        rc = eval_arguments(r, n, 0, &c);
    r->at = n;
    return rc ? rc : lm_jfilter_apply(r, n->entry, &v, &c, out);
}

static lm_code eval_test(lm_jrun *r, const lm_jnode *n, lm_jval *out)
{
    lm_jval v;
    lm_jcall c;
    bool yes = false;
    lm_code rc;

    r->at = n;
    if (!n->entry)
        return lm_jrun_fail(r, "no test is named '%.60s'", n->text->s);
    rc = lm_jrun_eval(r, n->a, &v);
    if (!rc)
        rc = eval_arguments(r, n, 0, &c);
    r->at = n;
    if (!rc)
        rc = lm_jtest_apply(r, n->entry, &v, &c, &yes);
    *out = lm_jv_bool(yes);
    return rc;
}

/* ---- All ---- */

static lm_code eval_two(lm_jrun *r, const lm_jnode *n, lm_jval *out)
{
    lm_jval a, b;
    lm_code rc = lm_jrun_eval(r, n->a, &a);

    if (!rc)
        rc = lm_jrun_eval(r, n->b, &b);
    r->at = n;
    if (rc)
        return rc;
    return n->kind == LM_JN_ITEM ? lm_jrun_item(r, &a, &b, out)
                                 : lm_jrun_binary(r, n->op, &a, &b, out);
}

static lm_code eval_sign(lm_jrun *r, const lm_jnode *n, lm_jval *out)
{
    lm_jval v;
    int64_t i;
    lm_code rc = lm_jrun_eval(r, n->a, &v);

    r->at = n;
    if (rc)
        return rc;
    if (v.kind == LM_JV_UNDEFINED)
        return lm_jrun_fail_undefined(r, &v);
    if (!lm_jv_is_number(&v))
        return lm_jrun_fail(r, "bad operand type for unary %s: '%s'",
                            n->kind == LM_JN_NEG ? "-" : "+", lm_jv_type(&v));
    if (lm_jv_integer(&v, &i)) {
        if (i == INT64_MIN && n->kind == LM_JN_NEG)
            return lm_jrun_fail(r, "an integer beyond 64 bits");
        *out = lm_jv_int(n->kind == LM_JN_NEG ? -i : i);
    } else {
        *out = lm_jv_float(n->kind == LM_JN_NEG ? -v.u.f : v.u.f);
    }
    return LM_OK;
}

static lm_code eval_choice(lm_jrun *r, const lm_jnode *n, lm_jval *out)
{
    lm_jval v;
    bool truth;
    lm_code rc = lm_jrun_eval(r, n->kind == LM_JN_COND ? n->b : n->a, &v);

    if (rc)
        return rc;
    truth = lm_jv_truth(&v);
    if (n->kind == LM_JN_COND) {
        if (truth)
            return lm_jrun_eval(r, n->a, out);
        if (n->c)
            return lm_jrun_eval(r, n->c, out);
        return lm_jv_undefined_hint(
            r, "the inline if-expression evaluated to false and no else section was defined", out);
    }
    if (truth == (n->kind == LM_JN_OR)) {
        *out = v;
        return LM_OK;
    }
    return lm_jrun_eval(r, n->b, out);
}

static lm_code eval_one(lm_jrun *r, const lm_jnode *n, lm_jval *out)
{
    lm_jval v;
    lm_code rc;

    switch (n->kind) {
    case LM_JN_CONST:
        *out = n->value;
        return LM_OK;
    case LM_JN_NAME:
        return lm_jrun_name(r, n, out);
    case LM_JN_TUPLE:
    case LM_JN_LIST:
    case LM_JN_DICT:
        return eval_items(r, n, out);
    case LM_JN_ATTR:
        rc = lm_jrun_eval(r, n->a, &v);
        r->at = n;
        return rc ? rc : lm_jrun_attribute(r, &v, n->text, out);
    case LM_JN_ITEM:
    case LM_JN_BINARY:
        return eval_two(r, n, out);
    case LM_JN_SLICE:
        return lm_jrun_slice(r, n, out);
    case LM_JN_CALL:
        return eval_call(r, n, out);
    case LM_JN_CALL_BLOCK:
        return call_with_caller(r, n, out);
    case LM_JN_FILTER:
        return eval_filter(r, n, out);
    case LM_JN_TEST:
        return eval_test(r, n, out);
    case LM_JN_NOT:
        rc = lm_jrun_eval(r, n->a, &v);
        *out = lm_jv_bool(!rc && !lm_jv_truth(&v));
        return rc;
    case LM_JN_NEG:
    case LM_JN_POS:
        return eval_sign(r, n, out);
    case LM_JN_CONCAT:
        return eval_concat(r, n, out);
    case LM_JN_AND:
    case LM_JN_OR:
    case LM_JN_COND:
        return eval_choice(r, n, out);
    case LM_JN_COMPARE:
        return eval_compare(r, n, out);
    default:
        return lm_jrun_fail(r, "a statement where a value is needed");
    }
}

lm_code lm_jrun_eval(lm_jrun *r, const lm_jnode *n, lm_jval *out)
{
    lm_code rc;

    *out = lm_jv_none();
    r->at = n;
    rc = lm_jrun_work(r, 1);
    if (!rc)
        rc = lm_jrun_enter(r);
    if (rc)
        return rc;
    rc = eval_one(r, n, out);
    lm_jrun_leave(r);
    return rc;
}
