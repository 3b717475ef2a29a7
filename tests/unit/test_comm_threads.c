/* SPDX-License-Identifier: Apache-2.0 */
/* test_comm_threads.c -- ranks that are threads: the checks of every transport, and their own arguments. */
#include "tests/unit/comm_case.h"

static void test_calls(void **state)
{
    (void)state;
    check_calls(lm_threads_run, MOST, "threads");
    check_large(lm_threads_run);
}

static void test_same_bits(void **state)
{
    (void)state;
    check_leaves(lm_threads_run);
}

static void test_failures(void **state)
{
    (void)state;
    check_failures(lm_threads_run, 0.3, 3, true);
}

static void test_agreement(void **state)
{
    (void)state;
    check_agreement(lm_threads_run);
}

static void test_arguments(void **state)
{
    lm_err e = { 0 };

    (void)state;
    assert_int_equal(lm_threads_run(0, 1, one_fails, NULL, &e), LM_EUSAGE);
    e = (lm_err){ 0 };
    assert_int_equal(lm_threads_run(LM_THREAD_RANKS + 1, 1, one_fails, NULL, &e), LM_EUSAGE);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_calls),     cmocka_unit_test(test_same_bits),
        cmocka_unit_test(test_failures),  cmocka_unit_test(test_agreement),
        cmocka_unit_test(test_arguments),
    };
    return cmocka_run_group_tests_name("comm_threads", tests, NULL, NULL);
}
