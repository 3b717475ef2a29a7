/* SPDX-License-Identifier: Apache-2.0 */
/* Noise at every level against the definition, and its distribution. */
#include "kernel_case.h"

#include "kernels/noise.h"

enum { N = 100000 };
static const lm_step later = { .seed = 1234567890123, .step = 100003, .micro = 2 };

/* Counts that begin at each word of a Philox block. */
static void levels(void **state)
{
    (void)state;
    const int64_t counts[] = { 1, 3, 31, 33, 127, 1025, 40001 };
    for (int i = 0; i < 7; i++)
        for (int kind = 0; kind < 3; kind++)
            for (int s = 0; s < 3; s++) {
                lm_noise_attr a = { .amount = s == 2 ? 0.0 : 0.7,
                                    .kind = (lm_noise_kind)kind,
                                    .site = 5 };
                kernel_case k = { .op = "noise",
                                  .attr = &a,
                                  .tol_f32 = 2e-6,
                                  .tol_bf16 = 4e-3,
                                  .step = { .seed = 77, .step = s * 100003, .micro = s } };
                k.in[0] = k.out[0] = vec(ACT, counts[i]);
                check_case(&k);
                k.out[0] = over(k.out[0], 0);
                check_case(&k);
                /* two ranges of a piece of a whole */
                a.origin = (lm_origin){ .count = 3 * counts[i] + 14,
                                        .level = { { .period = counts[i] + 7,
                                                     .from0 = 2,
                                                     .count0 = counts[i] / 2,
                                                     .from1 = counts[i] / 2 + 5,
                                                     .count1 = (counts[i] + 1) / 2 } } };
                check_case(&k);
            }
}

/* y of N equal numbers x, by the best kernel or the definition. */
static void draw(double x, const lm_noise_attr *a, lm_cpu_level level, double *y)
{
    static double all[N];
    for (int i = 0; i < N; i++)
        all[i] = x;
    kernel_case k = { .op = "noise", .attr = a, .step = later };
    k.in[0] = given(vec(ACT, N), all);
    k.out[0] = vec(ACT, N);
    instance made;
    build(&k, LM_DTYPE_F32, LM_DTYPE_F32, &made);
    run(&made, lm_cpu_kernel("noise", LM_DTYPE_F32, level), NULL);
    for (int i = 0; i < N; i++)
        y[i] = (double)((float *)made.out[0].data)[i];
    drop(&k, &made);
}

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Kolmogorov and Smirnov's distance of sorted y to the normal distribution: 1.95 / sqrt(N) has a chance of 0.1 %. */
static double distance_to_normal(const double *y)
{
    double most = 0;
    for (int i = 0; i < N; i++) {
        const double at = 0.5 * erfc(-y[i] * M_SQRT1_2);
        most = fmax(most, fmax(fabs(at - i / (double)N), fabs((i + 1) / (double)N - at)));
    }
    return most;
}

static void added_is_normal(void **state)
{
    (void)state;
    static double y[N], want[N];
    const lm_noise_attr a = { .amount = 1, .kind = LM_NOISE_ADDED, .site = 3 };
    draw(0, &a, lm_cpu_detect(), y);
    draw(0, &a, LM_CPU_REF, want);
    double sum = 0, squares = 0;
    for (int i = 0; i < N; i++) {
        assert_true(fabs(y[i] - want[i]) <= 2e-6 * (1 + fabs(want[i]))); /* tails too */
        sum += y[i];
        squares += y[i] * y[i];
    }
    assert_true(fabs(sum / N) < 0.012); /* nearly four deviations */
    assert_true(fabs(squares / N - 1) < 0.018);
    qsort(y, N, sizeof *y, by_value);
    assert_true(y[0] < -3.7 && y[N - 1] > 3.7);
    assert_true(distance_to_normal(y) < 1.95 / sqrt(N));
}

/* 2 (1 + a (2 u - 1)), u even in (0, 1). */
static void scaled_is_even(void **state)
{
    (void)state;
    static double y[N];
    const lm_noise_attr a = { .amount = 0.25, .kind = LM_NOISE_SCALED, .site = 3 };
    draw(2, &a, lm_cpu_detect(), y);
    qsort(y, N, sizeof *y, by_value);
    double most = 0;
    for (int i = 0; i < N; i++)
        most = fmax(most, fabs((y[i] - 1.5) - i / (double)N));
    assert_true(y[0] >= 1.5 && y[N - 1] <= 2.5);
    assert_true(most < 1.95 / sqrt(N) + 1.0 / N);
}

/* The noise that is added to 0, times each number. */
static void weighed_is_normal(void **state)
{
    (void)state;
    static double y[N], n[N];
    const lm_noise_attr added = { .amount = 1, .kind = LM_NOISE_ADDED, .site = 3 },
                        weighed = { .amount = 0.5, .kind = LM_NOISE_WEIGHED, .site = 3 };
    draw(0, &added, lm_cpu_detect(), n);
    draw(3, &weighed, lm_cpu_detect(), y);
    for (int i = 0; i < N; i++)
        assert_true(fabs(y[i] - 1.5 * n[i]) <= 1e-6 * fabs(n[i]));
}

/* Sites, steps, micro-batches and seeds have draws of their own. */
static void streams_differ(void **state)
{
    (void)state;
    static double y[N], z[N];
    lm_noise_attr a = { .amount = 1, .kind = LM_NOISE_ADDED, .site = 3 };
    draw(0, &a, lm_cpu_detect(), y);
    a.site = 4;
    draw(0, &a, lm_cpu_detect(), z);
    double product = 0;
    for (int i = 0; i < N; i++)
        product += y[i] * z[i];
    assert_true(fabs(product / N) < 0.0125);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(levels),         cmocka_unit_test(added_is_normal),
        cmocka_unit_test(scaled_is_even), cmocka_unit_test(weighed_is_normal),
        cmocka_unit_test(streams_differ),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
