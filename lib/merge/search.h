/* SPDX-License-Identifier: Apache-2.0 */
/* search.h -- the search for weights: chooses the next point to measure, and stores those measured.
 *
 * A search is a deterministic sequence of points w in [lo, hi]^n that depends on the options and on
 * the objectives passed so far, never on a clock or on threads; its random numbers are counted.  An
 * interrupted search therefore continues exactly when it is started again with the old objectives,
 * which lm_search_run does from the list of known points.  The objective is minimised; one that is
 * not a number counts as +infinity.
 *
 *   grid        every point of grid^n, the last coordinate fastest
 *   simplex     weights that add up to one: the centre, the corners (each model alone), then uniform
 *               random points of the simplex (exponential spacings)
 *   coordinate  descent over the grid from a start: each coordinate in turn is increased, otherwise decreased, as long as
 *               the objective falls; ends after a round without progress
 *   cma-es      (mu/mu_w, lambda)-CMA-ES with active update: Hansen, arXiv:1604.00772, figure 6 and
 *               table 1.  Points beyond the bounds are measured at the nearest point within, with a
 *               penalty that grows with the square of the distance. */
#ifndef LM_MERGE_SEARCH_H
#define LM_MERGE_SEARCH_H

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"

enum { LM_SEARCH_MAX_DIM = 64 };

typedef enum {
    LM_SEARCH_GRID,
    LM_SEARCH_SIMPLEX,
    LM_SEARCH_COORDINATE,
    LM_SEARCH_CMAES,
} lm_search_kind;
extern const char *const lm_search_names[]; /* "grid", ...; NULL-terminated, in this order */

typedef struct {
    lm_search_kind kind;
    int n;              /* weights */
    const double *grid; /* GRID, COORDINATE: values in rising order; NULL: 0, 0.25, ..., 1.5 */
    int n_grid;
    const double *start; /* [n], COORDINATE (nearest point of the grid), CMAES; NULL: all 1/n */
    double lo, hi;       /* CMAES: bounds; both 0: 0 and 1.5 */
    double sigma;        /* CMAES: first step size; 0: 0.3 (hi - lo) */
    int popsize;         /* CMAES: lambda; 0: 4 + floor(3 ln n) */
    double tol;          /* CMAES: ends when every step is below this; 0: 1e-3 */
    int64_t max;         /* most points that are measured; 0: GRID all, SIMPLEX n + 32, else 100 */
    uint64_t seed;
} lm_search_opts;

typedef struct lm_search lm_search;

/* Fails: LM_EUSAGE for n outside [1, LM_SEARCH_MAX_DIM], a grid whose values do not increase or
 * that has more than `max` points (GRID, max given), reversed bounds, a start outside the
 * bounds. */
lm_code lm_search_new(const lm_search_opts *o, lm_search **out, lm_err *e);
void lm_search_free(lm_search *s);

/* The next point, w [n]; false: the search has ended.  lm_search_tell must follow.  *kind is its
 * purpose: "grid", "centre", "corner", "random", "start", "descent", "generation". */
bool lm_search_ask(lm_search *s, double *w, const char **kind);
void lm_search_tell(lm_search *s, double objective);
/* The greatest number of points; 0: unknown. */
int64_t lm_search_total(const lm_search *s);

/* ---- The loop ---- */

/* A point that was measured. */
typedef struct {
    int64_t index; /* from 0, in the order of measuring */
    const char *kind;
    int n, sets;
    const double *weight; /* [n] */
    double *loss;         /* [sets], nats per token */
    double objective, seconds;
    bool known; /* from an earlier run, not measured again */
    bool best;  /* better than all earlier ones */
} lm_candidate;

typedef struct {
    double *weight, *loss; /* [count, n], [count, sets] */
    double *objective, *seconds;
    int64_t count, cap;
} lm_candidates; /* zero-initialise */
void lm_candidates_fini(lm_candidates *c);
lm_code lm_candidates_add(lm_candidates *c, int n, int sets, const double *weight,
                          const double *loss, double objective, double seconds, lm_err *e);

typedef struct {
    /* Fill c->loss, c->objective and c->seconds for c->weight. */
    lm_code (*measure)(void *ctx, lm_candidate *c, lm_err *e);
    /* Called once for each point in order, also for known ones.  May be NULL. */
    lm_code (*report)(void *ctx, const lm_candidate *c, lm_err *e);
    void *ctx;
} lm_search_hooks;

/* Run a search to its end, to o->max points, or until lm_stopping().  No point is measured twice:
 * neither those in `known` (may be NULL) nor those to which the search returns.  best [n] receives
 * the best point, *objective its value.  Fails: LM_ENUMERIC when no point has a finite objective;
 * errors of the hooks. */
lm_code lm_search_run(const lm_search_opts *o, int sets, const lm_candidates *known,
                      const lm_search_hooks *h, double *best, double *objective, lm_err *e);

#endif
