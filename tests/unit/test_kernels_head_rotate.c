/* SPDX-License-Identifier: Apache-2.0 */
/* The rotation of heads at every level against the definition, and its properties. */
#include "kernel_case.h"

#include "kernels/kv.h"

static kernel_case case_of(const lm_head_rotate_attr *a, int64_t n)
{
    int64_t c = (a->heads + 2 * a->kv_heads) * a->head_dim;
    kernel_case k = { .op = "head_rotate", .attr = a, .tol_f32 = 1e-6, .tol_bf16 = 4e-3 };
    k.in[0] = mat(ACT, n, c);
    k.out[0] = mat(ACT, n, c);
    return k;
}

static void all_shapes(void **state)
{
    const int64_t dims[] = {
        1, 2, 4, 6, 8, 16, 20, 24, 32, 48, 64, 80, 96, 128, 192, 256, 512, 1024
    };
    (void)state;
    for (size_t i = 0; i < sizeof dims / sizeof *dims; i++)
        for (unsigned flags = 0; flags < 8; flags++) {
            lm_head_rotate_attr a = { 3,         flags == 1 ? 0 : 2, dims[i], flags & 1,
                                      flags & 2, flags & 4,          0 };
            kernel_case k = case_of(&a, dims[i] > 100 ? 3 : 19);
            check_case(&k);
            k.out[0] = over(k.out[0], 0);
            check_case(&k);
        }
}

/* Twice is nothing, lengths stay, and no row knows the others: on every level. */
static void undoes_itself(void **state)
{
    const lm_kernel *kernel;
    (void)state;
    for (int i = 0; (kernel = lm_cpu_kernel_at(i)); i++) {
        if (strcmp(kernel->op, "head_rotate") || kernel->level > (int)lm_cpu_detect() ||
            kernel->act == LM_DTYPE_BF16)
            continue;
        lm_head_rotate_attr a = { 2, 1, 96, true, true, true, 0 };
        kernel_case k = case_of(&a, 5), l = k;
        instance x, y;
        build(&k, LM_DTYPE_F32, LM_DTYPE_F32, &x);
        run(&x, kernel, pool_of(1));
        assert_true(distance(&x.out[0], &x.in[0]) > 0.5);
        double before = 0, after = 0;
        for (int64_t d = 0; d < 32; d++) { /* blocks of 32 */
            before += pow(lm_get(LM_DTYPE_F32, x.in[0].data, 64 + d), 2);
            after += pow(lm_get(LM_DTYPE_F32, x.out[0].data, 64 + d), 2);
        }
        assert_true(fabs(before - after) < 1e-5 * before);
        build(&l, LM_DTYPE_F32, LM_DTYPE_F32, &y);
        memcpy(y.in[0].data, x.out[0].data, bytes_of(&y.in[0]));
        run(&y, kernel, pool_of(1));
        assert_true(distance(&y.out[0], &x.in[0]) < 1e-6);
        drop(&k, &x);
        drop(&l, &y);
    }
}

/* Four numbers, in Sylvester's order. */
static void by_hand(void **state)
{
    static const double x[4] = { 1, 2, 3, 4 }, want[4] = { 5, -1, -2, 0 };
    lm_head_rotate_attr a = { 1, 0, 4, true, false, false, 0 };
    kernel_case k = case_of(&a, 1);
    const lm_kernel *kernel;
    (void)state;
    k.in[0] = given(k.in[0], x);
    for (int i = 0; (kernel = lm_cpu_kernel_at(i)); i++) {
        if (strcmp(kernel->op, "head_rotate") || kernel->level > (int)lm_cpu_detect() ||
            kernel->act == LM_DTYPE_BF16)
            continue;
        instance y;
        build(&k, LM_DTYPE_F32, LM_DTYPE_F32, &y);
        run(&y, kernel, pool_of(1));
        for (int d = 0; d < 4; d++)
            assert_true(lm_get(LM_DTYPE_F32, y.out[0].data, d) == want[d]);
        drop(&k, &y);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(all_shapes),
        cmocka_unit_test(undoes_itself),
        cmocka_unit_test(by_hand),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
