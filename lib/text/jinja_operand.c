/* SPDX-License-Identifier: Apache-2.0 */
/* jinja_operand.c -- the parser of operands and of what follows them: .name [item] (call) |filter
 * is-test. */
#include <string.h>

#include "text/jinja_run.h"

/* "[a, b]" and "{a: b}" behind the bracket. */
static lm_code parse_items(lm_jparser *p, bool dict, lm_jnode *node)
{
    const char *end = dict ? "}" : "]";
    size_t cap = 0;
    lm_code rc = LM_OK;

    while (!rc && !lm_jparse_skip(p, LM_JT_OP, end)) {
        lm_jnode *one = NULL;

        if (node->n) {
            rc = lm_jparse_expect(p, LM_JT_OP, ",");
            if (!rc && lm_jparse_skip(p, LM_JT_OP, end))
                break;
        }
        if (!rc)
            rc = lm_jparse_expression(p, true, &one);
        if (!rc)
            rc = lm_jparse_append(p, &node->item, &node->n, &cap, one);
        if (!rc && dict)
            rc = lm_jparse_expect(p, LM_JT_OP, ":");
        if (!rc && dict)
            rc = lm_jparse_expression(p, true, &one);
        if (!rc && dict)
            rc = lm_jparse_append(p, &node->item, &node->n, &cap, one);
    }
    return rc;
}

/* Strings beside each other are one. */
static lm_code parse_string(lm_jparser *p, lm_jnode *node)
{
    lm_buf all = { 0 };
    const lm_jstr *text = p->at->text;
    lm_code rc = LM_OK;

    if (p->at[1].kind != LM_JT_STRING) {
        p->at++;
    } else {
        for (; !rc && p->at->kind == LM_JT_STRING; p->at++)
            rc = lm_buf_add(&all, p->at->text->s, p->at->text->len, p->err);
        if (!rc)
            rc = lm_jinja_str(p->t, all.data, all.len, &text, p->err);
        lm_buf_fini(&all);
    }
    node->value.kind = LM_JV_STR;
    node->value.u.s = text;
    return rc;
}

static bool is_word(const lm_jtoken *k, const char *small, const char *large)
{
    return !strcmp(k->text->s, small) || !strcmp(k->text->s, large);
}

static lm_code parse_name(lm_jparser *p, lm_jnode *node)
{
    const lm_jtoken *k = p->at++;

    if (is_word(k, "true", "True") || is_word(k, "false", "False")) {
        node->value = lm_jv_bool(is_word(k, "true", "True"));
        return LM_OK;
    }
    if (is_word(k, "none", "None")) {
        node->value = lm_jv_none();
        return LM_OK;
    }
    node->kind = LM_JN_NAME;
    node->text = k->text;
    p->caller |= !strcmp(k->text->s, "caller");
    p->varargs |= !strcmp(k->text->s, "varargs");
    p->kwargs |= !strcmp(k->text->s, "kwargs");
    return lm_jparse_name_id(p, k->text, &node->id);
}

static lm_code parse_primary(lm_jparser *p, lm_jnode **out)
{
    const lm_jtoken *k = p->at;
    lm_jnode *node = NULL;
    lm_code rc = lm_jparse_new(p, LM_JN_CONST, &node);

    if (rc)
        return rc;
    *out = node;
    switch (k->kind) {
    case LM_JT_NAME:
        return parse_name(p, node);
    case LM_JT_STRING:
        return parse_string(p, node);
    case LM_JT_INT:
        p->at++;
        node->value = lm_jv_int(k->i);
        return LM_OK;
    case LM_JT_FLOAT:
        p->at++;
        node->value = lm_jv_float(k->f);
        return LM_OK;
    default:
        break;
    }
    if (lm_jparse_skip(p, LM_JT_OP, "(")) {
        rc = lm_jparse_tuple(p, true, NULL, true, out);
        return rc ? rc : lm_jparse_expect(p, LM_JT_OP, ")");
    }
    if (lm_jparse_skip(p, LM_JT_OP, "[")) {
        node->kind = LM_JN_LIST;
        return parse_items(p, false, node);
    }
    if (lm_jparse_skip(p, LM_JT_OP, "{")) {
        node->kind = LM_JN_DICT;
        return parse_items(p, true, node);
    }
    return lm_jparse_unexpected(p, "an expression");
}

/* ---- What follows an operand ---- */

static lm_code parse_keyword(lm_jparser *p, lm_jnode *node, size_t *cap)
{
    const lm_jstr *name = p->at->text, **longer = NULL;
    lm_jnode *value = NULL;
    size_t had = *cap;
    lm_code rc;

    p->at += 2;
    rc = lm_jparse_expression(p, true, &value);
    if (rc)
        return rc;
    rc = lm_jparse_append(p, &node->kw, &node->n_kw, cap, value);
    if (!rc && *cap != had) {
        rc = lm_arena_alloc(p->t->mem, &longer, *cap, sizeof *longer, p->err);
        if (!rc && node->n_kw > 1)
            memcpy(longer, node->kw_name, (node->n_kw - 1) * sizeof *longer);
        if (!rc)
            node->kw_name = longer;
    }
    if (!rc)
        node->kw_name[node->n_kw - 1] = name;
    return rc;
}

/* Arguments behind "(". */
static lm_code parse_arguments(lm_jparser *p, lm_jnode *node)
{
    size_t cap = 0, cap_kw = 0;
    bool any = false;
    lm_jnode *one = NULL;
    lm_code rc = LM_OK;

    while (!rc && !lm_jparse_skip(p, LM_JT_OP, ")")) {
        if (any) {
            rc = lm_jparse_expect(p, LM_JT_OP, ",");
            if (!rc && lm_jparse_skip(p, LM_JT_OP, ")"))
                break;
        }
        any = true;
        if (rc)
            break;
        if (lm_jparse_skip(p, LM_JT_OP, "*")) {
            if (node->star || node->star_star)
                return lm_jparse_unexpected(p, "an argument");
            rc = lm_jparse_expression(p, true, &node->star);
        } else if (lm_jparse_skip(p, LM_JT_OP, "**")) {
            if (node->star_star)
                return lm_jparse_unexpected(p, "an argument");
            rc = lm_jparse_expression(p, true, &node->star_star);
        } else if (p->at->kind == LM_JT_NAME && p->at[1].kind == LM_JT_OP &&
                   !strcmp(p->at[1].text->s, "=")) {
            if (node->star_star)
                return lm_jparse_unexpected(p, "')'");
            rc = parse_keyword(p, node, &cap_kw);
        } else {
            if (node->star || node->star_star || node->n_kw)
                return lm_jparse_unexpected(p, "an argument with a name");
            rc = lm_jparse_expression(p, true, &one);
            if (!rc)
                rc = lm_jparse_append(p, &node->item, &node->n, &cap, one);
        }
    }
    return rc;
}

/* One index or slice of "[...]". */
static lm_code parse_index(lm_jparser *p, lm_jnode **out)
{
    lm_jnode *part[3] = { NULL, NULL, NULL }, *node = NULL;
    size_t cap = 0;
    bool slice = false;
    lm_code rc = lm_jparse_new(p, LM_JN_SLICE, &node);

    for (int i = 0; !rc && i < 3; i++) {
        if (!lm_jparse_is(p, LM_JT_OP, ":") && !lm_jparse_is(p, LM_JT_OP, "]") &&
            !lm_jparse_is(p, LM_JT_OP, ","))
            rc = lm_jparse_expression(p, true, &part[i]);
        if (!rc && !lm_jparse_skip(p, LM_JT_OP, ":"))
            break;
        slice = true;
    }
    if (rc)
        return rc;
    if (!slice) {
        *out = part[0];
        return part[0] ? LM_OK : lm_jparse_unexpected(p, "an index");
    }
    for (int i = 0; !rc && i < 3; i++)
        rc = lm_jparse_append(p, &node->item, &node->n, &cap, part[i]);
    *out = node;
    return rc;
}

/* "[...]" behind the bracket. */
static lm_code parse_subscript(lm_jparser *p, lm_jnode *of, lm_jnode **out)
{
    lm_jnode *node = NULL, *key = NULL;
    lm_code rc = lm_jparse_new(p, LM_JN_ITEM, &node);

    if (!rc)
        rc = parse_index(p, &key);
    if (!rc && lm_jparse_is(p, LM_JT_OP, ","))
        return lm_jparse_wrong(p, "several indices at once are not supported");
    if (!rc)
        rc = lm_jparse_expect(p, LM_JT_OP, "]");
    if (rc)
        return rc;
    if (key->kind == LM_JN_SLICE) {
        key->a = of;
        *out = key;
        return LM_OK;
    }
    node->a = of;
    node->b = key;
    *out = node;
    return LM_OK;
}

static lm_code parse_dot(lm_jparser *p, lm_jnode *of, lm_jnode **out)
{
    lm_jnode *node = NULL, *key = NULL;
    lm_code rc = lm_jparse_new(p, LM_JN_ATTR, &node);

    if (rc)
        return rc;
    node->a = of;
    *out = node;
    if (p->at->kind == LM_JT_NAME) {
        node->text = p->at++->text;
        return LM_OK;
    }
    if (p->at->kind != LM_JT_INT)
        return lm_jparse_unexpected(p, "a name");
    node->kind = LM_JN_ITEM;
    rc = parse_primary(p, &key);
    node->b = key;
    return rc;
}

static lm_code parse_call(lm_jparser *p, lm_jnode *of, lm_jnode **out)
{
    lm_jnode *node = NULL;
    lm_code rc = lm_jparse_new(p, LM_JN_CALL, &node);

    p->at++;
    if (rc)
        return rc;
    node->a = of;
    *out = node;
    return parse_arguments(p, node);
}

static lm_code parse_postfix(lm_jparser *p, lm_jnode **node)
{
    lm_code rc = LM_OK;

    while (!rc) {
        if (lm_jparse_is(p, LM_JT_OP, "("))
            rc = parse_call(p, *node, node);
        else if (lm_jparse_skip(p, LM_JT_OP, "."))
            rc = parse_dot(p, *node, node);
        else if (lm_jparse_skip(p, LM_JT_OP, "["))
            rc = parse_subscript(p, *node, node);
        else
            break;
    }
    return rc;
}

lm_code lm_jparse_filters(lm_jparser *p, lm_jnode *operand, bool started, lm_jnode **out)
{
    lm_code rc = LM_OK;

    *out = operand;
    while (!rc && (started || lm_jparse_skip(p, LM_JT_OP, "|"))) {
        lm_jnode *node = NULL;

        started = false;
        if (p->at->kind != LM_JT_NAME)
            return lm_jparse_unexpected(p, "the name of a filter");
        rc = lm_jparse_new(p, LM_JN_FILTER, &node);
        if (rc)
            break;
        node->text = p->at++->text;
        node->entry = lm_jfilter_named(node->text->s, node->text->len);
        node->a = *out;
        if (lm_jparse_skip(p, LM_JT_OP, "("))
            rc = parse_arguments(p, node);
        *out = node;
    }
    return rc;
}

/* The argument of a test may follow without brackets: "is divisibleby 3". */
static bool test_has_operand(const lm_jparser *p)
{
    const lm_jtoken *k = p->at;

    if (k->kind == LM_JT_NAME)
        return strcmp(k->text->s, "else") != 0 && strcmp(k->text->s, "or") != 0 &&
               strcmp(k->text->s, "and") != 0;
    if (k->kind == LM_JT_OP)
        return strchr("[{", k->text->s[0]) != NULL;
    return k->kind == LM_JT_STRING || k->kind == LM_JT_INT || k->kind == LM_JT_FLOAT;
}

/* Behind "is". */
static lm_code parse_test(lm_jparser *p, lm_jnode *of, lm_jnode **out)
{
    lm_jnode *node = NULL, *negated = NULL, *one = NULL;
    size_t cap = 0;
    lm_code rc = lm_jparse_new(p, LM_JN_TEST, &node);

    if (!rc && lm_jparse_skip(p, LM_JT_NAME, "not"))
        rc = lm_jparse_new(p, LM_JN_NOT, &negated);
    if (rc)
        return rc;
    if (p->at->kind != LM_JT_NAME)
        return lm_jparse_unexpected(p, "the name of a test");
    node->text = p->at++->text;
    node->entry = lm_jtest_named(node->text->s, node->text->len);
    node->a = of;
    if (lm_jparse_skip(p, LM_JT_OP, "(")) {
        rc = parse_arguments(p, node);
    } else if (test_has_operand(p)) {
        if (lm_jparse_is(p, LM_JT_NAME, "is"))
            return lm_jparse_wrong(p, "tests cannot follow each other: put the first in brackets");
        rc = parse_primary(p, &one);
        if (!rc)
            rc = parse_postfix(p, &one);
        if (!rc)
            rc = lm_jparse_append(p, &node->item, &node->n, &cap, one);
    }
    if (negated)
        negated->a = node;
    *out = negated ? negated : node;
    return rc;
}

lm_code lm_jparse_unary(lm_jparser *p, bool with_filters, lm_jnode **out)
{
    lm_jnode *node = NULL;
    bool minus = lm_jparse_is(p, LM_JT_OP, "-");
    lm_code rc;

    if (++p->depth > LM_JINJA_MAX_DEPTH)
        return lm_jparse_wrong(p, "expressions inside each other deeper than %d",
                               LM_JINJA_MAX_DEPTH);
    if (minus || lm_jparse_is(p, LM_JT_OP, "+")) {
        rc = lm_jparse_new(p, minus ? LM_JN_NEG : LM_JN_POS, &node);
        p->at++;
        if (!rc)
            rc = lm_jparse_unary(p, false, &node->a);
    } else {
        rc = parse_primary(p, &node);
    }
    if (!rc)
        rc = parse_postfix(p, &node);
    while (!rc && with_filters) {
        if (lm_jparse_is(p, LM_JT_OP, "|"))
            rc = lm_jparse_filters(p, node, false, &node);
        else if (lm_jparse_skip(p, LM_JT_NAME, "is"))
            rc = parse_test(p, node, &node);
        else if (lm_jparse_is(p, LM_JT_OP, "("))
            rc = parse_call(p, node, &node);
        else
            break;
    }
    p->depth--;
    *out = node;
    return rc;
}
