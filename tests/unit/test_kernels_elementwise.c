/* SPDX-License-Identifier: Apache-2.0 */
/* Activations, sums, dropout, casts and row selection at every level against the definition. */
#include "kernel_case.h"

#include "kernels/elementwise.h"

static const int64_t widths[] = { 1, 3, 31, 33, 127, 1025 };

static void activations(void **state)
{
    (void)state;
    for (int w = 0; w < 6; w++) {
        for (int exact = 0; exact < 2; exact++) {
            lm_gelu_attr a = { exact };
            kernel_case k = { .op = "gelu", .attr = &a, .tol_f32 = 1e-6, .tol_bf16 = 4e-3 };
            k.in[0] = k.out[0] = mat(ACT, 33, widths[w]);
            check_case(&k);
            k.op = "gelu_dx";
            k.in[1] = k.in[0];
            check_case(&k);
            k.out[0] = over(k.out[0], 0);
            check_case(&k);
        }
        for (int gelu = 0; gelu < 2; gelu++) {
            kernel_case s = { .tol_f32 = 1e-6, .tol_bf16 = 4e-3 };
            s.op = gelu ? "geglu" : "swiglu";
            s.in[0] = mat(ACT, 33, 2 * widths[w]);
            s.out[0] = mat(ACT, 33, widths[w]);
            check_case(&s);
            s.op = gelu ? "geglu_dx" : "swiglu_dx";
            s.in[1] = s.out[0] = s.in[0];
            s.in[0] = mat(ACT, 33, widths[w]);
            check_case(&s);
        }
        lm_soft_cap_attr cap = { 1.5 };
        kernel_case c = { .op = "soft_cap", .attr = &cap, .tol_f32 = 1e-6, .tol_bf16 = 4e-3 };
        c.in[0] = c.out[0] = mat(ACT, 33, widths[w]);
        check_case(&c);
        c.op = "soft_cap_dx";
        c.in[1] = c.in[0];
        check_case(&c);
        kernel_case add = { .op = "add", .tol_f32 = 1e-6, .tol_bf16 = 4e-3 };
        add.in[0] = add.in[1] = add.out[0] = mat(ACT, 33, widths[w]);
        check_case(&add);
        add.out[0] = over(add.out[0], w % 2);
        check_case(&add);
    }
}

/* The whole range, far tails, NaN and infinities, element by element: an L2 norm would hide errors
 * in the tails. */
static void activations_everywhere(void **state)
{
    (void)state;
    enum { N = 4001 };
    static double x[N], g[N];
    for (int i = 0; i < N; i++) {
        x[i] = (float)((i - N / 2) * 0.006);
        g[i] = 1;
    }
    x[0] = NAN, x[1] = INFINITY, x[2] = 1e30, x[3] = 300, x[4] = -300, x[5] = 0;
    for (int v = 0; v < 4; v++) {
        lm_gelu_attr a = { v & 1 };
        kernel_case k = { .op = v & 2 ? "gelu_dx" : "gelu", .attr = &a };
        k.in[v & 2 ? 1 : 0] = given(vec(ACT, N), x);
        if (v & 2)
            k.in[0] = given(vec(ACT, N), g);
        k.out[0] = vec(ACT, N);
        instance want;
        build(&k, LM_DTYPE_F64, LM_DTYPE_F32, &want);
        run(&want, lm_cpu_kernel(k.op, LM_DTYPE_F64, LM_CPU_REF), NULL);
        for (int level = LM_CPU_AVX2; level <= (int)lm_cpu_detect(); level++) {
            instance got;
            build(&k, LM_DTYPE_F32, LM_DTYPE_F32, &got);
            run(&got, lm_cpu_kernel(k.op, LM_DTYPE_F32, (lm_cpu_level)level), NULL);
            for (int i = 0; i < N; i++) {
                double a1 = ((float *)got.out[0].data)[i], b1 = ((double *)want.out[0].data)[i];
                if (v & 2 && !isfinite(x[i] * x[i] * (float)x[i]))
                    continue; /* inf * 0 in the derivative of the definition */
                if (isnan(a1) && isnan(b1))
                    continue;
                if (!(a1 == b1 || fabs(a1 - b1) <= 3e-6 * fabs(b1) + 3e-7))
                    fail_msg("%s exact=%d x=%g: %.9g, expected %.9g", k.op, v & 1, x[i], a1, b1);
            }
            drop(&k, &got);
        }
        drop(&k, &want);
    }
}

/* Vector and scalar code draw the same numbers, for any offset of the first one in its Philox
 * block. */
static void dropout(void **state)
{
    (void)state;
    const int64_t counts[] = { 1, 3, 31, 33, 127, 1025, 40001 };
    for (int i = 0; i < 7; i++) {
        for (int s = 0; s < 3; s++) {
            lm_dropout_attr a = { .p = s == 2 ? 0.0 : 0.3, .site = 5 };
            kernel_case k = { .op = "dropout",
                              .attr = &a,
                              .tol_f32 = 1e-6,
                              .tol_bf16 = 4e-3,
                              .step = { .seed = 1234567890123, .step = s * 100003, .micro = s } };
            k.in[0] = k.out[0] = vec(ACT, counts[i]);
            check_case(&k);
            k.out[0] = over(k.out[0], 0);
            check_case(&k);
        }
    }
}

/* The low word of the block counter wraps inside this tensor: (255 * 2^16 + 49167) * 1025 < 2^34 <
 * ... + 1025. */
static void dropout_over_a_wrap(void **state)
{
    (void)state;
    lm_dropout_attr a = { .p = 0.5, .site = 0 };
    kernel_case k = { .op = "dropout",
                      .attr = &a,
                      .tol_f32 = 1e-6,
                      .tol_bf16 = 4e-3,
                      .step = { .seed = 9, .step = 255, .micro = 49167 } };
    k.in[0] = k.out[0] = vec(ACT, 1025);
    check_case(&k);
}

/* 1,024 draws per run, 2^16 runs per step: the index of step 2^38 is 2^64. */
static void dropout_beyond_the_counter(void **state)
{
    (void)state;
    enum { N = 1024 };
    static const int64_t steps[] = { 0, INT64_C(1) << 38, INT64_C(1) << 39,
                                     (INT64_C(1) << 38) - 1 };
    lm_dropout_attr a = { .p = 0.5, .site = 3 };
    instance x[4];
    kernel_case k = { .op = "dropout", .attr = &a, .tol_f32 = 1e-6, .tol_bf16 = 4e-3 };
    k.in[0] = k.out[0] = vec(ACT, N);
    for (int i = 0; i < 4; i++) {
        k.step = (lm_step){ .seed = 9, .step = steps[i] };
        check_case(&k);
        build(&k, LM_DTYPE_F32, LM_DTYPE_F32, &x[i]);
        run(&x[i], lm_cpu_kernel("dropout", LM_DTYPE_F32, lm_cpu_detect()), NULL);
        for (int m = 0; m < i; m++) {
            int same = 0;
            for (int j = 0; j < N; j++)
                same +=
                    (((float *)x[m].out[0].data)[j] == 0) == (((float *)x[i].out[0].data)[j] == 0);
            assert_in_range(same, N / 2 - 96, N / 2 + 96); /* six deviations */
        }
    }
    for (int i = 0; i < 4; i++)
        drop(&k, &x[i]);
}

/* Parts of parts: what ranks keep is what the whole keeps there.  Of each piece of 12 rows, 0 to 2 and 9 to 11; of these rows the
 * second half; of these columns 7 to 49. */
static void dropout_of_a_part(void **state)
{
    (void)state;
    enum { ROWS = 24, COLS = 57, FIRST = 7, WIDTH = 43 };
    static const int rows[] = { 12, 13, 14, 21, 22, 23 };
    enum { N = 6 * WIDTH };
    static double ones[ROWS * COLS];
    lm_dropout_attr a = { .p = 0.4, .site = 2 };
    kernel_case k = { .op = "dropout", .attr = &a, .tol_f32 = 1e-6, .tol_bf16 = 4e-3 };
    instance whole, part;
    for (int i = 0; i < ROWS * COLS; i++)
        ones[i] = 1;
    k.step = (lm_step){ .seed = 11, .step = 3, .micro = 1 };
    k.in[0] = given(vec(ACT, ROWS * COLS), ones);
    k.out[0] = vec(ACT, ROWS * COLS);
    build(&k, LM_DTYPE_F32, LM_DTYPE_F32, &whole);
    run(&whole, lm_cpu_kernel("dropout", LM_DTYPE_F32, lm_cpu_detect()), NULL);
    a.origin =
        (lm_origin){ .count = ROWS * COLS,
                     .level = { { .period = 12 * COLS,
                                  .count0 = 3 * COLS,
                                  .from1 = 9 * COLS,
                                  .count1 = 3 * COLS },
                                { .period = 12 * COLS, .from0 = 6 * COLS, .count0 = 6 * COLS },
                                { .period = COLS, .from0 = FIRST, .count0 = WIDTH } } };
    k.in[0] = given(vec(ACT, N), ones);
    k.out[0] = vec(ACT, N);
    check_case(&k);
    build(&k, LM_DTYPE_F32, LM_DTYPE_F32, &part);
    run(&part, lm_cpu_kernel("dropout", LM_DTYPE_F32, lm_cpu_detect()), NULL);
    for (int i = 0; i < N; i++)
        assert_true(((float *)part.out[0].data)[i] ==
                    ((float *)whole.out[0].data)[rows[i / WIDTH] * COLS + FIRST + i % WIDTH]);
    drop(&k, &part);
    drop(&k, &whole);
}

static void dropout_keeps_the_mean(void **state)
{
    (void)state;
    enum { N = 100000 };
    static double ones[N];
    for (int i = 0; i < N; i++)
        ones[i] = 1;
    lm_dropout_attr a = { .p = 0.25, .site = 1 };
    kernel_case k = { .op = "dropout", .attr = &a };
    k.in[0] = given(vec(ACT, N), ones);
    k.out[0] = vec(ACT, N);
    instance x;
    build(&k, LM_DTYPE_F32, LM_DTYPE_F32, &x);
    run(&x, lm_cpu_kernel("dropout", LM_DTYPE_F32, lm_cpu_detect()), NULL);
    double sum = 0;
    int64_t dropped = 0;
    for (int i = 0; i < N; i++) {
        sum += ((float *)x.out[0].data)[i];
        dropped += ((float *)x.out[0].data)[i] == 0;
    }
    assert_true(fabs(sum / N - 1) < 0.01);
    assert_true(llabs(dropped - N / 4) < 700); /* five deviations */
    drop(&k, &x);
}

static void casts(void **state)
{
    (void)state;
    enum { N = 70000 };
    const lm_dtype types[] = { LM_DTYPE_F64, LM_DTYPE_F32, LM_DTYPE_BF16, LM_DTYPE_F16 };
    static char src[N * 8], got[N * 8 + 8], want[N * 8];
    for (int from = 0; from < 4; from++) {
        for (int64_t i = 0; i < N; i++)
            lm_set(types[from], src, i, i < 65536 ? lm_bf16_to_f32((uint16_t)i) * 1.001 : 0.1);
        for (int to = 0; to < 4; to++) {
            for (int level = 0; level <= (int)lm_cpu_detect(); level++) {
                int64_t n = N - 5;
                lm_tensor in = { .data = src, .dtype = types[from], .ndim = 1, .dim = { n } };
                lm_tensor out = { .data = got, .dtype = types[to], .ndim = 1, .dim = { n } };
                lm_call c = { .in = &in, .n_in = 1, .out = &out, .n_out = 1, .par = pool_of(2) };
                size_t bytes = (size_t)n * lm_dtype_size(types[to]);
                memset(got, 0x5a, sizeof got);
                lm_cpu_kernel("cast", LM_DTYPE_BF16, (lm_cpu_level)level)->run(&c);
                lm_convert(types[from], src, types[to], want, n);
                for (int64_t i = 0; i < n; i++) {
                    double a = lm_get(types[to], got, i), b = lm_get(types[to], want, i);
                    assert_true((isnan(a) && isnan(b)) || a == b);
                }
                assert_int_equal(got[bytes], 0x5a);
            }
        }
    }
}

static void row_selection(void **state)
{
    (void)state;
    for (int w = 0; w < 6; w++) {
        kernel_case k = { .op = "rows" };
        k.in[0] = mat(ACT, 17, widths[w]);
        k.in[1] = filled(vec(I32, 40), IDS, 17);
        k.out[0] = mat(ACT, 40, widths[w]);
        check_case(&k);
    }
}

static void check_unary(const char *fwd, const char *bwd, const void *attr, int64_t in_cols,
                        int64_t out_cols)
{
    kernel_case f = { .op = fwd, .attr = attr }, b = { .op = bwd, .attr = attr };
    f.in[0] = mat(ACT, 3, in_cols);
    f.out[0] = mat(ACT, 3, out_cols);
    instance x, y;
    build(&f, LM_DTYPE_F64, LM_DTYPE_F64, &x);
    b.in[0] = mat(ACT, 3, out_cols);
    b.in[1] = given(mat(ACT, 3, in_cols), x.in[0].data);
    b.out[0] = mat(ACT, 3, in_cols);
    build(&b, LM_DTYPE_F64, LM_DTYPE_F64, &y);
    run(&y, lm_cpu_kernel(bwd, LM_DTYPE_F64, LM_CPU_REF), NULL);
    check_slope(&f, 0, 0, &y.in[0], &y.out[0]);
    drop(&f, &x);
    drop(&b, &y);
}

static void gradients(void **state)
{
    (void)state;
    lm_gelu_attr tanh_form = { false }, exact = { true };
    check_unary("gelu", "gelu_dx", &tanh_form, 10, 10);
    check_unary("gelu", "gelu_dx", &exact, 10, 10);
    check_unary("swiglu", "swiglu_dx", NULL, 14, 7);
    check_unary("geglu", "geglu_dx", NULL, 14, 7);
    check_unary("soft_cap", "soft_cap_dx", &(lm_soft_cap_attr){ 0.7 }, 10, 10);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(activations),
        cmocka_unit_test(activations_everywhere),
        cmocka_unit_test(dropout),
        cmocka_unit_test(dropout_over_a_wrap),
        cmocka_unit_test(dropout_beyond_the_counter),
        cmocka_unit_test(dropout_of_a_part),
        cmocka_unit_test(dropout_keeps_the_mean),
        cmocka_unit_test(casts),
        cmocka_unit_test(row_selection),
        cmocka_unit_test(gradients),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
