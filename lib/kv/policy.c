/* SPDX-License-Identifier: Apache-2.0 */
/* policy.c -- which tokens of a cache stay. */
#include "kv/policy.h"

#include <math.h>

#include "base/rng.h"

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

bool lm_kv_policy_weighs(const lm_kv_policy *p)
{
    return p->kind == LM_KV_H2O || p->kind == LM_KV_SNAPKV || p->kind == LM_KV_MERGE;
}

bool lm_kv_policy_replaces(const lm_kv_policy *p)
{
    return p->kind != LM_KV_SNAPKV && p->kind != LM_KV_MERGE && p->kind != LM_KV_STAY;
}

/* ---- budgets ---- */

/* Half of the budget of h2o: the heavy tokens, or the newest ones. */
static int64_t half_of(const lm_kv_policy *p, int64_t n)
{
    int64_t half = (int64_t)(p->keep / 2 * (double)n);
    return half > 1 ? half : 1;
}

int64_t lm_kv_policy_recent(const lm_kv_policy *p, int64_t n)
{
    bool half = p->kind == LM_KV_H2O || p->kind == LM_KV_RANDOM;
    return half ? half_of(p, n) : p->window;
}

/* Budgets on a line over the layers whose mean is `mean`, each with `recent` newest tokens: PyramidKV's
 * rounding, which leaves the last layer what the others do not need. */
static int64_t slope(const lm_kv_policy *p, int64_t n, int64_t mean, int64_t recent, int64_t layer,
                     int64_t layers)
{
    int64_t free = mean - recent, low = free / p->beta, high = 2 * free - low;
    if (layers < 2 || n < 2 * free)
        return mean;
    if (high >= n - recent) {
        high = n - recent;
        low = 2 * free - high;
    }
    return high - layer * ((high - low) / (layers - 1)) + recent;
}

int64_t lm_kv_policy_budget(const lm_kv_policy *p, int64_t n, int64_t layer, int64_t layers)
{
    int64_t recent = lm_kv_policy_recent(p, n);
    int64_t mean = p->kind == LM_KV_STREAMING ? p->sinks + p->window
                   : p->capacity              ? p->capacity
                                              : 2 * recent;
    if (p->protect || p->kind == LM_KV_MERGE || mean >= n)
        return n;
    return p->beta ? least(slope(p, n, mean, recent, layer, layers), n) : mean;
}

int64_t lm_kv_policy_most(const lm_kv_policy *p, int64_t n, int64_t budget)
{
    switch (p->kind) {
    case LM_KV_STREAMING:
        return p->sinks + p->window;
    case LM_KV_SNAPKV:
    case LM_KV_MERGE:
    case LM_KV_STAY:
        return INT64_MAX;
    default:
        return p->protect ? n + 2 * half_of(p, n) : budget;
    }
}

/* ---- selection ---- */

/* NaN is below all numbers. */
static double rank_of(double x)
{
    return isnan(x) ? -INFINITY : x;
}

/* Restore the order of a heap of n numbers, the least first, of which number i may be too large. */
static void sink(double *heap, int64_t n, int64_t i)
{
    for (;;) {
        int64_t child = 2 * i + 1;
        if (child + 1 < n && heap[child + 1] < heap[child])
            child++;
        if (child >= n || heap[i] <= heap[child])
            return;
        double x = heap[i];
        heap[i] = heap[child];
        heap[child] = x;
        i = child;
    }
}

void lm_kv_mark_largest(const double *score, int64_t n, int64_t k, bool *keep, double *work)
{
    if (k <= 0)
        return;
    if (k >= n) {
        for (int64_t i = 0; i < n; i++)
            keep[i] = true;
        return;
    }
    for (int64_t i = 0; i < k; i++)
        work[i] = rank_of(score[i]);
    for (int64_t i = k / 2; i-- > 0;)
        sink(work, k, i);
    for (int64_t i = k; i < n; i++)
        if (rank_of(score[i]) > work[0]) {
            work[0] = rank_of(score[i]);
            sink(work, k, 0);
        }
    double bar = work[0];
    int64_t equal = 0; /* of those that equal the bar */
    for (int64_t i = 0; i < k; i++)
        equal += work[i] == bar;
    for (int64_t i = 0; i < n; i++) {
        double x = rank_of(score[i]);
        if (x > bar || (x == bar && equal-- > 0))
            keep[i] = true;
    }
}

void lm_kv_average(const float *x, int64_t n, int64_t kernel, double *y)
{
    int64_t side = kernel / 2;
    for (int64_t i = 0; i < n; i++) {
        int64_t from = i > side ? i - side : 0, to = least(i + side, n - 1);
        double sum = 0;
        for (int64_t j = from; j <= to; j++)
            sum += x[j];
        y[i] = sum / (double)kernel;
    }
}

void lm_kv_policy_select(const lm_kv_policy *p, int64_t budget, int64_t n, const float *mass,
                         bool *keep, double *work)
{
    int64_t recent = least(lm_kv_policy_recent(p, n), budget), old = n - recent;
    for (int64_t i = 0; i < n; i++)
        keep[i] = i >= old || budget >= n;
    if (budget >= n)
        return;
    if (p->kind == LM_KV_STREAMING) {
        for (int64_t i = 0; i < budget - recent; i++)
            keep[i] = true;
        return;
    }
    if (p->kind == LM_KV_SNAPKV)
        lm_kv_average(mass, old, p->kernel, work);
    else
        for (int64_t i = 0; i < old; i++)
            work[i] = mass[i];
    lm_kv_mark_largest(work, old, budget - recent, keep, work + n);
}

int64_t lm_kv_policy_evict(const lm_kv_policy *p, int64_t n, int64_t next, int64_t rows,
                           const int32_t *at, const float *mass)
{
    int64_t worst = -1, old = next + 1 - lm_kv_policy_recent(p, n);
    if (!lm_kv_policy_replaces(p))
        return -1;
    for (int64_t i = 0; i < rows; i++) {
        if (at[i] >= old || (p->kind == LM_KV_STREAMING && at[i] < p->sinks) ||
            (p->protect && at[i] < n))
            continue;
        if (worst < 0) {
            worst = i;
            continue;
        }
        double x = p->kind == LM_KV_STREAMING ? at[i] : rank_of(mass[i]);
        double y = p->kind == LM_KV_STREAMING ? at[worst] : rank_of(mass[worst]);
        if (x < y || (x == y && at[i] > at[worst]))
            worst = i;
    }
    return worst;
}

void lm_kv_random_masses(uint64_t seed, int64_t layer, int64_t head, int64_t first, int64_t n,
                         float *mass)
{
    lm_rng r = lm_rng_make(seed, "kv random", (uint64_t)layer << 32 | (uint32_t)head);
    for (int64_t i = 0; i < n; i++)
        mass[i] = (float)lm_rng_uniform(r, (uint64_t)(first + i));
}
