/* SPDX-License-Identifier: Apache-2.0 */
/* jinja_filters_pick.c -- map, select and their kin: a filter or test for each element. */
#include <string.h>

#include "text/jinja_run.h"

/* A call without its first n arguments. */
static lm_jcall without(const lm_jcall *c, size_t n)
{
    lm_jcall rest = *c;

    rest.pos += n;
    rest.n -= n;
    return rest;
}

static lm_code map_attribute(lm_jrun *r, const lm_jseq *all, const lm_jcall *c, lm_jval *out)
{
    const lm_jval *path = NULL, *dflt = NULL;
    lm_jval one;
    lm_code rc = LM_OK;

    for (size_t i = 0; i < c->n_kw; i++) {
        lm_jval name = { LM_JV_STR, { .s = c->name[i] } };

        if (lm_jv_is(&name, "attribute"))
            path = &c->kw[i];
        else if (lm_jv_is(&name, "default"))
            dflt = c->kw[i].kind == LM_JV_NONE ? NULL : &c->kw[i];
        else
            return lm_jrun_fail(r, "Unexpected keyword argument '%.60s'", c->name[i]->s);
    }
    if (!path)
        return lm_jrun_fail(r, "map requires a filter argument");
    for (size_t i = 0; !rc && i < all->n; i++) {
        rc = lm_jpath_follow(r, &all->v[i], path, dflt, &one);
        if (!rc)
            rc = lm_jv_push(r, out->u.seq, one);
    }
    return rc;
}

LM_JFILTER(do_map)
{
    const lm_jfilter *f;
    lm_jseq all = { 0 };
    lm_jcall rest;
    lm_code rc = lm_jv_seq(r, LM_JV_ITER, 0, out);

    (void)arg;
    if (!rc && lm_jv_truth(v))
        rc = lm_jv_elements(r, v, &all);
    if (rc || !lm_jv_truth(v))
        return rc;
    if (!c->n)
        return map_attribute(r, &all, c, out);
    f = c->pos[0].kind == LM_JV_STR ? lm_jfilter_named(c->pos[0].u.s->s, c->pos[0].u.s->len) : NULL;
    if (!f)
        return lm_jrun_fail(r, "map names a filter that there is not");
    rest = without(c, 1);
    for (size_t i = 0; !rc && i < all.n; i++) {
        lm_jval one;

        rc = lm_jfilter_apply(r, f, &all.v[i], &rest, &one);
        if (!rc)
            rc = lm_jv_push(r, out->u.seq, one);
    }
    return rc;
}

static lm_code pick(lm_jrun *r, const lm_jval *v, const lm_jcall *c, bool by_attribute, bool keep,
                    lm_jval *out)
{
    const lm_jtest *t = NULL;
    size_t used = by_attribute;
    lm_jcall rest = { 0 };
    lm_jseq all = { 0 };
    lm_code rc = lm_jv_seq(r, LM_JV_ITER, 0, out);

    if (!rc && lm_jv_truth(v))
        rc = lm_jv_elements(r, v, &all);
    if (rc || !lm_jv_truth(v))
        return rc;
    if (by_attribute && !c->n)
        return lm_jrun_fail(r, "Missing parameter for attribute name");
    if (c->n > used) {
        const lm_jval *name = &c->pos[used];

        t = name->kind == LM_JV_STR ? lm_jtest_named(name->u.s->s, name->u.s->len) : NULL;
        if (!t)
            return lm_jrun_fail(r, "a test is named that there is not");
        rest = without(c, used + 1);
    }
    for (size_t i = 0; !rc && i < all.n; i++) {
        lm_jval one = all.v[i];
        bool yes = false;

        if (by_attribute)
            rc = lm_jpath_follow(r, &all.v[i], &c->pos[0], NULL, &one);
        if (!rc && t)
            rc = lm_jtest_apply(r, t, &one, &rest, &yes);
        else
            yes = lm_jv_truth(&one);
        if (!rc && yes == keep)
            rc = lm_jv_push(r, out->u.seq, all.v[i]);
    }
    return rc;
}

LM_JFILTER(do_select)
{
    (void)arg;
    return pick(r, v, c, false, true, out);
}
LM_JFILTER(do_reject)
{
    (void)arg;
    return pick(r, v, c, false, false, out);
}
LM_JFILTER(do_selectattr)
{
    (void)arg;
    return pick(r, v, c, true, true, out);
}
LM_JFILTER(do_rejectattr)
{
    (void)arg;
    return pick(r, v, c, true, false, out);
}

const lm_jfilter lm_jfilters_pick[] = {
    { "map", "*", do_map },
    { "select", "*", do_select },
    { "reject", "*", do_reject },
    { "selectattr", "*", do_selectattr },
    { "rejectattr", "*", do_rejectattr },
    { NULL, NULL, NULL },
};
