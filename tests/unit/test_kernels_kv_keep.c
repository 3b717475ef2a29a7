/* SPDX-License-Identifier: Apache-2.0 */
/* Masses of cached tokens on the CPU, at every level. */
#include "kv_keep_case.h"

static void as_defined(void **state)
{
    (void)state;
    for (int i = 0; i < DEFINED; i++)
        for (lm_cpu_level level = LM_CPU_REF; level <= lm_cpu_detect(); level++) {
            way w = defined_ways[i];
            w.level = level;
            check_defined(w);
        }
}

static void sums_to_rows(void **state)
{
    (void)state;
    for (int i = 0; i < CODED; i++)
        for (lm_cpu_level level = LM_CPU_REF; level <= lm_cpu_detect(); level++) {
            way w = coded_ways[i];
            w.level = level;
            check_sums(w);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(as_defined),
        cmocka_unit_test(sums_to_rows),
    };
    lm_err e = { 0 };
    if (lm_par_new(&pool, 2, &e))
        return 1;
    int failed = cmocka_run_group_tests_name("kernels_kv_keep", tests, NULL, NULL);
    lm_par_free(pool);
    return failed;
}
