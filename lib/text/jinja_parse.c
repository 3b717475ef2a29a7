/* SPDX-License-Identifier: Apache-2.0 */
/* jinja_parse.c -- expressions.  From weak to strong: if-else, or, and, not, comparisons, + -, ~, *
 * / // %, **, sign, operand (jinja_operand.c). */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "text/jinja_run.h"

/* ---- Helpers ---- */

lm_code lm_jparse_wrong(lm_jparser *p, const char *what, ...)
{
    char text[256];
    va_list ap;

    va_start(ap, what);
    vsnprintf(text, sizeof text, what, ap);
    va_end(ap);
    return lm_jinja_wrong(p->t, p->at->line, p->at->col, p->err, "%s", text);
}

lm_code lm_jparse_unexpected(lm_jparser *p, const char *wanted)
{
    const lm_jtoken *k = p->at;
    const char *got = k->kind == LM_JT_EOF         ? "the end of the template"
                      : k->kind == LM_JT_DATA      ? "text"
                      : k->kind == LM_JT_PRINT     ? "{{"
                      : k->kind == LM_JT_PRINT_END ? "}}"
                      : k->kind == LM_JT_BLOCK     ? "{%"
                      : k->kind == LM_JT_BLOCK_END ? "%}"
                                                   : NULL;

    if (got)
        return lm_jparse_wrong(p, "%s where %s is needed", got, wanted);
    return lm_jparse_wrong(p, "'%.60s' where %s is needed", k->text->s, wanted);
}

lm_code lm_jparse_new(lm_jparser *p, lm_jnode_kind kind, lm_jnode **out)
{
    lm_code rc = lm_arena_alloc(p->t->mem, out, 1, sizeof **out, p->err);

    if (!rc) {
        (*out)->kind = kind;
        (*out)->line = p->at->line;
        (*out)->col = p->at->col;
    }
    return rc;
}

bool lm_jparse_is(const lm_jparser *p, lm_jtoken_kind kind, const char *text)
{
    return p->at->kind == kind && (!text || !strcmp(p->at->text->s, text));
}

bool lm_jparse_skip(lm_jparser *p, lm_jtoken_kind kind, const char *text)
{
    if (!lm_jparse_is(p, kind, text))
        return false;
    p->at++;
    return true;
}

lm_code lm_jparse_expect(lm_jparser *p, lm_jtoken_kind kind, const char *text)
{
    char wanted[40];

    if (lm_jparse_skip(p, kind, text))
        return LM_OK;
    snprintf(wanted, sizeof wanted, "'%.30s'",
             text                      ? text
             : kind == LM_JT_BLOCK_END ? "%}"
             : kind == LM_JT_PRINT_END ? "}}"
                                       : "name");
    return lm_jparse_unexpected(p, wanted);
}

lm_code lm_jparse_name_id(lm_jparser *p, const lm_jstr *name, int *out)
{
    lm_jinja *t = p->t;
    lm_code rc;

    for (size_t i = 0; i < t->n_names; i++)
        if (t->name[i]->len == name->len && !memcmp(t->name[i]->s, name->s, name->len)) {
            *out = (int)i;
            return LM_OK;
        }
    rc = lm_grow(&t->name, &t->cap_names, t->n_names + 1, sizeof *t->name, "names of a template",
                 p->err);
    if (!rc) {
        *out = (int)t->n_names;
        t->name[t->n_names++] = name;
    }
    return rc;
}

/* Lists of nodes live in the arena: a longer one is a copy. */
lm_code lm_jparse_append(lm_jparser *p, lm_jnode ***list, size_t *n, size_t *cap, lm_jnode *one)
{
    if (*n == *cap) {
        lm_jnode **longer = NULL;
        size_t room = *cap ? *cap * 2 : 4;
        lm_code rc = lm_arena_alloc(p->t->mem, &longer, room, sizeof *longer, p->err);

        if (rc)
            return rc;
        if (*n)
            memcpy(longer, *list, *n * sizeof *longer);
        *list = longer;
        *cap = room;
    }
    (*list)[(*n)++] = one;
    return LM_OK;
}

/* ---- Operators ---- */

static const struct level {
    const char *text;
    lm_jop op;
} levels[3][4] = {
    { { "+", LM_JOP_ADD }, { "-", LM_JOP_SUB } },
    { { "*", LM_JOP_MUL }, { "/", LM_JOP_DIV }, { "//", LM_JOP_FLOOR }, { "%", LM_JOP_MOD } },
    { { "**", LM_JOP_POW } },
};

static lm_code parse_binary(lm_jparser *p, int level, lm_jnode **out);

/* a ~ b ~ c, between + and *. */
static lm_code parse_concat(lm_jparser *p, lm_jnode **out)
{
    lm_jnode *node = NULL, *one = NULL;
    size_t cap = 0;
    lm_code rc = parse_binary(p, 1, out);

    if (rc || !lm_jparse_is(p, LM_JT_OP, "~"))
        return rc;
    rc = lm_jparse_new(p, LM_JN_CONCAT, &node);
    if (!rc)
        rc = lm_jparse_append(p, &node->item, &node->n, &cap, *out);
    while (!rc && lm_jparse_skip(p, LM_JT_OP, "~")) {
        rc = parse_binary(p, 1, &one);
        if (!rc)
            rc = lm_jparse_append(p, &node->item, &node->n, &cap, one);
    }
    *out = node;
    return rc;
}

static lm_code parse_binary(lm_jparser *p, int level, lm_jnode **out)
{
    lm_code rc = level == 0   ? parse_concat(p, out)
                 : level == 1 ? parse_binary(p, 2, out)
                              : lm_jparse_unary(p, true, out);

    while (!rc && p->at->kind == LM_JT_OP) {
        const struct level *found = NULL;
        lm_jnode *node = NULL;

        for (int i = 0; i < 4 && levels[level][i].text; i++)
            if (!strcmp(levels[level][i].text, p->at->text->s))
                found = &levels[level][i];
        if (!found)
            break;
        rc = lm_jparse_new(p, LM_JN_BINARY, &node);
        p->at++;
        if (rc)
            break;
        node->op = found->op;
        node->text = p->at[-1].text;
        node->a = *out;
        rc = level == 0   ? parse_concat(p, &node->b)
             : level == 1 ? parse_binary(p, 2, &node->b)
                          : lm_jparse_unary(p, true, &node->b);
        *out = node;
    }
    return rc;
}

static bool take_comparison(lm_jparser *p, lm_jop *op)
{
    static const char *const texts[] = { "==", "!=", "<", "<=", ">", ">=" };

    for (int i = 0; i < 6; i++)
        if (lm_jparse_skip(p, LM_JT_OP, texts[i])) {
            *op = (lm_jop)i;
            return true;
        }
    if (lm_jparse_skip(p, LM_JT_NAME, "in")) {
        *op = LM_JOP_IN;
        return true;
    }
    if (lm_jparse_is(p, LM_JT_NAME, "not") && p->at[1].kind == LM_JT_NAME &&
        !strcmp(p->at[1].text->s, "in")) {
        p->at += 2;
        *op = LM_JOP_NOT_IN;
        return true;
    }
    return false;
}

static lm_code parse_compare(lm_jparser *p, lm_jnode **out)
{
    lm_jnode *node = NULL, *one = NULL;
    lm_jop op, ops[32];
    size_t cap = 0;
    lm_code rc = parse_binary(p, 0, out);

    while (!rc && take_comparison(p, &op)) {
        if (!node) {
            rc = lm_jparse_new(p, LM_JN_COMPARE, &node);
            if (rc)
                return rc;
            node->a = *out;
        }
        if (node->n == sizeof ops / sizeof *ops)
            return lm_jparse_wrong(p, "more than 32 comparisons in one chain");
        ops[node->n] = op;
        rc = parse_binary(p, 0, &one);
        if (!rc)
            rc = lm_jparse_append(p, &node->item, &node->n, &cap, one);
    }
    if (rc || !node)
        return rc;
    rc = lm_arena_alloc(p->t->mem, &node->ops, node->n, sizeof *ops, p->err);
    if (!rc)
        memcpy(node->ops, ops, node->n * sizeof *ops);
    *out = node;
    return rc;
}

static lm_code parse_not(lm_jparser *p, lm_jnode **out)
{
    lm_jnode *node = NULL;
    lm_code rc;

    if (!lm_jparse_is(p, LM_JT_NAME, "not"))
        return parse_compare(p, out);
    if (++p->depth > LM_JINJA_MAX_DEPTH)
        return lm_jparse_wrong(p, "expressions inside each other deeper than %d",
                               LM_JINJA_MAX_DEPTH);
    rc = lm_jparse_new(p, LM_JN_NOT, &node);
    p->at++;
    if (!rc)
        rc = parse_not(p, &node->a);
    p->depth--;
    *out = node;
    return rc;
}

/* and, or: one level each. */
static lm_code parse_logic(lm_jparser *p, bool any, lm_jnode **out)
{
    lm_code rc = any ? parse_logic(p, false, out) : parse_not(p, out);

    while (!rc && lm_jparse_is(p, LM_JT_NAME, any ? "or" : "and")) {
        lm_jnode *node = NULL;

        rc = lm_jparse_new(p, any ? LM_JN_OR : LM_JN_AND, &node);
        p->at++;
        if (rc)
            break;
        node->a = *out;
        rc = any ? parse_logic(p, false, &node->b) : parse_not(p, &node->b);
        *out = node;
    }
    return rc;
}

lm_code lm_jparse_expression(lm_jparser *p, bool with_if, lm_jnode **out)
{
    lm_code rc;

    if (++p->depth > LM_JINJA_MAX_DEPTH)
        return lm_jparse_wrong(p, "expressions inside each other deeper than %d",
                               LM_JINJA_MAX_DEPTH);
    rc = parse_logic(p, true, out);
    while (!rc && with_if && lm_jparse_is(p, LM_JT_NAME, "if")) {
        lm_jnode *node = NULL;

        rc = lm_jparse_new(p, LM_JN_COND, &node);
        p->at++;
        if (rc)
            break;
        node->a = *out;
        rc = parse_logic(p, true, &node->b);
        if (!rc && lm_jparse_skip(p, LM_JT_NAME, "else"))
            rc = lm_jparse_expression(p, true, &node->c);
        *out = node;
    }
    p->depth--;
    return rc;
}

lm_code lm_jparse_tuple(lm_jparser *p, bool with_if, const char *until, bool in_parentheses,
                        lm_jnode **out)
{
    lm_jnode *node = NULL, *one = NULL;
    size_t cap = 0;
    bool tuple = false;
    lm_code rc = lm_jparse_new(p, LM_JN_TUPLE, &node);

    while (!rc) {
        if (p->at->kind == LM_JT_PRINT_END || p->at->kind == LM_JT_BLOCK_END ||
            lm_jparse_is(p, LM_JT_OP, ")") || (until && lm_jparse_is(p, LM_JT_NAME, until)))
            break;
        rc = lm_jparse_expression(p, with_if, &one);
        if (!rc)
            rc = lm_jparse_append(p, &node->item, &node->n, &cap, one);
        if (rc || !lm_jparse_skip(p, LM_JT_OP, ","))
            break;
        tuple = true;
    }
    if (rc)
        return rc;
    if (!tuple && !node->n && !in_parentheses)
        return lm_jparse_unexpected(p, "an expression");
    *out = tuple || !node->n ? node : node->item[0];
    return LM_OK;
}
