/* SPDX-License-Identifier: Apache-2.0 */
/* search_grid.c -- points that do not depend on measurements: the grid, and the simplex. */
#include <inttypes.h>
#include <math.h>
#include <stddef.h>

#include "base/rng.h"
#include "base/text.h"
#include "merge/search_impl.h"

static lm_code begin_grid(lm_search *s, lm_err *e)
{
    int64_t points = 1;
    for (int i = 0; i < s->o.n; i++)
        if (__builtin_mul_overflow(points, (int64_t)s->o.n_grid, &points))
            points = INT64_MAX / s->o.n_grid;
    if (s->o.max && points > s->o.max)
        return lm_fail(
            e, LM_EUSAGE, "grid", "give a coarser grid, or search by coordinate",
            "%d value%s for each of %d weights are %" PRId64 " point%s, more than %" PRId64,
            s->o.n_grid, lm_plural(s->o.n_grid), s->o.n, points, lm_plural(points), s->o.max);
    s->o.max = points;
    return LM_OK;
}

static bool ask_grid(lm_search *s, double *w, const char **kind)
{
    if (s->asked >= s->o.max)
        return false;
    int64_t k = s->asked;
    for (int i = s->o.n - 1; i >= 0; i--, k /= s->o.n_grid)
        w[i] = s->o.grid[k % s->o.n_grid];
    *kind = "grid";
    return true;
}

static lm_code begin_simplex(lm_search *s, lm_err *e)
{
    (void)e;
    if (!s->o.max)
        s->o.max = s->o.n + 32;
    return LM_OK;
}

static bool ask_simplex(lm_search *s, double *w, const char **kind)
{
    int n = s->o.n;
    int64_t k = s->asked;
    double sum = 0;
    if (k >= s->o.max)
        return false;
    if (k <= n) {
        for (int i = 0; i < n; i++)
            w[i] = k ? i == k - 1 : 1.0 / n;
        *kind = k ? "corner" : "centre";
        return true;
    }
    lm_rng r = lm_rng_make(s->o.seed, "merge search", 0);
    for (int i = 0; i < n; i++)
        sum += w[i] = -log1p(-lm_rng_uniform(r, (uint64_t)(k * n + i)));
    for (int i = 0; i < n; i++)
        w[i] = sum > 0 ? w[i] / sum : 1.0 / n;
    *kind = "random";
    return true;
}

static void tell_nothing(lm_search *s, double objective)
{
    (void)s;
    (void)objective;
}

const lm_search_ops lm_search_grid_ops = { begin_grid, ask_grid, tell_nothing, NULL };
const lm_search_ops lm_search_simplex_ops = { begin_simplex, ask_simplex, tell_nothing, NULL };
