/* SPDX-License-Identifier: Apache-2.0 */
/* test_numeric_select.c -- selection by rank against sorting. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdlib.h>
#include <string.h>

#include "base/rng.h"
#include "numeric/select.h"

enum { MOST = 90 };

static int by_value(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

/* Few distinct numbers in some lists, orders that rise, fall and do neither, and lists that are sorted up to `from`. */
static void as_sorted(void **state)
{
    lm_rng r = lm_rng_make(5, "select", 0);
    uint64_t at = 0;
    (void)state;
    for (int trial = 0; trial < 4000; trial++) {
        float x[MOST], sorted[MOST];
        int64_t n = 1 + (int64_t)lm_rng_below(r, at++, MOST), kind = trial % 4;
        int64_t k = (int64_t)lm_rng_below(r, at++, (uint64_t)n);
        int64_t from = trial % 3 ? 0 : (int64_t)lm_rng_below(r, at++, (uint64_t)k + 1);
        for (int64_t i = 0; i < n; i++)
            x[i] = kind == 0   ? (float)i
                   : kind == 1 ? (float)-i
                               : (float)lm_rng_below(r, at++, kind == 2 ? 4 : 1000);
        memcpy(sorted, x, sizeof x);
        qsort(sorted, (size_t)n, sizeof *sorted, by_value);
        if (from)
            lm_select_nth(x, 0, n, from); /* what is left of it stays there */
        assert_true(lm_select_nth(x, from, n, k) == sorted[k]);
        for (int64_t i = 0; i < n; i++)
            assert_true(i < k ? x[i] <= x[k] : x[i] >= x[k]);
        qsort(x, (size_t)n, sizeof *x, by_value);
        assert_memory_equal(x, sorted, (size_t)n * sizeof *x);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(as_sorted),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
