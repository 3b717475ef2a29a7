/* SPDX-License-Identifier: Apache-2.0 */
/* test_kv_merge.c -- merging of neighbours with similar keys, against joining by repeated search. */
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
#include "kv/merge.h"

enum { MOST = 120, D = 8 };

static float key[MOST * D], mass[MOST];

/* A walk, whose neighbours are similar; some steps are long, some tokens are repeated or zero. */
static void draw_keys(uint64_t seed, int64_t n)
{
    lm_rng r = lm_rng_make(seed, "kv merge", 0);
    uint64_t at = 0;
    for (int64_t i = 0; i < n; i++) {
        uint64_t kind = lm_rng_below(r, at++, 8);
        for (int64_t d = 0; d < D; d++) {
            float before = i ? key[(i - 1) * D + d] : 1;
            double step = lm_rng_normal(r, 1000000 + at++);
            key[i * D + d] = kind == 0                           ? (float)step
                             : kind == 1                         ? before
                             : kind == 2 && d == 0 && i % 3 == 0 ? 0
                                                                 : before + 0.3F * (float)step;
        }
        if (kind == 3)
            memset(key + i * D, 0, D * sizeof *key);
        mass[i] = (float)lm_rng_below(r, at++, 12) / 4; /* many are equal */
    }
}

static double cosine_of(int64_t i, int64_t j)
{
    double ab = 0, aa = 0, bb = 0;
    for (int64_t d = 0; d < D; d++) {
        ab += (double)key[i * D + d] * (double)key[j * D + d];
        aa += (double)key[i * D + d] * (double)key[i * D + d];
        bb += (double)key[j * D + d] * (double)key[j * D + d];
    }
    return aa > 0 && bb > 0 ? ab / sqrt(aa * bb) : 0;
}

/* Join the two most similar neighbours of different runs, again and again. */
static int64_t join(const lm_kv_policy *p, int64_t n, int32_t *run)
{
    bool alone[MOST];
    int64_t old = n > p->window ? n - p->window : 0, left = n;
    int64_t heavy = (int64_t)ceil(p->heavy * (double)old);
    for (int64_t i = 0; i < n; i++) {
        int64_t above = 0; /* tokens of a larger mass, or the same and before this one */
        for (int64_t j = 0; j < old; j++)
            above += mass[j] > mass[i] || (mass[j] == mass[i] && j < i);
        alone[i] = i >= old || above < heavy;
        run[i] = (int32_t)i;
    }
    while (left > (int64_t)(p->keep * (double)n)) {
        int64_t best = -1;
        for (int64_t i = 0; i + 1 < n; i++)
            if (!alone[i] && !alone[i + 1] && run[i] != run[i + 1] &&
                cosine_of(i, i + 1) >= p->threshold &&
                (best < 0 || cosine_of(i, i + 1) > cosine_of(best, best + 1)))
                best = i;
        if (best < 0)
            break;
        int32_t gone = run[best + 1];
        for (int64_t i = 0; i < n; i++)
            run[i] = run[i] == gone ? run[best] : run[i];
        left--;
    }
    return left;
}

static void runs(void **state)
{
    int64_t merged = 0;
    (void)state;
    for (uint64_t trial = 0; trial < 400; trial++) {
        lm_rng r = lm_rng_make(trial, "kv merge sizes", 0);
        int64_t n = 1 + (int64_t)lm_rng_below(r, 0, MOST);
        lm_kv_policy p = { .kind = LM_KV_MERGE,
                           .keep = 0.1 + 0.8 * lm_rng_uniform(r, 1),
                           .threshold = lm_rng_uniform(r, 2),
                           .window = (int64_t)lm_rng_below(r, 3, 40),
                           .heavy = 0.3 * lm_rng_uniform(r, 4) };
        int32_t run[MOST], want[MOST];
        lm_kv_joint joint[MOST];
        bool keep[MOST];
        double work[2 * MOST];
        draw_keys(trial, n);
        int64_t left = lm_kv_merge_runs(&p, n, D, key, D, mass, run, joint, keep, work);
        assert_int_equal(left, join(&p, n, want));
        assert_memory_equal(run, want, (size_t)n * sizeof *run);
        assert_true(left >= (int64_t)(p.keep * (double)n));
        merged += n - left;
    }
    assert_true(merged > 4000);
}

/* The weights by their equations, and what they keep: a run of one, equal keys, the pivot. */
static void weights(void **state)
{
    (void)state;
    for (uint64_t trial = 0; trial < 300; trial++) {
        int64_t n = 1 + (int64_t)(trial % 9), pivot = 0;
        double w[16], want[16], gap[16] = { 0 }, s = 0, sum = 0;
        float y[D];
        lm_kv_policy p = { .kind = LM_KV_MERGE, .halves = trial % 2 };
        draw_keys(1000 + trial, n);
        if (trial % 5 == 0) /* equal keys */
            for (int64_t i = 1; i < n; i++)
                memcpy(key + i * D, key, D * sizeof *key);
        for (int64_t i = 1; i < n; i++)
            pivot = mass[i] > mass[pivot] ? i : pivot;
        for (int64_t i = 0; i < n; i++) {
            for (int64_t d = 0; d < D; d++)
                gap[i] += pow((double)key[i * D + d] - (double)key[pivot * D + d], 2);
            s += sqrt(gap[i]);
        }
        s /= n > 1 ? (double)(n - 1) : 1;
        for (int64_t i = 0; i < n; i++) {
            want[i] = s > 0 ? exp(-gap[i] / (2 * s * s)) : 1;
            sum += want[i];
        }
        assert_int_equal(lm_kv_merge_weights(&p, n, D, key, D, mass, w), pivot);
        for (int64_t i = 0; i < n && !p.halves; i++)
            assert_true(fabs(w[i] - want[i] / sum) < 1e-12);
        lm_kv_merge_rows(n, D, key, D, w, y);
        for (int64_t d = 0; d < D; d++) {
            /* LOOK-M: the mean over the pivot and (other + pivot) / 2 */
            double mean = 0, weighted = 0, x = (double)key[pivot * D + d];
            for (int64_t i = 0; i < n; i++) {
                mean += ((double)key[i * D + d] + x) / 2 / (double)n;
                weighted += want[i] / sum * (double)key[i * D + d];
            }
            assert_true(fabs((double)y[d] - (p.halves ? mean : weighted)) < 1e-5);
        }
        if (n == 1)
            assert_memory_equal(y, key, sizeof y);
    }
}

static void policy(void **state)
{
    lm_kv_policy p = { .kind = LM_KV_MERGE, .keep = 0.5, .threshold = 0.75, .window = 4 };
    float y[2 * D];
    double w[2] = { 0.25, 0.75 };
    (void)state;
    assert_true(lm_kv_policy_weighs(&p) && !lm_kv_policy_replaces(&p));
    assert_int_equal(lm_kv_policy_budget(&p, 100, 0, 4), 100);
    assert_true(lm_kv_policy_most(&p, 100, 100) == INT64_MAX);
    assert_int_equal(lm_kv_policy_evict(&p, 100, 100, 1, (int32_t[]){ 0 }, mass), -1);
    /* In place. */
    for (int d = 0; d < D; d++) {
        y[d] = 4 * (float)d;
        y[D + d] = 8;
    }
    lm_kv_merge_rows(2, D, y, D, w, y + D);
    for (int d = 0; d < D; d++)
        assert_true(y[D + d] == (float)d + 6);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(runs),
        cmocka_unit_test(weights),
        cmocka_unit_test(policy),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
