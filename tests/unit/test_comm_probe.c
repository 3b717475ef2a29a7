/* SPDX-License-Identifier: Apache-2.0 */
/* test_comm_probe.c -- rounds in which all pairs meet, what is measured, which links are slow; clocks. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/clock.h"
#include "base/mem.h"
#include "comm/clock.h"
#include "comm/probe.h"
#include "comm/threads.h"

static void test_all_pairs_meet_once(void **state)
{
    (void)state;
    for (int n = 1; n <= 9; n++) {
        int met[9][9] = { { 0 } };
        for (int r = 0; r < lm_links_rounds(n); r++)
            for (int p = 0; p < n; p++) {
                const int q = lm_links_partner(n, r, p);
                assert_true(q < n && q != p);
                if (q < 0)
                    continue;
                assert_int_equal(lm_links_partner(n, r, q), p);
                met[p][q]++;
            }
        for (int p = 0; p < n; p++)
            for (int q = 0; q < n; q++)
                assert_int_equal(met[p][q], p != q);
    }
}

static lm_code probe(void *ctx, lm_comm *c, lm_err *e)
{
    const int n = lm_comm_size(c);
    lm_link *all = NULL;
    size_t count = 0, there = 0;
    bool met[5][5] = { { false } };
    (void)ctx;
    if (lm_links_probe(c, lm_links_rounds(n), 1 << 16, &all, &count, e))
        return e->code;
    for (size_t i = 0; i < count; i++) {
        if (all[i].a < 0)
            continue;
        there++;
        if (!(all[i].a < all[i].b && all[i].b < n && all[i].latency > 0 && all[i].bandwidth > 0) ||
            met[all[i].a][all[i].b])
            lm_fail(e, LM_EBUG, "link", NULL, "%zu of %d ranks", i, n);
        met[all[i].a][all[i].b] = true;
    }
    if (there != (size_t)(n * (n - 1) / 2))
        lm_fail(e, LM_EBUG, "links", NULL, "%zu of %d ranks", there, n);
    lm_free(all);
    return e->code;
}

static void test_each_rank_gets_all(void **state)
{
    lm_err e = { 0 };
    (void)state;
    for (int n = 2; n <= 5; n++)
        assert_false(lm_threads_run(n, 60, probe, NULL, &e));
}

static void test_slow_ones_stand_out(void **state)
{
    const uint64_t machine[] = { 1, 1, 2, 2, 2 };
    lm_err e = { 0 };
    lm_link all[] = {
        { .a = 0, .b = 1, .latency = 1e-6, .bandwidth = 8e9 },
        { .a = 2, .b = 3, .latency = 1e-6, .bandwidth = 9e9 },
        { .a = 2, .b = 4, .latency = 2e-6, .bandwidth = 7e9 },
        { .a = -1 },
        { .a = 0, .b = 2, .latency = 2e-5, .bandwidth = 1e9 }, /* slower, as all between machines */
        { .a = 0, .b = 3, .latency = 2e-5, .bandwidth = 1e9 },
        { .a = 1, .b = 2, .latency = 2e-5, .bandwidth = 3e8 }, /* less than a third of those */
        { .a = 1, .b = 3, .latency = 3e-3, .bandwidth = 1e9 }, /* late */
    };
    const size_t n = sizeof all / sizeof *all;
    (void)state;
    assert_int_equal(lm_links_judge(all, n, machine, &e), 2);
    for (size_t i = 0; i < n; i++)
        assert_int_equal(all[i].slow, i >= 6);
    /* two have no median */
    lm_link few[] = { { .a = 0, .b = 1, .latency = 1e-6, .bandwidth = 8e9 },
                      { .a = 2, .b = 3, .latency = 1, .bandwidth = 1 } };
    assert_int_equal(lm_links_judge(few, 2, machine, &e), 0);
}

/* ---- clocks ---- */

static _Thread_local double skew;

static double skewed(void)
{
    return lm_now() + skew;
}

static lm_code compare_clocks(void *ctx, lm_comm *c, lm_err *e)
{
    const int rank = lm_comm_rank(c);
    double ahead;
    (void)ctx;
    skew = 10 - 7.5 * rank;
    if (lm_comm_clock(c, skewed, &ahead, e))
        return e->code;
    const double off = ahead + 7.5 * rank;
    return off > -0.5 && off < 0.5 && (rank || ahead == 0)
               ? LM_OK
               : lm_fail(e, LM_EBUG, "clock", NULL, "rank %d: %g s ahead", rank, ahead);
}

static void test_clocks_are_compared(void **state)
{
    lm_err e = { 0 };
    (void)state;
    for (int n = 1; n <= 3; n++)
        if (lm_threads_run(n, 0, compare_clocks, NULL, &e))
            fail_msg("%s: %s", e.where, e.what);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_clocks_are_compared),
        cmocka_unit_test(test_all_pairs_meet_once),
        cmocka_unit_test(test_each_rank_gets_all),
        cmocka_unit_test(test_slow_ones_stand_out),
    };
    return cmocka_run_group_tests_name("comm_probe", tests, NULL, NULL);
}
