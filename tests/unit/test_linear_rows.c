/* SPDX-License-Identifier: Apache-2.0 */
/* The bits of a row of a linear layer depend on the number of rows by its class alone (kernels/linear.h): few rows, up
 * to LM_GEMM_SMALL_M, and more; at every level, for every type, depth and width. */
#include "kernel_case.h"
#include "kernels/linear.h"

enum { MOST = 320 };

static const int64_t counts[] = { 1,  2,  3,  4,  5,  7,  8,  9,  12,  15,  16,  17,  24,
                                  31, 32, 33, 48, 63, 64, 65, 96, 128, 200, 256, 272, MOST };
enum { COUNTS = sizeof counts / sizeof *counts };

/* Rows of x [MOST,K] times w^T [M,K] in F32, `count` of them from `from` on. */
static void multiply(const lm_kernel *k, const lm_tensor *x, const lm_tensor *w, const lm_tensor *b,
                     int64_t from, int64_t count, int threads, float *y)
{
    static const lm_step step = { 0 };
    const lm_linear_attr attr = { LM_ACC_FIRST };
    int64_t K = x->dim[1], M = w->dim[0];
    lm_tensor in[3] = { *x, *w, *b };
    lm_tensor out[1] = { { .data = y, .dtype = LM_DTYPE_F32, .ndim = 2, .dim = { count, M } } };
    in[0].data = (char *)x->data + (size_t)(from * K) * lm_dtype_size(x->dtype);
    in[0].dim[0] = count;
    lm_call c = { .attr = &attr, .in = in, .n_in = 3, .out = out, .n_out = 1, .step = &step };
    c.par = pool_of(threads);
    size_t bytes = k->work ? k->work(&c, lm_par_threads(c.par)) : 0;
    c.work = take(bytes);
    k->run(&c);
    lm_free(c.work);
}

static lm_tensor drawn(lm_dtype d, int ndim, int64_t rows, int64_t cols, int which)
{
    lm_tensor t = { .dtype = d, .ndim = ndim, .dim = { rows, cols } };
    operand o = { .kind = ACT };
    t.data = take(bytes_of(&t));
    for (int64_t i = 0; i < lm_tensor_count(&t); i++)
        lm_set(d, t.data, i, value_at(&o, which, i));
    return t;
}

static void check_shape(lm_dtype act, int level, int64_t M, int64_t K)
{
    const lm_kernel *k = lm_cpu_kernel("linear", act, (lm_cpu_level)level);
    if (k->level != level)
        return;
    lm_tensor x = drawn(act, 2, MOST, K, 1), w = drawn(act, 2, M, K, 2),
              b = drawn(LM_DTYPE_F32, 1, M, 1, 3);
    size_t row = (size_t)M * sizeof(float);
    float *few = take(MOST * row), *many = take(MOST * row), *y = take(MOST * row);
    for (int64_t i = 0; i < MOST; i++)
        multiply(k, &x, &w, &b, i, 1, 1, few + i * M);
    multiply(k, &x, &w, &b, 0, MOST, 1, many);
    for (int i = 0; i < COUNTS; i++) {
        int64_t n = counts[i], from = (i * 37) % (MOST - n + 1);
        const float *want = n <= LM_GEMM_SMALL_M ? few : many;
        multiply(k, &x, &w, &b, from, n, 1 + i % 3, y);
        for (int64_t r = 0; r < n; r++)
            if (memcmp(y + r * M, want + (from + r) * M, row))
                fail_msg("%s %s, K %d, M %d: other bits in row %d of %d", lm_dtype_name(act),
                         lm_cpu_level_name((lm_cpu_level)level), (int)K, (int)M, (int)r, (int)n);
    }
    lm_tensor *all[] = { &x, &w, &b };
    for (int i = 0; i < 3; i++)
        lm_free(all[i]->data);
    lm_free(few);
    lm_free(many);
    lm_free(y);
}

static void two_classes(void **state)
{
    static const int64_t depths[] = { 7, 64, 200, 256, 1000, 2048, 5632 },
                         widths[] = { 5, 83, 320 };
    (void)state;
    for (int level = LM_CPU_AVX2; level <= (int)lm_cpu_detect(); level++)
        for (int d = 0; d < 7; d++)
            for (int m = 0; m < 3; m++)
                for (int bf = 0; bf < 2; bf++)
                    if (depths[d] < 2000 || m == d % 3)
                        check_shape(bf ? LM_DTYPE_BF16 : LM_DTYPE_F32, level, widths[m], depths[d]);
}

/* Wide products, in which the threads share the columns in other ways. */
static void wide(void **state)
{
    (void)state;
    for (int level = LM_CPU_AVX2; level <= (int)lm_cpu_detect(); level++)
        for (int bf = 0; bf < 2; bf++)
            check_shape(bf ? LM_DTYPE_BF16 : LM_DTYPE_F32, level, 1100, 300);
}

/* The definition sums in double, in one order. */
static void definition(void **state)
{
    (void)state;
    check_shape(LM_DTYPE_F32, LM_CPU_REF, 5, 64);
    check_shape(LM_DTYPE_BF16, LM_CPU_REF, 5, 64);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(two_classes),
        cmocka_unit_test(wide),
        cmocka_unit_test(definition),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
