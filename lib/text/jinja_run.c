/* SPDX-License-Identifier: Apache-2.0 */
/* jinja_run.c -- a rendering: its limits and its statements. */
#include "text/jinja_run.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

/* ---- Limits and errors ---- */

lm_code lm_jrun_fail(lm_jrun *r, const char *what, ...)
{
    char text[256];
    va_list ap;

    va_start(ap, what);
    vsnprintf(text, sizeof text, what, ap);
    va_end(ap);
    return lm_jinja_wrong(r->t, r->at ? r->at->line : 1, r->at ? r->at->col : 1, r->err, "%s",
                          text);
}

static lm_code reach_limit(lm_jrun *r, const char *what)
{
    char where[sizeof r->err->where];

    snprintf(where, sizeof where, "%.200s: line %d, column %d", r->t->where,
             r->at ? r->at->line : 1, r->at ? r->at->col : 1);
    return lm_fail(r->err, LM_ELIMIT, where, NULL, "%s", what);
}

lm_code lm_jrun_work(lm_jrun *r, size_t units)
{
    if (units > (size_t)r->steps)
        return reach_limit(r, "the template does not end: too much work for one text");
    r->steps -= (int64_t)units;
    return LM_OK;
}

lm_code lm_jrun_walk(lm_jrun *r, const lm_jstr *s)
{
    return lm_jrun_work(r, s->chars == (int64_t)s->len ? 0 : s->len / 8);
}

lm_code lm_jrun_alloc(lm_jrun *r, void *out_ptr, size_t n, size_t size)
{
    size_t bytes;
    lm_code rc;

    if (!lm_mul_ok(n, size, &bytes) || bytes > (size_t)r->memory)
        return reach_limit(r, "the template needs too much memory");
    r->memory -= (int64_t)bytes;
    rc = lm_jrun_work(r, bytes / 256);
    return rc ? rc : lm_arena_alloc(r->mem, out_ptr, n, size, r->err);
}

lm_code lm_jrun_enter(lm_jrun *r)
{
    if (r->depth >= LM_JRUN_MAX_DEPTH)
        return reach_limit(r, "the template calls itself, or values hold each other, too deeply");
    r->depth++;
    return LM_OK;
}

lm_code lm_jrun_add(lm_jrun *r, lm_buf *out, const char *s, size_t len)
{
    size_t had = out == r->text ? out->len - r->text_from : out->len;
    lm_code rc;

    if (len > (size_t)r->output || had > (size_t)r->output - len)
        return reach_limit(r, "the template makes too long a text");
    rc = lm_jrun_work(r, 1 + len / 64); /* texts are also made character by character */
    return rc || !len ? rc : lm_buf_add(out, s, len, r->err);
}

/* ---- Variables ---- */

lm_code lm_jrun_push(lm_jrun *r, lm_jscope *up, lm_jscope **out)
{
    lm_code rc = lm_jrun_alloc(r, out, 1, sizeof **out);

    if (!rc)
        (*out)->up = up;
    return rc;
}

lm_code lm_jrun_set(lm_jrun *r, int id, lm_jval v)
{
    lm_jscope *s = r->scope;
    struct lm_jslot *longer = NULL;
    lm_code rc;

    if (!s) {
        r->root[id] = v;
        return LM_OK;
    }
    for (size_t i = 0; i < s->n; i++)
        if (s->v[i].id == id) {
            s->v[i].value = v;
            return LM_OK;
        }
    if (s->n == s->cap) {
        rc = lm_jrun_alloc(r, &longer, s->cap * 2 + 2, sizeof *longer);
        if (rc)
            return rc;
        if (s->n)
            memcpy(longer, s->v, s->n * sizeof *longer);
        s->v = longer;
        s->cap = s->cap * 2 + 2;
    }
    s->v[s->n++] = (struct lm_jslot){ id, v };
    return LM_OK;
}

static lm_code assign_attribute(lm_jrun *r, const lm_jnode *target, const lm_jval *v)
{
    lm_jnode name = {
        .kind = LM_JN_NAME, .id = target->id, .line = target->line, .col = target->col
    };
    lm_jval space, key = { LM_JV_STR, { .s = target->text } };
    lm_code rc;

    name.text = r->t->name[target->id];
    rc = lm_jrun_eval(r, &name, &space);
    r->at = target;
    if (rc)
        return rc;
    if (space.kind != LM_JV_NAMESPACE)
        return lm_jrun_fail(r, "cannot assign attribute on non-namespace object");
    return lm_jv_dict_set(r, space.u.dict, key, *v);
}

lm_code lm_jrun_assign(lm_jrun *r, const lm_jnode *target, const lm_jval *v)
{
    lm_jseq all;
    lm_code rc;

    if (target->kind == LM_JN_NAME)
        return lm_jrun_set(r, target->id, *v);
    if (target->kind == LM_JN_NSREF)
        return assign_attribute(r, target, v);
    r->at = target;
    rc = lm_jv_elements(r, v, &all);
    if (!rc && all.n < target->n)
        return lm_jrun_fail(r, "not enough values to unpack (expected %zu, got %zu)", target->n,
                            all.n);
    if (!rc && all.n > target->n)
        return lm_jrun_fail(r, "too many values to unpack (expected %zu)", target->n);
    for (size_t i = 0; !rc && i < target->n; i++)
        rc = lm_jrun_assign(r, target->item[i], &all.v[i]);
    return rc;
}

/* ---- Statements ---- */

lm_code lm_jrun_capture(lm_jrun *r, lm_jscope *in, const lm_jnode *body, lm_jval *out)
{
    lm_jscope *scope = r->scope;
    lm_buf text = { 0 }, *to = r->out;
    lm_code rc;

    r->scope = in;
    r->out = &text;
    rc = lm_jrun_body(r, body);
    r->out = to;
    r->scope = scope;
    if (!rc)
        rc = lm_jv_text(r, text.data, text.len, out);
    lm_buf_fini(&text);
    return rc;
}

/* A body in a scope of its own; the flow (break, continue) passes through. */
static lm_code run_inside(lm_jrun *r, lm_jscope *scope, const lm_jnode *body)
{
    lm_jscope *outside = r->scope;
    lm_code rc;

    r->scope = scope;
    rc = lm_jrun_body(r, body);
    r->scope = outside;
    return rc;
}

static lm_code run_turns(lm_jrun *r, const lm_jnode *n, struct lm_jloop *loop, int loop_id)
{
    lm_jval self = { LM_JV_LOOP, { .loop = loop } };
    lm_jscope *outside = r->scope, *scope = NULL;
    int64_t macros = r->macros;
    bool more = true;
    lm_code rc = LM_OK;

    while (!rc && r->flow != LM_JRUN_BREAK) {
        lm_jval v;

        r->flow = LM_JRUN_GO;
        rc = lm_jloop_pull(loop, &v, &more);
        if (rc || !more)
            break;
        if (!scope || macros != r->macros)
            rc = lm_jrun_push(r, outside, &scope);
        if (rc)
            break;
        macros = r->macros;
        scope->n = 0;
        r->scope = scope;
        if (!rc && loop_id >= 0)
            rc = lm_jrun_set(r, loop_id, self);
        if (!rc)
            rc = lm_jrun_assign(r, n->a, &v);
        if (!rc)
            rc = lm_jrun_body(r, n->body);
        r->scope = outside;
    }
    r->flow = LM_JRUN_GO;
    return rc;
}

static int id_of_loop(const lm_jinja *t)
{
    for (size_t i = 0; i < t->n_names; i++)
        if (t->name[i]->len == 4 && !memcmp(t->name[i]->s, "loop", 4))
            return (int)i;
    return -1;
}

static lm_code run_for(lm_jrun *r, const lm_jnode *n)
{
    struct lm_jloop *loop = NULL;
    lm_jval over;
    lm_code rc = lm_jrun_eval(r, n->b, &over);

    r->at = n;
    if (!rc)
        rc = lm_jrun_alloc(r, &loop, 1, sizeof *loop);
    if (!rc)
        rc = lm_jv_elements(r, &over, &loop->all);
    if (rc)
        return rc;
    loop->run = r;
    loop->node = n;
    loop->outside = r->scope;
    loop->index0 = loop->length = -1;
    rc = run_turns(r, n, loop, id_of_loop(r->t));
    if (!rc && n->other && loop->index0 < 0)
        rc = lm_jrun_body(r, n->other);
    return rc;
}

static lm_code run_if(lm_jrun *r, const lm_jnode *n)
{
    lm_jval v;
    lm_code rc = lm_jrun_eval(r, n->a, &v);

    if (rc)
        return rc;
    if (lm_jv_truth(&v))
        return lm_jrun_body(r, n->body);
    return n->other ? lm_jrun_body(r, n->other) : LM_OK;
}

static lm_code run_set(lm_jrun *r, const lm_jnode *n)
{
    lm_jscope *scope = NULL;
    lm_jval v;
    lm_code rc;

    if (n->kind == LM_JN_SET) {
        rc = lm_jrun_eval(r, n->b, &v);
        return rc ? rc : lm_jrun_assign(r, n->a, &v);
    }
    rc = lm_jrun_push(r, r->scope, &scope);
    if (!rc)
        rc = lm_jrun_capture(r, scope, n->body, &v);
    if (!rc)
        rc = lm_jrun_filter(r, n->b, &v, &v);
    return rc ? rc : lm_jrun_assign(r, n->a, &v);
}

static lm_code run_with(lm_jrun *r, const lm_jnode *n)
{
    lm_jscope *scope = NULL, *outside = r->scope;
    lm_code rc = lm_jrun_push(r, r->scope, &scope);

    for (size_t i = 0; !rc && i < n->n; i += 2) {
        lm_jval v;

        rc = lm_jrun_eval(r, n->item[i + 1], &v);
        r->scope = scope;
        if (!rc)
            rc = lm_jrun_assign(r, n->item[i], &v);
        r->scope = outside;
    }
    return rc ? rc : run_inside(r, scope, n->body);
}

static lm_code run_macro(lm_jrun *r, const lm_jnode *n)
{
    struct lm_jmacro *m = NULL;
    lm_code rc = lm_jrun_alloc(r, &m, 1, sizeof *m);

    if (rc)
        return rc;
    m->node = n->macro;
    m->scope = r->scope;
    r->macros++;
    return lm_jrun_set(r, n->id, (lm_jval){ LM_JV_MACRO, { .macro = m } });
}

static lm_code print_value(lm_jrun *r, const lm_jnode *n)
{
    lm_jval v;
    lm_code rc = lm_jrun_eval(r, n, &v);

    r->at = n;
    return rc ? rc : lm_jv_str(r, &v, r->out);
}

static lm_code run_filter_block(lm_jrun *r, const lm_jnode *n)
{
    lm_jscope *scope = NULL;
    lm_jval v;
    lm_code rc = lm_jrun_push(r, r->scope, &scope);

    if (!rc)
        rc = lm_jrun_capture(r, scope, n->body, &v);
    if (!rc)
        rc = lm_jrun_filter(r, n->b, &v, &v);
    return rc ? rc : lm_jv_str(r, &v, r->out);
}

/* The body is captured first: the place is that of the finished output, as in `transformers`. */
static lm_code run_generation(lm_jrun *r, const lm_jnode *n)
{
    lm_jscope *scope = NULL;
    lm_jval v;
    lm_code rc = lm_jrun_push(r, r->scope, &scope);

    if (!rc)
        rc = lm_jrun_capture(r, scope, n->body, &v);
    if (!rc && r->marked)
        rc = lm_text_spans_add(r->marked, r->text->len, r->text->len + v.u.s->len, r->err);
    return rc ? rc : lm_jv_str(r, &v, r->out);
}

static lm_code run_statement(lm_jrun *r, const lm_jnode *n)
{
    switch (n->kind) {
    case LM_JN_TEXT:
        return lm_jrun_add(r, r->out, n->text->s, n->text->len);
    case LM_JN_PRINT:
        return print_value(r, n->a);
    case LM_JN_BODY:
    case LM_JN_IF:
        return n->kind == LM_JN_IF ? run_if(r, n) : lm_jrun_body(r, n);
    case LM_JN_FOR:
        return run_for(r, n);
    case LM_JN_SET:
    case LM_JN_SET_BLOCK:
        return run_set(r, n);
    case LM_JN_WITH:
        return run_with(r, n);
    case LM_JN_MACRO:
        return run_macro(r, n);
    case LM_JN_CALL_BLOCK:
        return print_value(r, n);
    case LM_JN_FILTER_BLOCK:
        return run_filter_block(r, n);
    case LM_JN_GENERATION:
        return run_generation(r, n);
    case LM_JN_BREAK:
        r->flow = LM_JRUN_BREAK;
        return LM_OK;
    case LM_JN_CONTINUE:
        r->flow = LM_JRUN_CONTINUE;
        return LM_OK;
    default:
        return lm_jrun_fail(r, "a value where a statement is needed");
    }
}

lm_code lm_jrun_body(lm_jrun *r, const lm_jnode *body)
{
    lm_code rc;

    if (body->kind == LM_JN_IF) /* "elif" */
        return run_if(r, body);
    rc = lm_jrun_enter(r);
    if (rc)
        return rc;
    for (size_t i = 0; !rc && r->flow == LM_JRUN_GO && i < body->n; i++) {
        r->at = body->item[i];
        rc = lm_jrun_work(r, 1);
        if (!rc)
            rc = run_statement(r, body->item[i]);
    }
    lm_jrun_leave(r);
    return rc;
}

/* ---- A rendering ---- */

static lm_code set_variables(lm_jrun *r, const json_t *vars)
{
    lm_code rc = lm_jrun_alloc(r, &r->root, r->t->n_names + 1, sizeof *r->root);

    for (size_t i = 0; !rc && i < r->t->n_names; i++) {
        const lm_jstr *name = r->t->name[i];
        const json_t *v = json_object_getn(vars, name->s, name->len);

        if (v)
            rc = lm_jv_of_json(r, v, &r->root[i]);
    }
    return rc;
}

static int64_t choose(int64_t given, int64_t dflt)
{
    return given > 0 ? given : dflt;
}

lm_code lm_jinja_render(const lm_jinja *t, const json_t *vars, const lm_jinja_limits *l,
                        lm_buf *out, lm_text_spans *marked, lm_err *e)
{
    static const lm_jinja_limits none;
    lm_jrun r = {
        .t = t, .out = out, .text = out, .text_from = out->len, .marked = marked, .err = e
    };
    lm_code rc = lm_arena_new(&r.mem, 64 << 10, e);

    l = l ? l : &none;
    r.steps = choose(l->steps, 50000000);
    r.output = choose(l->output, 64 << 20);
    r.memory = choose(l->memory, 512 << 20);
    r.now = l->now ? l->now : (int64_t)time(NULL);
    if (!rc)
        rc = set_variables(&r, vars);
    if (!rc)
        rc = lm_jrun_body(&r, t->root);
    lm_arena_free(r.mem);
    return rc;
}
