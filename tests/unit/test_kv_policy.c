/* SPDX-License-Identifier: Apache-2.0 */
/* test_kv_policy.c -- which tokens of a cache stay: selections against sorting, and against the published loops
 * written out; budgets of layers. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/rng.h"
#include "kv/policy.h"

enum { MOST = 400 };

static const lm_kv_policy h2o = { .kind = LM_KV_H2O, .keep = 0.2 };
static const lm_kv_policy snapkv = {
    .kind = LM_KV_SNAPKV, .capacity = 60, .window = 8, .kernel = 5
};
static const lm_kv_policy streaming = { .kind = LM_KV_STREAMING, .sinks = 4, .window = 20 };

/* Few distinct values, so that many are equal; some are NaN. */
static void draw_masses(lm_rng r, uint64_t *at, int64_t n, float *mass)
{
    uint64_t kinds = 2 + lm_rng_below(r, (*at)++, 200);
    for (int64_t i = 0; i < n; i++)
        mass[i] = (float)lm_rng_below(r, (*at)++, kinds) / 16;
    if (lm_rng_below(r, (*at)++, 4) == 0)
        mass[lm_rng_below(r, (*at)++, (uint64_t)n)] = NAN;
}

typedef struct {
    double score;
    int64_t at;
} entry;

/* The larger score first, of equal ones the lower position; NaN is last. */
static int by_score(const void *a, const void *b)
{
    const entry *x = a, *y = b;
    double s = isnan(x->score) ? -1e30 : x->score, t = isnan(y->score) ? -1e30 : y->score;
    return s != t ? (s < t) - (s > t) : (x->at > y->at) - (x->at < y->at);
}

static void largest_as_sorted(void **state)
{
    lm_rng r = lm_rng_make(3, "largest", 0);
    uint64_t at = 0;
    (void)state;
    for (int trial = 0; trial < 2000; trial++) {
        float mass[MOST];
        double score[MOST], work[MOST];
        bool keep[MOST] = { false }, want[MOST] = { false };
        entry sorted[MOST];
        int64_t n = 1 + (int64_t)lm_rng_below(r, at++, MOST);
        int64_t k = (int64_t)lm_rng_below(r, at++, (uint64_t)n + 3);
        draw_masses(r, &at, n, mass);
        for (int64_t i = 0; i < n; i++) {
            score[i] = mass[i];
            sorted[i] = (entry){ mass[i], i };
        }
        qsort(sorted, (size_t)n, sizeof *sorted, by_score);
        for (int64_t i = 0; i < k && i < n; i++)
            want[sorted[i].at] = true;
        lm_kv_mark_largest(score, n, k, keep, work);
        assert_memory_equal(keep, want, (size_t)n);
    }
}

/* Of a prompt of n with int(0.1 n) heavy and int(0.1 n) newest tokens, as H2O's class computes it. */
static void h2o_of_prompts(void **state)
{
    lm_rng r = lm_rng_make(4, "h2o", 0);
    uint64_t at = 0;
    (void)state;
    for (int64_t n = 1; n <= MOST; n++) {
        float mass[MOST];
        double work[2 * MOST];
        bool keep[MOST];
        entry sorted[MOST];
        int64_t heavy = (int64_t)(0.1 * (double)n), recent = (int64_t)(0.1 * (double)n);
        heavy = heavy ? heavy : 1;
        recent = recent ? recent : 1;
        int64_t want = heavy + recent < n ? heavy + recent : n, budget;
        draw_masses(r, &at, n, mass);
        budget = lm_kv_policy_budget(&h2o, n, 3, 12);
        assert_int_equal(budget, want);
        assert_int_equal(lm_kv_policy_recent(&h2o, n), recent);
        assert_int_equal(lm_kv_policy_most(&h2o, n, budget), budget);
        lm_kv_policy_select(&h2o, budget, n, mass, keep, work);
        int64_t old = n - recent, kept = 0;
        for (int64_t i = 0; i < n; i++) {
            sorted[i] = (entry){ mass[i], i };
            kept += keep[i];
        }
        assert_int_equal(kept, budget);
        if (budget == n)
            continue;
        qsort(sorted, (size_t)old, sizeof *sorted, by_score);
        for (int64_t i = 0; i < old; i++)
            assert_int_equal(keep[sorted[i].at], i < heavy);
        for (int64_t i = old; i < n; i++)
            assert_true(keep[i]);
    }
}

/* Rows of a head in any order, and beside them the published loop: all tokens in order of position, the newest
 * ones kept, of the others those with the largest sums. */
static void h2o_of_generated_tokens(void **state)
{
    lm_rng r = lm_rng_make(5, "h2o steps", 0);
    uint64_t draw = 0;
    (void)state;
    for (int64_t n = 30; n < 200; n += 17) {
        float mass[MOST], row_mass[MOST], sum[2 * MOST];
        double work[2 * MOST];
        bool keep[MOST];
        int32_t row[MOST];
        int64_t rows = 0, held = 0, list[MOST];
        int64_t budget = lm_kv_policy_budget(&h2o, n, 0, 1), recent = lm_kv_policy_recent(&h2o, n);
        draw_masses(r, &draw, n, mass);
        lm_kv_policy_select(&h2o, budget, n, mass, keep, work);
        for (int64_t i = 0; i < n; i++)
            if (keep[i]) {
                row[rows++] = (int32_t)i;
                list[held++] = i;
            }
        for (int64_t i = 0; i < 2 * MOST; i++)
            sum[i] = i < n ? mass[i] : 0;
        for (int64_t next = n; next < n + 150; next++) {
            entry sorted[MOST];
            for (int64_t i = 0; i < held; i++) /* the step's probabilities */
                sum[list[i]] += (float)lm_rng_below(r, draw++, 8) / 8;
            sum[next] = (float)lm_rng_below(r, draw++, 8) / 8;
            for (int64_t i = 0; i < rows; i++)
                row_mass[i] = sum[row[i]];
            int64_t out = lm_kv_policy_evict(&h2o, n, next, rows, row, row_mass);
            assert_in_range(out, 0, rows - 1);
            row[out] = (int32_t)next;

            list[held++] = next; /* the published order: add, then drop the worst of the old ones */
            for (int64_t i = 0; i < held - recent; i++)
                sorted[i] = (entry){ sum[list[i]], list[i] };
            qsort(sorted, (size_t)(held - recent), sizeof *sorted, by_score);
            int64_t gone = sorted[held - recent - 1].at, k = 0;
            for (int64_t i = 0; i < held; i++)
                if (list[i] != gone)
                    list[k++] = list[i];
            held = k;
            assert_int_equal(held, rows);
            for (int64_t i = 0; i < held; i++) {
                bool found = false;
                for (int64_t m = 0; m < rows; m++)
                    found = found || row[m] == list[i];
                assert_true(found);
            }
        }
    }
}

static void streaming_holds_the_ends(void **state)
{
    double work[2 * MOST];
    bool keep[MOST];
    int32_t row[MOST];
    (void)state;
    assert_false(lm_kv_policy_weighs(&streaming));
    for (int64_t n = 1; n < 60; n++) {
        int64_t rows = 0, budget = lm_kv_policy_budget(&streaming, n, 0, 4);
        assert_int_equal(budget, n < 24 ? n : 24);
        lm_kv_policy_select(&streaming, budget, n, NULL, keep, work);
        for (int64_t i = 0; i < n; i++) {
            assert_int_equal(keep[i], i < 4 || i >= n - 20);
            if (keep[i])
                row[rows++] = (int32_t)i;
        }
        for (int64_t next = n; next < n + 70; next++) {
            if (rows < lm_kv_policy_most(&streaming, n, budget)) {
                row[rows++] = (int32_t)next;
                continue;
            }
            int64_t out = lm_kv_policy_evict(&streaming, n, next, rows, row, NULL);
            assert_in_range(out, 0, rows - 1);
            row[out] = (int32_t)next;
            for (int64_t i = 0; i < rows; i++)
                assert_true(row[i] < 4 || row[i] > next - 20);
        }
    }
}

/* avg_pool1d(kernel 5, padding 2, stride 1) counts the padding: five terms always. */
static void snapkv_averages_and_selects(void **state)
{
    lm_rng r = lm_rng_make(6, "snapkv", 0);
    uint64_t at = 0;
    (void)state;
    assert_false(lm_kv_policy_replaces(&snapkv));
    for (int64_t n = 1; n <= 200; n++) {
        float mass[MOST];
        double work[2 * MOST], pooled[MOST];
        bool keep[MOST];
        entry sorted[MOST];
        int64_t budget = lm_kv_policy_budget(&snapkv, n, 0, 4), old = n - 8;
        for (int64_t i = 0; i < n; i++)
            mass[i] = (float)lm_rng_below(r, at++, 1000);
        lm_kv_policy_select(&snapkv, budget, n, mass, keep, work);
        assert_int_equal(budget, n < 60 ? n : 60);
        for (int64_t i = 0; i < n && n <= 60; i++)
            assert_true(keep[i]);
        if (n <= 60)
            continue;
        for (int64_t i = 0; i < old; i++) {
            double sum = 0;
            for (int64_t j = i - 2; j <= i + 2; j++)
                sum += j >= 0 && j < old ? mass[j] : 0;
            pooled[i] = sum / 5;
            sorted[i] = (entry){ pooled[i], i };
        }
        qsort(sorted, (size_t)old, sizeof *sorted, by_score);
        for (int64_t i = 0; i < old; i++)
            assert_int_equal(keep[sorted[i].at], i < 52);
        for (int64_t i = old; i < n; i++)
            assert_true(keep[i]);
        assert_int_equal(lm_kv_policy_evict(&snapkv, n, n, 0, NULL, NULL), -1);
        assert_true(lm_kv_policy_most(&snapkv, n, budget) == INT64_MAX);
    }
}

/* PyramidKV's update_kv, line by line. */
static int64_t published_pyramid(int64_t n, int64_t capacity, int64_t window, int64_t beta,
                                 int64_t layer, int64_t layers)
{
    int64_t min_num = (capacity - window) / beta, max_num = (capacity - window) * 2 - min_num;
    if (max_num >= n - window) {
        max_num = n - window;
        min_num = (capacity - window) * 2 - max_num;
    }
    int64_t steps = (max_num - min_num) / (layers - 1);
    if (n < capacity)
        return n;
    if (n < (capacity - window) * 2)
        return capacity;
    return max_num - layer * steps + window;
}

static void pyramids(void **state)
{
    lm_kv_policy p = snapkv;
    (void)state;
    p.beta = 20;
    for (int64_t layers = 2; layers <= 32; layers++)
        for (int64_t n = 1; n <= MOST; n++)
            for (int64_t l = 0; l < layers; l++)
                assert_int_equal(lm_kv_policy_budget(&p, n, l, layers),
                                 published_pyramid(n, 60, 8, 20, l, layers));
    assert_int_equal(lm_kv_policy_budget(&p, 300, 0, 1), 60);
    /* By hand: 52 free, from 102 down to 2 over three layers in steps of 50. */
    assert_int_equal(lm_kv_policy_budget(&p, 300, 0, 3), 110);
    assert_int_equal(lm_kv_policy_budget(&p, 300, 1, 3), 60);
    assert_int_equal(lm_kv_policy_budget(&p, 300, 2, 3), 10);
    /* Of h2o the newest tokens are those of each layer, the heavy ones fall. */
    p = h2o;
    p.beta = 20;
    for (int64_t n = 40; n <= MOST; n++)
        for (int64_t l = 0; l < 5; l++) {
            int64_t half = (int64_t)(0.1 * (double)n);
            assert_int_equal(lm_kv_policy_budget(&p, n, l, 5),
                             published_pyramid(n, 2 * half, half, 20, l, 5));
        }
}

static void random_control(void **state)
{
    lm_kv_policy p = { .kind = LM_KV_RANDOM, .keep = 0.2, .protect = true, .seed = 9 };
    float a[MOST], b[MOST];
    double mean = 0, work[2 * MOST];
    bool keep[MOST];
    int32_t row[MOST];
    (void)state;
    /* A number depends on seed, layer, head and position only. */
    lm_kv_random_masses(9, 2, 1, 0, MOST, a);
    lm_kv_random_masses(9, 2, 1, 100, 50, b);
    assert_memory_equal(a + 100, b, 50 * sizeof *b);
    for (int k = 0; k < 3; k++) {
        lm_kv_random_masses(k == 0 ? 10 : 9, k == 1 ? 1 : 2, k == 2 ? 2 : 1, 0, MOST, b);
        assert_memory_not_equal(a, b, sizeof a);
    }
    for (int i = 0; i < MOST; i++)
        mean += a[i] / MOST;
    assert_true(fabs(mean - 0.5) < 0.08);

    /* A protected prompt stays whole; of the generated tokens as many as 0.2 of it. */
    int64_t n = 100, budget = lm_kv_policy_budget(&p, n, 0, 1), rows = n;
    assert_int_equal(budget, n);
    lm_kv_policy_select(&p, budget, n, a, keep, work);
    for (int64_t i = 0; i < n; i++) {
        assert_true(keep[i]);
        row[i] = (int32_t)i;
    }
    assert_int_equal(lm_kv_policy_most(&p, n, budget), 120);
    for (int64_t next = n; next < 300; next++) {
        if (rows < 120) {
            row[rows++] = (int32_t)next;
            continue;
        }
        for (int64_t i = 0; i < rows; i++)
            b[i] = a[row[i]];
        int64_t out = lm_kv_policy_evict(&p, n, next, rows, row, b);
        assert_in_range(out, 100, 119);
        assert_true(row[out] <= next - 10);
        for (int64_t i = 100; i < rows; i++)
            assert_true(row[i] > next - 10 || b[i] >= b[out]);
        row[out] = (int32_t)next;
    }
    /* With a prompt alone there is no row to replace. */
    assert_int_equal(lm_kv_policy_evict(&p, n, n, n, row, a), -1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(largest_as_sorted),
        cmocka_unit_test(h2o_of_prompts),
        cmocka_unit_test(h2o_of_generated_tokens),
        cmocka_unit_test(streaming_holds_the_ends),
        cmocka_unit_test(snapkv_averages_and_selects),
        cmocka_unit_test(pyramids),
        cmocka_unit_test(random_control),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
