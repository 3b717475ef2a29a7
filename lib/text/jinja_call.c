/* SPDX-License-Identifier: Apache-2.0 */
/* jinja_call.c -- arguments, macros and loops. */
#include <stdio.h>
#include <string.h>

#include "text/jinja_run.h"

/* ---- Arguments ---- */

static lm_code bind_one(lm_jrun *r, const lm_jcall *c, const char *what, const char *name,
                        size_t len, bool optional, size_t i, size_t *used, lm_jval *out)
{
    *out = (lm_jval){ 0 };
    if (i < c->n)
        *out = c->pos[i];
    for (size_t k = 0; k < c->n_kw; k++) {
        if (c->name[k]->len != len || memcmp(c->name[k]->s, name, len) != 0)
            continue;
        if (i < c->n)
            return lm_jrun_fail(r, "%s() got multiple values for argument '%.*s'", what, (int)len,
                                name);
        *out = c->kw[k];
        ++*used;
    }
    if (out->kind == LM_JV_MISSING && !optional)
        return lm_jrun_fail(r, "%s() is missing its argument '%.*s'", what, (int)len, name);
    return LM_OK;
}

lm_code lm_jcall_bind(lm_jrun *r, const lm_jcall *c, const char *what, const char *params,
                      lm_jval out[LM_JARGS_MAX])
{
    size_t i = 0, used = 0;
    lm_code rc = LM_OK;

    memset(out, 0, LM_JARGS_MAX * sizeof *out);
    for (; !rc && *params; i++) {
        size_t len = strcspn(params, "=,");
        bool optional = params[len] == '=';

        rc = bind_one(r, c, what, params, len, optional, i, &used, &out[i]);
        params += len + optional;
        params += *params == ',';
    }
    if (!rc && c->n > i)
        return lm_jrun_fail(r, "%s() takes at most %zu arguments (%zu given)", what, i, c->n);
    if (!rc && used < c->n_kw)
        return lm_jrun_fail(r, "%s() got an argument that it does not have", what);
    return rc;
}

lm_code lm_jarg_int(lm_jrun *r, const lm_jval *v, int64_t dflt, int64_t *out)
{
    *out = dflt;
    if (v->kind == LM_JV_MISSING || v->kind == LM_JV_NONE || lm_jv_integer(v, out))
        return LM_OK;
    return lm_jrun_fail(r, "an integer is needed, not '%s'", lm_jv_type(v));
}

lm_code lm_jarg_str(lm_jrun *r, const lm_jval *v, const char *what, const lm_jstr **out)
{
    *out = NULL;
    if (v->kind == LM_JV_MISSING || v->kind == LM_JV_NONE)
        return LM_OK;
    if (v->kind != LM_JV_STR)
        return lm_jrun_fail(r, "%s must be str, not %s", what, lm_jv_type(v));
    *out = v->u.s;
    return LM_OK;
}

bool lm_jarg_truth(const lm_jval *v, bool dflt)
{
    return v->kind == LM_JV_MISSING ? dflt : lm_jv_truth(v);
}

/* ---- Macros ---- */

static lm_code set_named(lm_jrun *r, const char *name, lm_jval v)
{
    for (size_t i = 0; i < r->t->n_names; i++)
        if (r->t->name[i]->len == strlen(name) && !memcmp(r->t->name[i]->s, name, strlen(name)))
            return lm_jrun_set(r, (int)i, v);
    return LM_OK;
}

/* Keyword arguments that no parameter took; `taken` has one flag for each. */
static lm_code set_rest(lm_jrun *r, const struct lm_jmacro *m, const lm_jcall *c, bool *taken)
{
    const lm_jmacro_node *n = m->node;
    lm_jval rest, caller = { 0 };
    lm_code rc = lm_jv_dict(r, LM_JV_DICT, 0, &rest);

    for (size_t k = 0; !rc && k < c->n_kw; k++) {
        lm_jval key = { LM_JV_STR, { .s = c->name[k] } };

        if (taken[k])
            continue;
        if (n->caller && lm_jv_is(&key, "caller"))
            caller = c->kw[k];
        else if (n->kwargs)
            rc = lm_jv_dict_set(r, rest.u.dict, key, c->kw[k]);
        else
            return lm_jrun_fail(r, "macro '%s' takes no keyword argument '%.60s'", n->name->s,
                                c->name[k]->s);
    }
    if (!rc && n->caller && caller.kind == LM_JV_MISSING)
        rc = lm_jv_undefined_hint(r, "No caller defined", &caller);
    if (!rc && n->caller)
        rc = set_named(r, "caller", caller);
    return rc || !n->kwargs ? rc : set_named(r, "kwargs", rest);
}

static lm_code set_parameters(lm_jrun *r, const struct lm_jmacro *m, const lm_jcall *c, bool *taken)
{
    const lm_jmacro_node *n = m->node;
    lm_code rc = LM_OK;

    for (size_t i = 0; !rc && i < n->n; i++) {
        lm_jval v = { 0 };

        if (i < c->n)
            v = c->pos[i];
        for (size_t k = 0; v.kind == LM_JV_MISSING && k < c->n_kw; k++)
            if (!taken[k] && c->name[k]->len == n->names[i]->len &&
                !memcmp(c->name[k]->s, n->names[i]->s, n->names[i]->len)) {
                v = c->kw[k];
                taken[k] = true;
            }
        if (v.kind == LM_JV_MISSING && n->dflt[i])
            rc = lm_jrun_eval(r, n->dflt[i], &v);
        else if (v.kind == LM_JV_MISSING)
            rc = lm_jv_undefined_hint(r, "a parameter of a macro was not provided", &v);
        if (!rc)
            rc = lm_jrun_set(r, n->arg[i], v);
    }
    return rc;
}

static lm_code set_positional_rest(lm_jrun *r, const lm_jmacro_node *n, const lm_jcall *c)
{
    lm_jval rest;
    lm_code rc;

    if (!n->varargs) {
        if (c->n > n->n)
            return lm_jrun_fail(r, "macro '%s' takes not more than %zu argument(s)", n->name->s,
                                n->n);
        return LM_OK;
    }
    rc = lm_jv_seq(r, LM_JV_TUPLE, 0, &rest);
    for (size_t i = n->n; !rc && i < c->n; i++)
        rc = lm_jv_push(r, rest.u.seq, c->pos[i]);
    return rc ? rc : set_named(r, "varargs", rest);
}

lm_code lm_jmacro_call(lm_jrun *r, const struct lm_jmacro *m, const lm_jcall *c, lm_jval *out)
{
    lm_jscope *scope = NULL, *outside = r->scope;
    const lm_jnode *at = r->at;
    bool *taken = NULL;
    lm_code rc = lm_jrun_enter(r);

    if (rc)
        return rc;
    rc = lm_jrun_push(r, m->scope, &scope);
    if (!rc)
        rc = lm_jrun_alloc(r, &taken, c->n_kw + 1, sizeof *taken);
    r->scope = scope ? scope : outside;
    if (!rc)
        rc = set_parameters(r, m, c, taken);
    if (!rc)
        rc = set_rest(r, m, c, taken);
    if (!rc)
        rc = set_positional_rest(r, m->node, c);
    r->scope = outside;
    if (!rc)
        rc = lm_jrun_capture(r, scope, m->node->body, out);
    lm_jrun_leave(r);
    if (!rc)
        r->at = at;
    return rc;
}

/* ---- Loops ---- */

/* The condition of a loop sees its target, not `loop`. */
static lm_code passes(struct lm_jloop *l, const lm_jval *v, bool *yes)
{
    lm_jrun *r = l->run;
    lm_jscope *inside = r->scope, *scope = NULL;
    lm_jval truth;
    lm_code rc;

    *yes = true;
    if (!l->node->c)
        return LM_OK;
    rc = lm_jrun_push(r, l->outside, &scope);
    if (rc)
        return rc;
    r->scope = scope;
    rc = lm_jrun_assign(r, l->node->a, v);
    if (!rc)
        rc = lm_jrun_eval(r, l->node->c, &truth);
    r->scope = inside;
    *yes = !rc && lm_jv_truth(&truth);
    return rc;
}

static lm_code peek(struct lm_jloop *l)
{
    bool yes = false;
    lm_code rc = LM_OK;

    if (l->peeked)
        return LM_OK;
    while (!rc && !yes && l->next < l->all.n) {
        l->ahead = l->all.v[l->next++];
        rc = lm_jrun_work(l->run, 1);
        if (!rc)
            rc = passes(l, &l->ahead, &yes);
    }
    l->peeked = true;
    l->ended = !yes;
    return rc;
}

lm_code lm_jloop_pull(struct lm_jloop *l, lm_jval *out, bool *more)
{
    lm_code rc = peek(l);

    *more = !rc && !l->ended;
    if (!*more)
        return rc;
    l->peeked = false;
    l->before = l->current;
    l->current = l->ahead;
    l->index0++;
    *out = l->current;
    return LM_OK;
}

/* All elements that will be seen; those not seen yet are tested now. */
static lm_code count_turns(struct lm_jloop *l)
{
    lm_jseq rest = { 0 };
    bool yes = false;
    lm_code rc = peek(l);

    if (rc || l->length >= 0)
        return rc;
    for (size_t i = l->next; !rc && i < l->all.n; i++) {
        rc = passes(l, &l->all.v[i], &yes);
        if (!rc && yes)
            rc = lm_jv_push(l->run, &rest, l->all.v[i]);
    }
    l->length = l->index0 + 1 + !l->ended + (int64_t)rest.n;
    if (l->node->c) { /* tested: what is left passes */
        lm_jnode *plain = NULL;

        rc = rc ? rc : lm_jrun_alloc(l->run, &plain, 1, sizeof *plain);
        if (rc)
            return rc;
        *plain = *l->node;
        plain->c = NULL;
        l->node = plain;
        l->all = rest;
        l->next = 0;
    }
    return rc;
}

static lm_code call_cycle(lm_jrun *r, const lm_jval *self, const lm_jcall *c, lm_jval *out)
{
    if (!c->n)
        return lm_jrun_fail(r, "no items for cycling given");
    *out = c->pos[(size_t)self->u.loop->index0 % c->n];
    return LM_OK;
}

static lm_code call_changed(lm_jrun *r, const lm_jval *self, const lm_jcall *c, lm_jval *out)
{
    lm_jval now;
    bool same = false;
    lm_code rc = lm_jv_seq(r, LM_JV_TUPLE, 0, &now);

    for (size_t i = 0; !rc && i < c->n; i++)
        rc = lm_jv_push(r, now.u.seq, c->pos[i]);
    if (!rc && self->u.loop->changed.kind == LM_JV_TUPLE)
        rc = lm_jv_equal(r, &now, &self->u.loop->changed, &same);
    self->u.loop->changed = now;
    *out = lm_jv_bool(!same);
    return rc;
}

lm_code lm_jloop_attribute(lm_jrun *r, struct lm_jloop *l, const lm_jstr *name, bool *found,
                           lm_jval *out)
{
    static const char *const names[] = { "index",    "index0",    "first",    "last",     "length",
                                         "revindex", "revindex0", "previtem", "nextitem", "depth",
                                         "depth0",   "cycle",     "changed",  NULL };
    lm_jval self = { LM_JV_LOOP, { .loop = l } };
    lm_code rc = LM_OK;
    int which = 0;

    while (names[which] &&
           (strlen(names[which]) != name->len || memcmp(names[which], name->s, name->len) != 0))
        which++;
    *found = names[which] != NULL;
    switch (which) {
    case 0:
    case 1:
        *out = lm_jv_int(l->index0 + (which == 0));
        return LM_OK;
    case 2:
        *out = lm_jv_bool(l->index0 == 0);
        return LM_OK;
    case 3:
        rc = peek(l);
        *out = lm_jv_bool(l->ended);
        return rc;
    case 4:
    case 5:
    case 6:
        rc = count_turns(l);
        *out = lm_jv_int(which == 4 ? l->length : l->length - l->index0 - (which == 6));
        return rc;
    case 7:
        if (!l->index0)
            return lm_jv_undefined_hint(r, "there is no previous item", out);
        *out = l->before;
        return LM_OK;
    case 8:
        rc = peek(l);
        if (rc || l->ended)
            return rc ? rc : lm_jv_undefined_hint(r, "there is no next item", out);
        *out = l->ahead;
        return LM_OK;
    case 9:
    case 10:
        *out = lm_jv_int(which == 9);
        return LM_OK;
    case 11:
        return lm_jv_func(r, "cycle", call_cycle, &self, out);
    case 12:
        return lm_jv_func(r, "changed", call_changed, &self, out);
    default:
        return LM_OK;
    }
}
