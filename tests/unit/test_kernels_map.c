/* SPDX-License-Identifier: Apache-2.0 */
/* reduce beyond the registry's examples: numbers that are not finite, long sums, many rows, both
 * types, the same bits for any number of threads.  Formulas: test_op_formula. */
#include "kernel_case.h"

#include "kernels/map.h"

static const lm_reduce_kind kinds[] = { LM_REDUCE_SUM, LM_REDUCE_SQUARES, LM_REDUCE_MAX,
                                        LM_REDUCE_ABS_MAX };

static operand result_of(const lm_reduce_attr *a, int64_t rows, int64_t cols)
{
    return a->over == LM_OVER_ALL      ? vec(F32, 1)
           : a->over == LM_OVER_COLUMN ? mat(F32, 1, cols)
           : a->over == LM_OVER_ROW    ? mat(F32, rows, 1)
                                       : mat(F32, rows / a->rows, 1);
}

static void check(lm_reduce_attr a, int64_t rows, int64_t cols, const double *data)
{
    kernel_case k = { .op = "reduce", .attr = &a, .tol_f32 = 1e-6, .tol_bf16 = 1e-6 };
    k.in[0] = mat(F32, rows, cols);
    if (data)
        k.in[0] = given(k.in[0], data);
    k.out[0] = result_of(&a, rows, cols);
    check_case(&k);
}

static void test_shapes(void **state)
{
    static const int64_t sizes[][2] = { { 1, 1 },   { 1, 200003 }, { 200003, 1 }, { 700, 300 },
                                        { 3, 129 }, { 1000, 15 },  { 64, 4096 } };
    (void)state;
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++)
        for (int k = 0; k < 4; k++)
            for (int over = 0; over < 4; over++) {
                int64_t rows = sizes[s][0], block = rows % 100 == 0 ? rows / 100 : 1;
                lm_reduce_attr a = { kinds[k], (lm_reduce_over)over, block, k < 2 && s % 2 };
                check(a, rows, sizes[s][1], NULL);
            }
}

/* One such number at each position of a matrix affects the result of its own part only. */
static void test_not_finite(void **state)
{
    enum { ROWS = 4, COLS = 35 };
    static const double bad[] = { NAN, INFINITY, -INFINITY };
    double x[ROWS * COLS];
    (void)state;
    for (int at = 0; at < ROWS * COLS; at += 17)
        for (int b = 0; b < 3; b++)
            for (int k = 0; k < 4; k++)
                for (int over = 0; over < 4; over++) {
                    for (int i = 0; i < ROWS * COLS; i++)
                        x[i] = i == at ? bad[b] : i % 7 - 3;
                    check((lm_reduce_attr){ kinds[k], (lm_reduce_over)over, 2, false }, ROWS, COLS,
                          x);
                }
}

/* A maximum that is negative, and one of zeros. */
static void test_maxima(void **state)
{
    double low[12], zeros[12] = { 0 };
    (void)state;
    for (int i = 0; i < 12; i++)
        low[i] = -1.5 - i;
    for (int over = 0; over < 4; over++)
        for (int k = 2; k < 4; k++) {
            check((lm_reduce_attr){ kinds[k], (lm_reduce_over)over, 2, false }, 4, 3, low);
            check((lm_reduce_attr){ kinds[k], (lm_reduce_over)over, 2, false }, 4, 3, zeros);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_shapes),
        cmocka_unit_test(test_not_finite),
        cmocka_unit_test(test_maxima),
    };
    return cmocka_run_group_tests_name("kernels_map", tests, NULL, NULL);
}
