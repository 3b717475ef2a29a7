/* SPDX-License-Identifier: Apache-2.0 */
/* kmeans.c -- k-means in one dimension. */
#include "kv/kmeans.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "base/mem.h"

void lm_kmeans_count(lm_kmeans_histogram *h, double x, double w)
{
    if (isnan(x))
        return;
    x = x < -1 ? -1 : x > 1 ? 1 : x;
    int64_t i = (int64_t)((x + 1) / 2 * LM_KMEANS_CELLS);
    lm_kmeans_cell *c = &h->cell[i < LM_KMEANS_CELLS ? i : LM_KMEANS_CELLS - 1];
    c->w += w;
    c->wx += w * x;
    c->wxx += w * x * x;
}

/* The table of the dynamic programme: cells before i in `groups` groups cost now[i]. */
typedef struct {
    lm_kmeans_cell *sum;  /* [n + 1]: of the cells before i */
    double *before, *now; /* [n + 1] */
    int32_t *from;        /* [k][n + 1]: where the last group begins */
    int64_t n;
} table;

static double cost_of(const table *t, int64_t from, int64_t to)
{
    const lm_kmeans_cell *a = &t->sum[from], *b = &t->sum[to];
    double w = b->w - a->w, x = b->wx - a->wx, cost = b->wxx - a->wxx - (w > 0 ? x * x / w : 0);
    return cost > 0 ? cost : 0;
}

/* now[i] for i in [low, high], whose best beginnings of the last group lie in [first, last] and rise with i. */
static void fill(const table *t, int32_t *from, int64_t low, int64_t high, int64_t first,
                 int64_t last)
{
    while (low <= high) {
        int64_t middle = low + (high - low) / 2, best = first;
        double least = (double)INFINITY;
        for (int64_t i = first; i <= last && i < middle; i++) {
            double cost = t->before[i] + cost_of(t, i, middle);
            if (cost < least) {
                least = cost;
                best = i;
            }
        }
        t->now[middle] = least;
        from[middle] = (int32_t)best;
        fill(t, from, low, middle - 1, first, best);
        low = middle + 1; /* the right half without a call */
        first = best;
    }
}

/* Levels of at least k cells, all with weight. */
static void solve(table *t, int k, double *level)
{
    for (int64_t i = 0; i <= t->n; i++) {
        t->now[i] = cost_of(t, 0, i);
        t->from[i] = 0;
    }
    for (int g = 1; g < k; g++) {
        double *swap = t->before;
        t->before = t->now;
        t->now = swap;
        fill(t, t->from + g * (t->n + 1), g + 1, t->n, g, t->n - 1);
    }
    int64_t to = t->n;
    for (int g = k - 1; g >= 0; g--) {
        int64_t from = t->from[g * (t->n + 1) + to];
        level[g] = (t->sum[to].wx - t->sum[from].wx) / (t->sum[to].w - t->sum[from].w);
        to = from;
    }
}

/* Levels beside the n that are there, rising: each divides the widest gap; there is one of 1 beyond each end. */
static void add_levels(double *level, int64_t n, int k)
{
    for (; n < k; n++) {
        int64_t at = 0; /* the new level comes before this one */
        double most = 0;
        for (int64_t i = 0; i <= n; i++) {
            double gap = i == 0 || i == n ? 1.5 : level[i] - level[i - 1];
            if (gap > most) {
                most = gap;
                at = i;
            }
        }
        double x = at == 0   ? level[0] - 1
                   : at == n ? level[n - 1] + 1
                             : (level[at - 1] + level[at]) / 2;
        memmove(level + at + 1, level + at, (size_t)(n - at) * sizeof *level);
        level[at] = x;
    }
}

/* The sum over cells, each of which belongs to one level. */
static double total_cost(const lm_kmeans_cell *cell, int64_t n, int k, const double *level)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++) {
        double least = (double)INFINITY;
        for (int g = 0; g < k && cell[i].w > 0; g++)
            least = fmin(least,
                         cell[i].wxx - 2 * level[g] * cell[i].wx + level[g] * level[g] * cell[i].w);
        sum += cell[i].w > 0 ? fmax(least, 0) : 0;
    }
    return sum;
}

/* Sums before each cell, of those that have weight; neighbours of the same mean become one, so that levels
 * differ.  Returns how many are left. */
static int64_t add_up(const lm_kmeans_cell *cell, int64_t n, lm_kmeans_cell *sum)
{
    double all = 0, mean = 0;
    int64_t m = 0;
    for (int64_t i = 0; i < n; i++)
        all += cell[i].w;
    for (int64_t i = 0; i < n; i++) {
        if (!(cell[i].w > all * 1e-12)) /* lost in the sums */
            continue;
        double x = cell[i].wx / cell[i].w;
        bool same = m && fabs(x - mean) <= 1e-9 * (fabs(x) + fabs(mean));
        lm_kmeans_cell *to = &sum[same ? m : m + 1], now = sum[m];
        *to = (lm_kmeans_cell){ now.w + cell[i].w, now.wx + cell[i].wx, now.wxx + cell[i].wxx };
        m += !same;
        mean = same ? mean : x;
    }
    return m;
}

lm_code lm_kmeans(const lm_kmeans_cell *cell, int64_t n, int k, double *level, double *cost,
                  lm_err *e)
{
    table t = { .n = 0 };
    lm_kmeans_cell *sum = NULL;
    double *costs = NULL;
    int32_t *from = NULL;
    size_t all;
    if (!lm_mul_ok((size_t)n + 1, (size_t)k, &all) || n >= INT32_MAX)
        return lm_fail(e, LM_ELIMIT, "k-means", NULL, "%lld numbers are too many", (long long)n);
    lm_code rc = lm_alloc_n(&sum, (size_t)n + 1, sizeof *sum, "sums of k-means", e);
    if (!rc)
        rc = lm_alloc_n(&costs, 2 * ((size_t)n + 1), sizeof *costs, "costs of k-means", e);
    if (!rc)
        rc = lm_alloc_n(&from, all, sizeof *from, "borders of k-means", e);
    if (!rc)
        t.n = add_up(cell, n, sum);
    if (!rc && !t.n)
        rc = lm_fail(e, LM_ENUMERIC, "k-means", NULL, "there are no numbers with a weight");
    if (!rc) {
        int groups = t.n < k ? (int)t.n : k;
        t.sum = sum;
        t.before = costs;
        t.now = costs + t.n + 1;
        t.from = from;
        solve(&t, groups, level);
        add_levels(level, groups, k);
        if (cost)
            *cost = total_cost(cell, n, k, level);
    }
    lm_free(sum);
    lm_free(costs);
    lm_free(from);
    return rc;
}
