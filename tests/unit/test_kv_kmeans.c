/* SPDX-License-Identifier: Apache-2.0 */
/* test_kv_kmeans.c -- k-means in one dimension, against all divisions of few numbers and Lloyd's iteration of many. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "base/rng.h"
#include "kv/kmeans.h"

enum { MOST = 4000 };

static lm_kmeans_cell point(double x, double w)
{
    return (lm_kmeans_cell){ w, w * x, w * x * x };
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double cost_of(const double *x, const double *w, int64_t n, const double *level, int k)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++) {
        double least = INFINITY;
        for (int g = 0; g < k; g++)
            least = fmin(least, (x[i] - level[g]) * (x[i] - level[g]));
        sum += w[i] * least;
    }
    return sum;
}

/* The least cost of numbers first .. n in k groups, over all divisions. */
static double try_all(const double *x, const double *w, int64_t first, int64_t n, int k)
{
    double best = INFINITY;
    if (k == 0 || first == n)
        return first == n ? 0 : INFINITY;
    for (int64_t end = first + 1; end <= n; end++) {
        double sw = 0, sx = 0, cost = 0;
        for (int64_t i = first; i < end; i++) {
            sw += w[i];
            sx += w[i] * x[i];
        }
        for (int64_t i = first; i < end; i++)
            cost += w[i] * (x[i] - sx / sw) * (x[i] - sx / sw);
        best = fmin(best, cost + try_all(x, w, end, n, k - 1));
    }
    return best;
}

static void few_numbers(void **state)
{
    lm_rng r = lm_rng_make(1, "kmeans few", 0);
    uint64_t at = 0;
    (void)state;
    for (int trial = 0; trial < 2000; trial++) {
        double x[10], w[10], level[8], cost;
        lm_kmeans_cell cell[10];
        lm_err e = { 0 };
        int64_t n = 1 + (int64_t)lm_rng_below(r, at++, 10);
        int k = 1 + (int)lm_rng_below(r, at++, 5);
        bool equal = lm_rng_below(r, at++, 3) == 0; /* many equal numbers */
        for (int64_t i = 0; i < n; i++) {
            x[i] = equal ? (double)lm_rng_below(r, at++, 4) / 3 : lm_rng_normal(r, 1000000 + at++);
            w[i] = lm_rng_uniform(r, at++) + 0.01;
        }
        qsort(x, (size_t)n, sizeof *x, by_value);
        for (int64_t i = 0; i < n; i++)
            cell[i] = point(x[i], w[i]);
        assert_int_equal(lm_kmeans(cell, n, k, level, &cost, &e), LM_OK);
        double best = try_all(x, w, 0, n, k);
        assert_true(fabs(cost - best) < 1e-9);
        assert_true(fabs(cost_of(x, w, n, level, k) - best) < 1e-9);
        for (int g = 1; g < k; g++)
            assert_true(level[g] > level[g - 1] + 1e-6);
    }
}

/* Lloyd's iteration from k numbers that are drawn with the probabilities of k-means++. */
static double lloyd(const double *x, const double *w, int64_t n, int k, lm_rng r, uint64_t *at)
{
    double level[32], gap[MOST];
    for (int g = 0; g < k; g++) {
        double all = 0, u;
        for (int64_t i = 0; i < n; i++) {
            gap[i] = g ? cost_of(&x[i], &w[i], 1, level, g) : w[i];
            all += gap[i];
        }
        u = lm_rng_uniform(r, (*at)++) * all;
        int64_t i = 0;
        for (; i < n - 1 && u > gap[i]; i++)
            u -= gap[i];
        level[g] = x[i];
    }
    for (int round = 0; round < 50; round++) {
        double sw[32] = { 0 }, sx[32] = { 0 };
        for (int64_t i = 0; i < n; i++) {
            int best = 0;
            for (int g = 1; g < k; g++)
                best = fabs(x[i] - level[g]) < fabs(x[i] - level[best]) ? g : best;
            sw[best] += w[i];
            sx[best] += w[i] * x[i];
        }
        for (int g = 0; g < k; g++)
            level[g] = sw[g] > 0 ? sx[g] / sw[g] : level[g];
    }
    return cost_of(x, w, n, level, k);
}

/* No worse than the iteration of the published code, from numbers and from their histogram. */
static void many_numbers(void **state)
{
    static double x[MOST], w[MOST];
    static lm_kmeans_cell cell[MOST];
    static lm_kmeans_histogram h;
    lm_rng r = lm_rng_make(2, "kmeans many", 0);
    uint64_t at = 1000000;
    (void)state;
    for (int bits = 2; bits <= 5; bits++) {
        int k = 1 << bits;
        double level[32], coarse[32], cost, theirs = INFINITY;
        lm_err e = { 0 };
        memset(&h, 0, sizeof h);
        for (int64_t i = 0; i < MOST; i++) {
            x[i] = tanh(lm_rng_normal(r, (uint64_t)(i + bits * MOST)));
            w[i] = exp(2 * lm_rng_normal(r, (uint64_t)(i + bits * MOST + 500000)));
        }
        qsort(x, MOST, sizeof *x, by_value);
        for (int64_t i = 0; i < MOST; i++) {
            cell[i] = point(x[i], w[i]);
            lm_kmeans_count(&h, x[i], w[i]);
        }
        assert_int_equal(lm_kmeans(cell, MOST, k, level, &cost, &e), LM_OK);
        assert_true(fabs(cost - cost_of(x, w, MOST, level, k)) < 1e-9 * cost);
        for (int trial = 0; trial < 4; trial++)
            theirs = fmin(theirs, lloyd(x, w, MOST, k, r, &at));
        assert_true(cost <= theirs * (1 + 1e-12));
        assert_int_equal(lm_kmeans(h.cell, LM_KMEANS_CELLS, k, coarse, &cost, &e), LM_OK);
        assert_true(cost_of(x, w, MOST, coarse, k) <= 1.001 * cost_of(x, w, MOST, level, k));
        assert_true(cost_of(x, w, MOST, coarse, k) <= 1.001 * theirs);
    }
}

static void edges(void **state)
{
    static lm_kmeans_histogram h;
    double level[8];
    lm_kmeans_cell none[3] = { { 0 } }, one[2] = { point(0.25, 0), point(-0.5, 3) };
    lm_err e = { 0 };
    (void)state;
    assert_int_equal(lm_kmeans(none, 3, 4, level, NULL, &e), LM_ENUMERIC);
    e = (lm_err){ 0 };
    assert_int_equal(lm_kmeans(NULL, 0, 4, level, NULL, &e), LM_ENUMERIC);
    e = (lm_err){ 0 };
    assert_int_equal(lm_kmeans(one, 2, 4, level, NULL, &e), LM_OK);
    for (int g = 1; g < 4; g++)
        assert_true(level[g] > level[g - 1]);
    assert_true(level[0] == -0.5 || level[1] == -0.5 || level[2] == -0.5 || level[3] == -0.5);
    /* Beyond the ends, on the ends, and no number at all. */
    lm_kmeans_count(&h, -3, 1);
    lm_kmeans_count(&h, 1, 2);
    lm_kmeans_count(&h, 1e30, 1);
    lm_kmeans_count(&h, (double)NAN, 1);
    assert_int_equal(lm_kmeans(h.cell, LM_KMEANS_CELLS, 2, level, NULL, &e), LM_OK);
    assert_true(level[0] == -1 && level[1] == 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(few_numbers),
        cmocka_unit_test(many_numbers),
        cmocka_unit_test(edges),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
