/* SPDX-License-Identifier: Apache-2.0 */
/* Rotary embedding at every level against the definition. */
#include "kernel_case.h"

#include "kernels/rope.h"

enum { PLACES = 40 };

/* Table of [PLACES, r]: cosines, then sines, of any angles. */
static const double *table_of(int64_t r)
{
    static double table[PLACES * 128];
    for (int64_t p = 0; p < PLACES; p++) {
        for (int64_t j = 0; j < r / 2; j++) {
            double angle = (double)p * pow(100.0, -2.0 * (double)j / (double)r);
            table[p * r + j] = cos(angle);
            table[p * r + r / 2 + j] = sin(angle);
        }
    }
    return table;
}

static kernel_case case_of(const lm_rope_attr *a, int64_t n)
{
    int64_t c = (a->heads + 2 * a->kv_heads) * a->head_dim;
    kernel_case k = { .op = "rope", .attr = a, .tol_f32 = 1e-6, .tol_bf16 = 4e-3 };
    k.in[0] = mat(ACT, n, c);
    k.in[1] = filled(vec(I32, n), IDS, PLACES);
    k.in[2] = given(mat(F32, PLACES, a->rotary_dim), table_of(a->rotary_dim));
    k.out[0] = mat(ACT, n, c);
    return k;
}

static void all_shapes(void **state)
{
    (void)state;
    const int64_t dims[][2] = { { 2, 2 },   { 6, 6 },     { 62, 62 }, { 64, 64 },
                                { 64, 16 }, { 128, 128 }, { 66, 34 } };
    for (int i = 0; i < 7; i++) {
        for (int64_t n = 1; n < 140; n = 3 * n + 1) {
            for (int inverse = 0; inverse < 2; inverse++) {
                lm_rope_attr a = { 3, 1, dims[i][0], dims[i][1], inverse };
                kernel_case k = case_of(&a, n);
                check_case(&k);
                k.out[0] = over(k.out[0], 0);
                check_case(&k);
            }
        }
    }
}

/* A rotation keeps lengths, and the inverse undoes it. */
static void inverse_undoes(void **state)
{
    (void)state;
    lm_rope_attr a = { 2, 1, 8, 8, false }, b = a;
    b.inverse = true;
    kernel_case k = case_of(&a, 5), l = case_of(&b, 5);
    instance x, y;
    build(&k, LM_DTYPE_F64, LM_DTYPE_F64, &x);
    run(&x, lm_cpu_kernel("rope", LM_DTYPE_F64, LM_CPU_REF), NULL);
    assert_true(distance(&x.out[0], &x.in[0]) > 0.1);
    l.in[0] = given(l.in[0], x.out[0].data);
    build(&l, LM_DTYPE_F64, LM_DTYPE_F64, &y);
    run(&y, lm_cpu_kernel("rope", LM_DTYPE_F64, LM_CPU_REF), NULL);
    assert_true(distance(&y.out[0], &x.in[0]) < 1e-7); /* the table is F32 */
    drop(&k, &x);
    drop(&l, &y);
}

static void gradient(void **state)
{
    (void)state;
    lm_rope_attr a = { 2, 1, 8, 6, false }, b = a;
    b.inverse = true;
    kernel_case k = case_of(&a, 5), l = case_of(&b, 5);
    instance y;
    build(&l, LM_DTYPE_F64, LM_DTYPE_F64, &y);
    run(&y, lm_cpu_kernel("rope", LM_DTYPE_F64, LM_CPU_REF), NULL);
    check_slope(&k, 0, 0, &y.in[0], &y.out[0]);
    drop(&l, &y);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(all_shapes),
        cmocka_unit_test(inverse_undoes),
        cmocka_unit_test(gradient),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
