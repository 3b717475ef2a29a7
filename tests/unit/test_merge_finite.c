/* SPDX-License-Identifier: Apache-2.0 */
/* The first number that a merge cannot use: every type, every place, any address, any threads. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "base/mem.h"
#include "merge/finite.h"

enum { N = 200000 };

static const lm_dtype types[] = { LM_DTYPE_F64,  LM_DTYPE_F32,    LM_DTYPE_F16,
                                  LM_DTYPE_BF16, LM_DTYPE_F8E4M3, LM_DTYPE_F8E5M2 };

/* lm_set at any address. */
static void set(lm_dtype type, char *x, int64_t i, double value)
{
    size_t size = lm_dtype_size(type);
    double cell;

    lm_set(type, &cell, 0, value);
    memcpy(x + (size_t)i * size, &cell, size);
}

static void finds(void **state)
{
    static const int64_t at[] = { 0, 1, 1023, 1024, 65535, 65536, 131072, N - 1 };
    char *room = NULL;
    lm_par *two = NULL;
    lm_err e = { 0 };

    (void)state;
    assert_int_equal(lm_alloc_n(&room, N + 1, 8, "test", &e), LM_OK);
    assert_int_equal(lm_par_new(&two, 2, &e), LM_OK);
    for (size_t t = 0; t < sizeof types / sizeof *types; t++) {
        char *x = room + 1; /* no alignment */

        for (int64_t i = 0; i < N; i++)
            set(types[t], x, i, (double)(i % 7) - 3);
        assert_int_equal(lm_merge_first_bad(types[t], x, N, false, two), -1);
        assert_int_equal(lm_merge_first_bad(types[t], x, N, true, two), 0);
        assert_int_equal(lm_merge_first_bad(types[t], x, 0, true, NULL), -1);
        for (int k = sizeof at / sizeof *at - 1; k >= 0; k--) { /* the first of several */
            set(types[t], x, at[k], k % 2 || types[t] == LM_DTYPE_F8E4M3 ? NAN : -INFINITY);
            assert_int_equal(lm_merge_first_bad(types[t], x, N, false, two), at[k]);
            assert_int_equal(lm_merge_first_bad(types[t], x, N, false, NULL), at[k]);
            assert_int_equal(lm_merge_first_bad(types[t], x, at[k], false, two), -1);
        }
    }
    lm_set(LM_DTYPE_I32, room, 0, -1);
    assert_int_equal(lm_merge_first_bad(LM_DTYPE_I32, room, 1, true, NULL), -1);
    lm_par_free(two);
    lm_free(room);
}

/* The largest numbers of each type are numbers. */
static void keeps_the_largest(void **state)
{
    static const double largest[] = {
        1.7976931348623157e308, 3.4028234663852886e38, 65504, 3.3895313892515355e38, 448, 57344
    };

    (void)state;
    for (size_t t = 0; t < sizeof types / sizeof *types; t++) {
        double cell = 0;

        lm_set(types[t], &cell, 0, largest[t]);
        assert_true(lm_get(types[t], &cell, 0) == largest[t]);
        assert_int_equal(lm_merge_first_bad(types[t], &cell, 1, true, NULL), -1);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(finds),
                                        cmocka_unit_test(keeps_the_largest) };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
