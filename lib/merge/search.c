/* SPDX-License-Identifier: Apache-2.0 */
/* search.c -- options of a search, and the choice of its algorithm. */
#include "merge/search.h"

#include <math.h>
#include <string.h>

#include "base/mem.h"
#include "base/text.h"
#include "merge/search_impl.h"

const char *const lm_search_names[] = { "grid", "simplex", "coordinate", "cma-es", NULL };

static const lm_search_ops *const ways[] = {
    &lm_search_grid_ops,
    &lm_search_simplex_ops,
    &lm_search_coordinate_ops,
    &lm_search_cmaes_ops,
};

static lm_code set_grid(lm_search *s, lm_err *e)
{
    static const double usual[] = { 0, 0.25, 0.5, 0.75, 1, 1.25, 1.5 };
    const int most = (int)(sizeof s->grid / sizeof *s->grid);
    const double *from = s->o.grid ? s->o.grid : usual;
    int n = s->o.grid ? s->o.n_grid : (int)(sizeof usual / sizeof *usual);
    if (n < 1 || n > most)
        return lm_fail(e, LM_EUSAGE, "grid", NULL, "%d value%s, 1 to %d are allowed", n,
                       lm_plural(n), most);
    for (int i = 0; i < n; i++) {
        if (!isfinite(from[i]) || (i && !(from[i] > from[i - 1])))
            return lm_fail(e, LM_EUSAGE, "grid", "give numbers in rising order",
                           "%g is not greater than the value before it", from[i]);
        s->grid[i] = from[i];
    }
    s->o.grid = s->grid;
    s->o.n_grid = n;
    return LM_OK;
}

static lm_code set_bounds(lm_search *s, lm_err *e)
{
    lm_search_opts *o = &s->o;
    if (o->lo == 0 && o->hi == 0)
        o->hi = 1.5;
    if (!(o->lo < o->hi) || !isfinite(o->hi - o->lo))
        return lm_fail(e, LM_EUSAGE, "bounds", "give the lower one first",
                       "%g to %g is not an interval", o->lo, o->hi);
    for (int i = 0; i < o->n; i++) {
        s->start[i] = o->start ? o->start[i] : 1.0 / o->n;
        if (o->kind == LM_SEARCH_CMAES && o->start &&
            !(s->start[i] >= o->lo && s->start[i] <= o->hi))
            return lm_fail(e, LM_EUSAGE, "start", "begin within the bounds",
                           "weight %d is %g, outside %g to %g", i + 1, s->start[i], o->lo, o->hi);
        if (!isfinite(s->start[i]))
            return lm_fail(e, LM_EUSAGE, "start", NULL, "weight %d is not a number", i + 1);
        if (o->kind == LM_SEARCH_CMAES)
            s->start[i] = fmin(fmax(s->start[i], o->lo), o->hi);
    }
    o->start = s->start;
    if (o->sigma <= 0)
        o->sigma = 0.3 * (o->hi - o->lo);
    if (o->tol <= 0)
        o->tol = 1e-3;
    return LM_OK;
}

lm_code lm_search_new(const lm_search_opts *o, lm_search **out, lm_err *e)
{
    lm_search *s = NULL;
    *out = NULL;
    if (o->n < 1 || o->n > LM_SEARCH_MAX_DIM)
        return lm_fail(e, LM_EUSAGE, "search", NULL, "%d weight%s, 1 to %d are allowed", o->n,
                       lm_plural(o->n), LM_SEARCH_MAX_DIM);
    if (lm_alloc_n(&s, 1, sizeof *s, "a search", e))
        return e->code;
    s->o = *o;
    s->ops = ways[o->kind];
    lm_code rc = set_grid(s, e);
    if (!rc)
        rc = set_bounds(s, e);
    if (!rc)
        rc = s->ops->begin(s, e);
    if (rc) {
        lm_search_free(s);
        return rc;
    }
    *out = s;
    return LM_OK;
}

void lm_search_free(lm_search *s)
{
    if (!s)
        return;
    if (s->ops->end)
        s->ops->end(s->state);
    lm_free(s);
}

bool lm_search_ask(lm_search *s, double *w, const char **kind)
{
    bool got = s->ops->ask(s, w, kind);
    s->asked += got;
    return got;
}

void lm_search_tell(lm_search *s, double objective)
{
    s->ops->tell(s, isnan(objective) ? INFINITY : objective);
}

int64_t lm_search_total(const lm_search *s)
{
    return s->o.max;
}
