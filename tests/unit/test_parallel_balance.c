/* SPDX-License-Identifier: Apache-2.0 */
/* test_parallel_balance.c -- experts dealt to ranks by load: the example that is published with EPLB, laws that hold for any
 * loads, and requests that cannot be met. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "base/rng.h"
#include "parallel/balance.h"

enum { MOST = 64 };

/* Two layers of 12 experts in 4 groups, 16 slots on 8 ranks of 2 nodes (the README of deepseek-ai/EPLB). */
static void published_example(void **state)
{
    static const double load[2][12] = { { 90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86 },
                                        { 20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27 } };
    static const int32_t want[2][16] = { { 5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1 },
                                         { 7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1 } };
    const lm_balance_ask a = { .experts = 12, .slots = 16, .groups = 4, .nodes = 2, .ranks = 8 };
    (void)state;
    for (int l = 0; l < 2; l++) {
        lm_err e = { 0 };
        int32_t of[16], copies[12];
        assert_int_equal(lm_balance_experts(load[l], &a, of, copies, &e), LM_OK);
        assert_memory_equal(of, want[l], sizeof of);
    }
}

static void check_laws(const double *load, const lm_balance_ask *a)
{
    lm_err e = { 0 };
    int32_t of[MOST], copies[MOST], seen[MOST] = { 0 };
    assert_int_equal(lm_balance_experts(load, a, of, copies, &e), LM_OK);
    for (int64_t k = 0; k < a->slots; k++) {
        assert_in_range(of[k], 0, a->experts - 1);
        seen[of[k]]++;
    }
    for (int64_t i = 0; i < a->experts; i++) {
        assert_true(seen[i] >= 1);
        assert_int_equal(seen[i], copies[i]);
    }
    /* groups stay on one node */
    for (int64_t k = 0; k < a->slots && a->groups % a->nodes == 0; k++)
        for (int64_t j = 0; j < a->slots; j++)
            if (of[k] / (a->experts / a->groups) == of[j] / (a->experts / a->groups))
                assert_int_equal(k / (a->slots / a->nodes), j / (a->slots / a->nodes));
    assert_true(lm_balance_peak(load, a, of, copies) >= 1 - 1e-12);
}

static void laws(void **state)
{
    static const lm_balance_ask asks[] = {
        { .experts = 8, .slots = 8, .groups = 1, .nodes = 1, .ranks = 4 },
        { .experts = 8, .slots = 12, .groups = 4, .nodes = 2, .ranks = 4 },
        { .experts = 16, .slots = 24, .groups = 8, .nodes = 4, .ranks = 8 },
        { .experts = 9, .slots = 12, .groups = 3, .nodes = 2, .ranks = 6 }, /* all ranks alike */
        { .experts = 4, .slots = 4, .groups = 2, .nodes = 2, .ranks = 4 },
    };
    (void)state;
    for (uint64_t seed = 0; seed < 40; seed++)
        for (size_t k = 0; k < sizeof asks / sizeof *asks; k++) {
            const lm_rng r = lm_rng_make(seed, "loads", k);
            double load[MOST];
            for (int64_t i = 0; i < asks[k].experts; i++)
                load[i] = (double)lm_rng_below(r, (uint64_t)i, 1 + seed * 10);
            check_laws(load, &asks[k]);
        }
}

/* One expert with half of all rows: copies of it bring the fullest rank near the mean. */
static void hot_expert(void **state)
{
    const double load[8] = { 700, 100, 100, 100, 100, 100, 100, 100 };
    const lm_balance_ask even = { .experts = 8, .slots = 8, .groups = 1, .nodes = 1, .ranks = 4 },
                         more = { .experts = 8, .slots = 12, .groups = 1, .nodes = 1, .ranks = 4 };
    lm_err e = { 0 };
    int32_t of[MOST], copies[MOST];
    (void)state;
    assert_int_equal(lm_balance_experts(load, &even, of, copies, &e), LM_OK);
    assert_true(lm_balance_peak(load, &even, of, copies) > 2.2);
    assert_int_equal(lm_balance_experts(load, &more, of, copies, &e), LM_OK);
    assert_int_equal(copies[0], 5);
    assert_true(lm_balance_peak(load, &more, of, copies) < 1.2);
}

/* Of equal experts the first is copied, of equal packs the first is filled: all ranks deal alike. */
static void equal_loads(void **state)
{
    static const int32_t want[12] = { 4, 0, 0, 5, 1, 1, 6, 2, 2, 7, 3, 3 };
    const double load[8] = { 1, 1, 1, 1, 1, 1, 1, 1 };
    const lm_balance_ask a = { .experts = 8, .slots = 12, .groups = 1, .nodes = 1, .ranks = 4 };
    lm_err e = { 0 };
    int32_t of[MOST], copies[MOST];
    (void)state;
    assert_int_equal(lm_balance_experts(load, &a, of, copies, &e), LM_OK);
    assert_memory_equal(of, want, sizeof want);
}

static void refusals(void **state)
{
    static const struct {
        lm_balance_ask a;
        const char *where;
    } cases[] = { { { 8, 8, 3, 1, 4 }, "groups" },
                  { { 8, 8, 1, 3, 4 }, "nodes" },
                  { { 8, 4, 1, 1, 4 }, "slots" },
                  { { 8, 9, 1, 1, 4 }, "slots" } };
    const double load[8] = { 0 };
    (void)state;
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        lm_err e = { 0 };
        int32_t of[MOST], copies[MOST];
        assert_int_equal(lm_balance_experts(load, &cases[k].a, of, copies, &e), LM_EUSAGE);
        assert_string_equal(e.where, cases[k].where);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(published_example), cmocka_unit_test(laws),
        cmocka_unit_test(hot_expert),        cmocka_unit_test(equal_loads),
        cmocka_unit_test(refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
