/* SPDX-License-Identifier: Apache-2.0 */
/* jinja_tags.c -- statements: the parser of {% ... %}. */
#include <string.h>

#include "text/jinja_run.h"

static lm_code parse_until(lm_jparser *p, const char *const *ends, lm_jnode **out);
static lm_code parse_body(lm_jparser *p, const char *const *ends, lm_jnode **out);

/* ---- Targets of assignments ---- */

static lm_code parse_one_target(lm_jparser *p, bool with_namespace, lm_jnode **out)
{
    static const char *const constants[] = { "true", "True", "false", "False", "none", "None" };
    lm_jnode *node = NULL;
    lm_code rc;

    if (lm_jparse_skip(p, LM_JT_OP, "(")) {
        if (++p->depth > LM_JINJA_MAX_DEPTH)
            return lm_jparse_wrong(p, "brackets inside each other deeper than %d",
                                   LM_JINJA_MAX_DEPTH);
        rc = lm_jparse_target(p, with_namespace, NULL, out);
        p->depth--;
        return rc ? rc : lm_jparse_expect(p, LM_JT_OP, ")");
    }
    if (p->at->kind != LM_JT_NAME)
        return lm_jparse_unexpected(p, "a name to assign to");
    for (size_t i = 0; i < sizeof constants / sizeof *constants; i++)
        if (!strcmp(p->at->text->s, constants[i]))
            return lm_jparse_wrong(p, "'%s' cannot be assigned to", constants[i]);
    rc = lm_jparse_new(p, LM_JN_NAME, &node);
    if (!rc)
        rc = lm_jparse_name_id(p, p->at->text, &node->id);
    if (rc)
        return rc;
    p->at++;
    if (with_namespace && lm_jparse_skip(p, LM_JT_OP, ".")) {
        if (p->at->kind != LM_JT_NAME)
            return lm_jparse_unexpected(p, "a name");
        if (p->at->text->s[0] == '_')
            return lm_jparse_wrong(p, "names in a namespace must not begin with an underscore");
        node->kind = LM_JN_NSREF;
        node->text = p->at++->text;
    }
    *out = node;
    return LM_OK;
}

lm_code lm_jparse_target(lm_jparser *p, bool with_namespace, const char *until, lm_jnode **out)
{
    lm_jnode *tuple = NULL, *one = NULL;
    size_t cap = 0;
    lm_code rc = lm_jparse_new(p, LM_JN_TUPLE, &tuple);

    if (!rc)
        rc = parse_one_target(p, with_namespace, out);
    if (rc || !lm_jparse_is(p, LM_JT_OP, ","))
        return rc;
    rc = lm_jparse_append(p, &tuple->item, &tuple->n, &cap, *out);
    while (!rc && lm_jparse_skip(p, LM_JT_OP, ",")) {
        if ((until && lm_jparse_is(p, LM_JT_NAME, until)) || lm_jparse_is(p, LM_JT_OP, ")") ||
            lm_jparse_is(p, LM_JT_OP, "="))
            break;
        rc = parse_one_target(p, with_namespace, &one);
        if (!rc)
            rc = lm_jparse_append(p, &tuple->item, &tuple->n, &cap, one);
    }
    *out = tuple;
    return rc;
}

/* ---- Statements, behind their name ---- */

static lm_code parse_for(lm_jparser *p, lm_jnode *node)
{
    static const char *const ends[] = { "endfor", "else", NULL }, *const last[] = { "endfor",
                                                                                    NULL };
    lm_code rc = lm_jparse_target(p, false, "in", &node->a);

    if (!rc)
        rc = lm_jparse_expect(p, LM_JT_NAME, "in");
    if (!rc)
        rc = lm_jparse_tuple(p, false, "recursive", false, &node->b);
    if (!rc && lm_jparse_skip(p, LM_JT_NAME, "if"))
        rc = lm_jparse_expression(p, true, &node->c);
    if (!rc && lm_jparse_is(p, LM_JT_NAME, "recursive"))
        return lm_jparse_wrong(p, "recursive loops are not supported");
    if (!rc) {
        p->loops++;
        rc = parse_body(p, ends, &node->body);
        p->loops--;
    }
    if (!rc && lm_jparse_skip(p, LM_JT_NAME, "else"))
        rc = parse_body(p, last, &node->other);
    p->at += !rc;
    return rc;
}

static lm_code parse_if(lm_jparser *p, lm_jnode *node)
{
    static const char *const ends[] = { "elif", "else", "endif", NULL };
    static const char *const last[] = { "endif", NULL };
    lm_code rc = LM_OK;

    while (!rc) {
        rc = lm_jparse_tuple(p, false, NULL, false, &node->a);
        if (!rc)
            rc = parse_body(p, ends, &node->body);
        if (rc || !lm_jparse_skip(p, LM_JT_NAME, "elif"))
            break;
        rc = lm_jparse_new(p, LM_JN_IF, &node->other);
        node = rc ? node : node->other;
    }
    if (!rc && lm_jparse_skip(p, LM_JT_NAME, "else"))
        rc = parse_body(p, last, &node->other);
    p->at += !rc;
    return rc;
}

static lm_code parse_set(lm_jparser *p, lm_jnode *node)
{
    static const char *const ends[] = { "endset", NULL };
    lm_code rc = lm_jparse_target(p, true, NULL, &node->a);

    if (rc)
        return rc;
    if (lm_jparse_skip(p, LM_JT_OP, "=")) {
        node->kind = LM_JN_SET;
        return lm_jparse_tuple(p, true, NULL, false, &node->b);
    }
    rc = lm_jparse_filters(p, NULL, false, &node->b);
    if (!rc)
        rc = parse_body(p, ends, &node->body);
    p->at += !rc;
    return rc;
}

static lm_code parse_with(lm_jparser *p, lm_jnode *node)
{
    static const char *const ends[] = { "endwith", NULL };
    lm_jnode *one = NULL;
    size_t cap = 0;
    lm_code rc = LM_OK;

    while (!rc && p->at->kind != LM_JT_BLOCK_END) {
        if (node->n)
            rc = lm_jparse_expect(p, LM_JT_OP, ",");
        if (!rc)
            rc = parse_one_target(p, false, &one);
        if (!rc)
            rc = lm_jparse_append(p, &node->item, &node->n, &cap, one);
        if (!rc)
            rc = lm_jparse_expect(p, LM_JT_OP, "=");
        if (!rc)
            rc = lm_jparse_expression(p, true, &one);
        if (!rc)
            rc = lm_jparse_append(p, &node->item, &node->n, &cap, one);
    }
    if (!rc)
        rc = parse_body(p, ends, &node->body);
    p->at += !rc;
    return rc;
}

enum { MAX_PARAMETERS = 64 };

/* "(a, b=1)" */
static lm_code parse_signature(lm_jparser *p, lm_jmacro_node *m)
{
    const lm_jstr *names[MAX_PARAMETERS];
    lm_jnode *dflt[MAX_PARAMETERS] = { NULL };
    int arg[MAX_PARAMETERS];
    lm_code rc = lm_jparse_expect(p, LM_JT_OP, "(");

    while (!rc && !lm_jparse_skip(p, LM_JT_OP, ")")) {
        if (m->n)
            rc = lm_jparse_expect(p, LM_JT_OP, ",");
        if (rc)
            break;
        if (p->at->kind != LM_JT_NAME)
            return lm_jparse_unexpected(p, "the name of a parameter");
        if (m->n == MAX_PARAMETERS)
            return lm_jparse_wrong(p, "more than %d parameters", MAX_PARAMETERS);
        names[m->n] = p->at->text;
        rc = lm_jparse_name_id(p, p->at->text, &arg[m->n]);
        p->at++;
        if (!rc && lm_jparse_skip(p, LM_JT_OP, "="))
            rc = lm_jparse_expression(p, true, &dflt[m->n]);
        else if (!rc && m->n && dflt[m->n - 1])
            return lm_jparse_wrong(p, "a parameter without a default behind one that has one");
        m->n++;
    }
    if (!rc)
        rc = lm_arena_alloc(p->t->mem, &m->names, m->n, sizeof *names, p->err);
    if (!rc)
        rc = lm_arena_alloc(p->t->mem, &m->dflt, m->n, sizeof *dflt, p->err);
    if (!rc)
        rc = lm_arena_alloc(p->t->mem, &m->arg, m->n, sizeof *arg, p->err);
    if (rc || !m->n)
        return rc;
    memcpy(m->names, names, m->n * sizeof *names);
    memcpy(m->dflt, dflt, m->n * sizeof *dflt);
    memcpy(m->arg, arg, m->n * sizeof *arg);
    return LM_OK;
}

/* The body of a function: loops around it do not count, and what it reads is noted. */
static lm_code parse_function(lm_jparser *p, lm_jmacro_node *m, const char *const *ends)
{
    lm_jparser outside = *p;
    lm_code rc;

    p->loops = 0;
    p->caller = p->varargs = p->kwargs = false;
    rc = parse_body(p, ends, &m->body);
    m->caller = p->caller;
    m->varargs = p->varargs;
    m->kwargs = p->kwargs;
    p->loops = outside.loops;
    p->caller |= outside.caller;
    p->varargs |= outside.varargs;
    p->kwargs |= outside.kwargs;
    p->at += !rc;
    return rc;
}

static lm_code parse_macro(lm_jparser *p, lm_jnode *node)
{
    static const char *const ends[] = { "endmacro", NULL };
    lm_code rc = lm_arena_alloc(p->t->mem, &node->macro, 1, sizeof *node->macro, p->err);

    if (rc)
        return rc;
    if (p->at->kind != LM_JT_NAME)
        return lm_jparse_unexpected(p, "the name of a macro");
    node->macro->name = p->at->text;
    rc = lm_jparse_name_id(p, p->at->text, &node->id);
    p->at++;
    if (!rc)
        rc = parse_signature(p, node->macro);
    return rc ? rc : parse_function(p, node->macro, ends);
}

static lm_code parse_call_block(lm_jparser *p, lm_jnode *node)
{
    static const char *const ends[] = { "endcall", NULL };
    lm_code rc = lm_arena_alloc(p->t->mem, &node->macro, 1, sizeof *node->macro, p->err);

    if (!rc)
        rc = lm_jinja_str(p->t, "caller", 6, &node->macro->name, p->err);
    if (!rc && lm_jparse_is(p, LM_JT_OP, "("))
        rc = parse_signature(p, node->macro);
    if (!rc)
        rc = lm_jparse_expression(p, true, &node->a);
    if (!rc && node->a->kind != LM_JN_CALL)
        return lm_jinja_wrong(p->t, node->line, node->col, p->err, "a call block needs a call");
    return rc ? rc : parse_function(p, node->macro, ends);
}

static lm_code parse_filter_block(lm_jparser *p, lm_jnode *node)
{
    static const char *const ends[] = { "endfilter", NULL };
    lm_code rc = lm_jparse_filters(p, NULL, true, &node->b);

    if (!rc)
        rc = parse_body(p, ends, &node->body);
    p->at += !rc;
    return rc;
}

static lm_code parse_generation(lm_jparser *p, lm_jnode *node)
{
    static const char *const ends[] = { "endgeneration", NULL };
    int loops = p->loops;
    lm_code rc;

    p->loops = 0; /* its body is a function */
    rc = parse_body(p, ends, &node->body);
    p->loops = loops;
    p->t->marks = true;
    p->at += !rc;
    return rc;
}

static lm_code parse_print(lm_jparser *p, lm_jnode *node)
{
    lm_jnode *one = NULL;
    size_t cap = 0;
    lm_code rc = LM_OK;

    node->kind = LM_JN_BODY;
    while (!rc && p->at->kind != LM_JT_BLOCK_END) {
        lm_jnode *print = NULL;

        if (node->n)
            rc = lm_jparse_expect(p, LM_JT_OP, ",");
        if (!rc)
            rc = lm_jparse_new(p, LM_JN_PRINT, &print);
        if (!rc)
            rc = lm_jparse_expression(p, true, &one);
        if (!rc) {
            print->a = one;
            rc = lm_jparse_append(p, &node->item, &node->n, &cap, print);
        }
    }
    return rc;
}

static lm_code parse_jump(lm_jparser *p, lm_jnode *node)
{
    if (p->loops)
        return LM_OK;
    return lm_jinja_wrong(p->t, node->line, node->col, p->err, "'%s' outside a loop",
                          node->kind == LM_JN_BREAK ? "break" : "continue");
}

static const struct tag {
    const char *name;
    lm_jnode_kind kind;
    lm_code (*parse)(lm_jparser *p, lm_jnode *node);
} tags[] = {
    { "for", LM_JN_FOR, parse_for },
    { "if", LM_JN_IF, parse_if },
    { "set", LM_JN_SET_BLOCK, parse_set },
    { "with", LM_JN_WITH, parse_with },
    { "macro", LM_JN_MACRO, parse_macro },
    { "call", LM_JN_CALL_BLOCK, parse_call_block },
    { "filter", LM_JN_FILTER_BLOCK, parse_filter_block },
    { "generation", LM_JN_GENERATION, parse_generation },
    { "print", LM_JN_BODY, parse_print },
    { "break", LM_JN_BREAK, parse_jump },
    { "continue", LM_JN_CONTINUE, parse_jump },
};

static lm_code parse_statement(lm_jparser *p, lm_jnode **out)
{
    static const char *const refused[] = { "include", "import",     "from", "extends",
                                           "block",   "autoescape", NULL };
    const char *name;
    lm_jnode *node = NULL;
    lm_code rc;

    if (p->at->kind != LM_JT_NAME)
        return lm_jparse_unexpected(p, "the name of a statement");
    name = p->at->text->s;
    for (size_t i = 0; i < sizeof tags / sizeof *tags; i++) {
        if (strcmp(tags[i].name, name) != 0)
            continue;
        rc = lm_jparse_new(p, tags[i].kind, &node);
        p->at++;
        if (!rc)
            rc = tags[i].parse(p, node);
        *out = node;
        return rc;
    }
    for (int i = 0; refused[i]; i++)
        if (!strcmp(refused[i], name))
            return lm_jparse_wrong(p, "'%s' is not supported", name);
    return lm_jparse_wrong(p, "no statement is named '%.60s'", name);
}

/* ---- Bodies ---- */

static bool is_end(const lm_jparser *p, const char *const *ends)
{
    for (int i = 0; ends && ends[i]; i++)
        if (lm_jparse_is(p, LM_JT_NAME, ends[i]))
            return true;
    return false;
}

/* Text and tags up to one of `ends` (current afterwards), NULL: up to the end of the template. */
static lm_code parse_until(lm_jparser *p, const char *const *ends, lm_jnode **out)
{
    lm_jnode *body = NULL, *one = NULL;
    size_t cap = 0;
    lm_code rc = lm_jparse_new(p, LM_JN_BODY, &body);

    *out = body;
    while (!rc && p->at->kind != LM_JT_EOF) {
        if (p->at->kind == LM_JT_DATA) {
            rc = lm_jparse_new(p, LM_JN_TEXT, &one);
            if (!rc)
                one->text = p->at++->text;
        } else if (lm_jparse_is(p, LM_JT_PRINT, NULL)) {
            p->at++;
            rc = lm_jparse_new(p, LM_JN_PRINT, &one);
            if (!rc)
                rc = lm_jparse_tuple(p, true, NULL, false, &one->a);
            if (!rc)
                rc = lm_jparse_expect(p, LM_JT_PRINT_END, NULL);
        } else {
            rc = lm_jparse_expect(p, LM_JT_BLOCK, NULL);
            if (!rc && is_end(p, ends))
                return LM_OK;
            if (!rc)
                rc = parse_statement(p, &one);
            if (!rc)
                rc = lm_jparse_expect(p, LM_JT_BLOCK_END, NULL);
        }
        if (!rc)
            rc = lm_jparse_append(p, &body->item, &body->n, &cap, one);
    }
    if (rc || !ends)
        return rc;
    return lm_jparse_wrong(p, "the template ends where '%s' is needed", ends[0]);
}

static lm_code parse_body(lm_jparser *p, const char *const *ends, lm_jnode **out)
{
    lm_code rc;

    lm_jparse_skip(p, LM_JT_OP, ":");
    rc = lm_jparse_expect(p, LM_JT_BLOCK_END, NULL);
    if (!rc && ++p->depth > LM_JINJA_MAX_DEPTH)
        return lm_jparse_wrong(p, "blocks inside each other deeper than %d", LM_JINJA_MAX_DEPTH);
    if (!rc)
        rc = parse_until(p, ends, out);
    p->depth--;
    return rc;
}

lm_code lm_jinja_parse(lm_jinja *t, const lm_jtoken *token, size_t n, lm_err *e)
{
    lm_jparser p = { .t = t, .at = token, .err = e };

    (void)n;
    return parse_until(&p, NULL, &t->root);
}
