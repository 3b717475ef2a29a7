/* SPDX-License-Identifier: Apache-2.0 */
/* search_run.c -- the loop of a search, with a store of measured points. */
#include <math.h>
#include <string.h>

#include "base/mem.h"
#include "base/stop.h"
#include "base/text.h"
#include "merge/search.h"

void lm_candidates_fini(lm_candidates *c)
{
    lm_free(c->weight);
    lm_free(c->loss);
    lm_free(c->objective);
    lm_free(c->seconds);
    memset(c, 0, sizeof *c);
}

lm_code lm_candidates_add(lm_candidates *c, int n, int sets, const double *weight,
                          const double *loss, double objective, double seconds, lm_err *e)
{
    static const char why[] = "the points that were measured";
    size_t at = (size_t)c->count;
    if (c->count >= c->cap) {
        size_t cap = at ? 2 * at : 64;
        if (lm_realloc_n(&c->weight, cap * (size_t)n, sizeof *c->weight, why, e) ||
            lm_realloc_n(&c->loss, cap * (size_t)sets, sizeof *c->loss, why, e) ||
            lm_realloc_n(&c->objective, cap, sizeof *c->objective, why, e) ||
            lm_realloc_n(&c->seconds, cap, sizeof *c->seconds, why, e))
            return e->code;
        c->cap = (int64_t)cap;
    }
    memcpy(c->weight + at * (size_t)n, weight, (size_t)n * sizeof *weight);
    memcpy(c->loss + at * (size_t)sets, loss, (size_t)sets * sizeof *loss);
    c->objective[at] = objective;
    c->seconds[at] = seconds;
    c->count++;
    return LM_OK;
}

/* Index of a point in the list, -1 if it is not in it. */
static int64_t find_point(const lm_candidates *c, int n, const double *w)
{
    for (int64_t i = 0; c && i < c->count; i++) {
        int k = 0;
        while (k < n && c->weight[i * n + k] == w[k])
            k++;
        if (k == n)
            return i;
    }
    return -1;
}

typedef struct {
    int n, sets;
    const lm_candidates *known;
    const lm_search_hooks *hooks;
    lm_candidates met; /* in this run */
    double *loss, *best;
    double objective; /* of the best */
} run;

/* A new point of this run: measure it, or take it from the list of known ones. */
static lm_code meet(run *r, const double *w, const char *kind, double *objective, lm_err *e)
{
    int64_t k = find_point(r->known, r->n, w);
    lm_candidate c = { .index = r->met.count,
                       .kind = kind,
                       .n = r->n,
                       .sets = r->sets,
                       .weight = w,
                       .loss = r->loss,
                       .known = k >= 0 };
    if (k >= 0) {
        memcpy(c.loss, r->known->loss + k * r->sets, (size_t)r->sets * sizeof *c.loss);
        c.objective = r->known->objective[k];
        c.seconds = r->known->seconds[k];
    } else if (r->hooks->measure(r->hooks->ctx, &c, e)) {
        return e->code;
    }
    if (lm_stopping() && k < 0) /* an interrupted measurement is invalid */
        return LM_OK;
    c.best = c.objective < r->objective;
    if (c.best) {
        r->objective = c.objective;
        memcpy(r->best, w, (size_t)r->n * sizeof *w);
    }
    *objective = c.objective;
    if (lm_candidates_add(&r->met, r->n, r->sets, w, c.loss, c.objective, c.seconds, e))
        return e->code;
    return r->hooks->report ? r->hooks->report(r->hooks->ctx, &c, e) : LM_OK;
}

static lm_code walk(run *r, lm_search *s, lm_err *e)
{
    double w[LM_SEARCH_MAX_DIM], objective = NAN;
    const char *kind = "";
    /* A search that only returns to old points measures nothing and would never end. */
    int64_t asks = 1000 * lm_search_total(s) + 1000;
    while (asks-- > 0 && !lm_stopping() && lm_search_ask(s, w, &kind)) {
        int64_t k = find_point(&r->met, r->n, w);
        if (k < 0 && r->met.count >= lm_search_total(s))
            break;
        if (k >= 0)
            objective = r->met.objective[k];
        else if (meet(r, w, kind, &objective, e))
            return e->code;
        lm_search_tell(s, objective);
    }
    if (!lm_stopping() && !isfinite(r->objective))
        return lm_fail(e, LM_ENUMERIC, "search", "check the models and the validation sets",
                       "none of %lld point%s has a finite loss", (long long)r->met.count,
                       lm_plural((uint64_t)r->met.count));
    return LM_OK;
}

lm_code lm_search_run(const lm_search_opts *o, int sets, const lm_candidates *known,
                      const lm_search_hooks *h, double *best, double *objective, lm_err *e)
{
    lm_search *s = NULL;
    run r = {
        .n = o->n, .sets = sets, .known = known, .hooks = h, .best = best, .objective = INFINITY
    };
    lm_code rc = lm_search_new(o, &s, e);
    if (!rc)
        rc = lm_alloc_n(&r.loss, (size_t)sets, sizeof *r.loss, "losses", e);
    if (!rc)
        rc = walk(&r, s, e);
    *objective = r.objective;
    lm_free(r.loss);
    lm_candidates_fini(&r.met);
    lm_search_free(s);
    return rc;
}
