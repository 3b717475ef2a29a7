/* SPDX-License-Identifier: Apache-2.0 */
/* search_coordinate.c -- descent along each weight in turn, over the values of the grid. */
#include <math.h>

#include "base/mem.h"
#include "merge/search_impl.h"

typedef struct {
    int at[LM_SEARCH_MAX_DIM]; /* the best point so far, as indices in the grid */
    double best;
    bool started;
    int axis, step; /* the current direction: +1 up, -1 down */
    bool moved;     /* this axis has made progress */
    int idle;       /* axes since the last progress */
} descent;

static lm_code begin(lm_search *s, lm_err *e)
{
    descent *d = NULL;
    if (lm_alloc_n(&d, 1, sizeof *d, "a search", e))
        return e->code;
    if (!s->o.max)
        s->o.max = 100;
    d->step = 1;
    for (int i = 0; i < s->o.n; i++)
        for (int k = 1; k < s->o.n_grid; k++)
            if (fabs(s->o.grid[k] - s->o.start[i]) < fabs(s->o.grid[d->at[i]] - s->o.start[i]))
                d->at[i] = k;
    s->state = d;
    return LM_OK;
}

/* End of a direction: go down if up made no progress, otherwise go to the next axis. */
static void turn(lm_search *s, descent *d)
{
    if (d->step > 0 && !d->moved) {
        d->step = -1;
        return;
    }
    d->idle = d->moved ? 0 : d->idle + 1;
    d->axis = (d->axis + 1) % s->o.n;
    d->step = 1;
    d->moved = false;
}

static bool ask(lm_search *s, double *w, const char **kind)
{
    descent *d = s->state;
    *kind = d->started ? "descent" : "start";
    for (int next = 0; d->started; turn(s, d)) {
        if (d->idle >= s->o.n)
            return false;
        next = d->at[d->axis] + d->step;
        if (next >= 0 && next < s->o.n_grid)
            break;
    }
    for (int i = 0; i < s->o.n; i++)
        w[i] = s->o.grid[d->at[i] + (d->started && i == d->axis ? d->step : 0)];
    return true;
}

static void tell(lm_search *s, double objective)
{
    descent *d = s->state;
    if (!d->started) {
        d->best = objective;
        d->started = true;
    } else if (objective < d->best) {
        d->best = objective;
        d->at[d->axis] += d->step;
        d->moved = true;
    } else {
        turn(s, d);
    }
}

const lm_search_ops lm_search_coordinate_ops = { begin, ask, tell, lm_free };
