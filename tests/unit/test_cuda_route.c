/* SPDX-License-Identifier: Apache-2.0 */
/* Routing on the CUDA backend at sizes beyond the registry's examples: many chunks and blocks, many
 * experts, capacities of each policy, rows of all types. */
#include "cuda_case.h"

#include "kernels/route.h"

/* ---- choices ---- */

static const struct {
    int64_t T, E;
    bool bias;
    lm_route_attr a;
} gates[] = {
    { 3000, 8, false, { .k = 2, .scale = 1, .normalise = true } },
    { 600,
      256,
      true,
      { .k = 8, .scale = 2.5, .sigmoid = true, .normalise = true, .groups = 8, .kept_groups = 4 } },
    { 12, 4096, false, { .k = 8, .scale = 1, .groups = 4, .kept_groups = 2, .group_max = true } },
    { 700, 5, false, { .k = 2, .scale = 1, .second_random = true, .site = 3 } },
    { 2500, 16, false, { .k = 4, .scale = 1, .capacity = 500 } },
    { 900, 16, true, { .k = 4, .scale = 1, .capacity = 1 } },
    { 1300,
      12,
      false,
      { .k = 3,
        .scale = 1,
        .normalise = true,
        .capacity = 200,
        .policy = LM_OVERFLOW_PROBABILITY } },
    { 900, 12, true, { .k = 3, .scale = 1, .capacity = 230, .policy = LM_OVERFLOW_REROUTE } },
    { 1500, 9, false, { .k = 9, .scale = 2, .by_expert = true, .capacity = 200 } },
};

static void test_choices(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof gates / sizeof *gates; i++) {
        int64_t T = gates[i].T, E = gates[i].E, K = gates[i].a.k;
        kernel_case k = { .op = "route_choose",
                          .attr = &gates[i].a,
                          .in = { mat(F32, T, E), gates[i].bias ? vec(F32, E) : vec(ABSENT, 0) },
                          .out = { mat(F32, T, K), mat(I32, T, K) },
                          .step = { .seed = 5, .step = 2, .micro = 1 } };
        check_on_device(&k, LM_DTYPE_F32, 2e-6, (int)(i % 2), true);
    }
}

/* Choices of the reference, some dropped, and their gradient. */
static void test_gradients(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof gates / sizeof *gates; i++) {
        int64_t T = gates[i].T, E = gates[i].E, K = gates[i].a.k;
        kernel_case k = { .op = "route_choose",
                          .attr = &gates[i].a,
                          .in = { mat(F32, T, E), gates[i].bias ? vec(F32, E) : vec(ABSENT, 0) },
                          .out = { mat(F32, T, K), mat(I32, T, K) } };
        instance x;
        build(&k, LM_DTYPE_F64, LM_DTYPE_F32, &x);
        run(&x, lm_cpu_kernel(k.op, LM_DTYPE_F64, LM_CPU_REF), NULL);
        kernel_case dz = { .op = "route_choose_dz",
                           .attr = &gates[i].a,
                           .in = { k.in[0], given(mat(I32, T, K), x.out[1].data), mat(F32, T, K) },
                           .out = { mat(F32, T, E) } };
        check_on_device(&dz, LM_DTYPE_F32, 1e-5, 0, true);
        drop(&k, &x);
    }
}

/* Rows with a number that is not finite. */
static void test_not_finite(void **state)
{
    enum { T = 60, E = 20, K = 3 };
    static const double bad[] = { NAN, INFINITY, -INFINITY };
    static double z[T * E];
    lm_route_attr a = { .k = K, .scale = 1, .normalise = true, .groups = 4, .kept_groups = 2 };
    kernel_case k = { .op = "route_choose",
                      .attr = &a,
                      .in = { given(mat(F32, T, E), z) },
                      .out = { mat(F32, T, K), mat(I32, T, K) } };
    (void)state;
    for (int i = 0; i < T * E; i++)
        z[i] = i % E == i / E % E && i / E % 3 ? bad[i / E % 9 / 3] : (double)(i * 37 % 101) / 20;
    for (int policy = 0; policy < 4; policy++) {
        a.capacity = policy ? 8 : 0;
        a.policy = (lm_overflow)(policy % 3);
        check_on_device(&k, LM_DTYPE_F32, 2e-6, 0, true);
    }
}

/* ---- rows ---- */

static void test_plans(void **state)
{
    static const int64_t sizes[][4] = { { 5000, 8, 33, 0 },
                                        { 20000, 2, 8, 0 },
                                        { 700, 4, 4096, 0 },
                                        { 700, 4, 64, 50 },
                                        { 1, 1, 1, 0 } };
    (void)state;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        int64_t T = sizes[i][0], K = sizes[i][1], E = sizes[i][2], pad = sizes[i][3];
        lm_route_plan_attr a = { E, pad };
        kernel_case k = { .op = "route_plan",
                          .attr = &a,
                          .in = { filled(mat(I32, T, K), IDS, -E) },
                          .out = { vec(I32, E + 1), vec(I32, pad ? E * pad : T * K),
                                   mat(I32, T, K) } };
        check_on_device(&k, LM_DTYPE_F32, 0, 0, true);
    }
}

/* Any assignment and any row, also several times: the kernels read one list each. */
static void test_moves(void **state)
{
    static const int64_t sizes[][4] = { { 300, 4, 900, 256 }, { 77, 3, 200, 41 }, { 9, 1, 5, 8 } };
    static const lm_dtype acts[] = { LM_DTYPE_F32, LM_DTYPE_BF16, LM_DTYPE_F16 };
    (void)state;
    for (int i = 0; i < 9; i++) {
        int64_t T = sizes[i / 3][0], K = sizes[i / 3][1], R = sizes[i / 3][2], C = sizes[i / 3][3];
        lm_dtype act = acts[i % 3];
        double tol = act == LM_DTYPE_F32 ? 2e-6 : 4e-3;
        operand from = filled(vec(I32, R), IDS, -T * K), place = filled(mat(I32, T, K), IDS, -R);
        operand weight = i % 2 ? mat(F32, T, K) : vec(ABSENT, 0);
        kernel_case rows = { .op = "route_rows",
                             .in = { mat(ACT, T, C), from, place, weight },
                             .out = { mat(ACT, R, C) } };
        kernel_case sum = { .op = "route_sum",
                            .in = { mat(ACT, R, C), from, place, weight },
                            .out = { mat(ACT, T, C) } };
        kernel_case dot = { .op = "route_dot",
                            .in = { mat(ACT, T, C), mat(ACT, R, C), from, place },
                            .out = { mat(F32, T, K) } };
        check_on_device(&rows, act, i % 2 ? tol : 0, i % 2, true);
        check_on_device(&sum, act, tol, i % 2, true);
        check_on_device(&dot, act, 2e-6, i % 2, true);
    }
}

/* ---- losses ---- */

static void test_losses(void **state)
{
    static const lm_route_aux_attr losses[] = {
        { .balance = 1 },
        { .sigmoid = true,
          .balance = 0.5,
          .sequence = 0.25,
          .z = 0.1,
          .seq = 100,
          .by_expert = true },
        { .sequence = 1, .seq = 300 },
        { .sigmoid = true, .z = 1, .affinity = 0.5, .nodes = 7 },
    };
    (void)state;
    for (int i = 0; i < 4; i++)
        for (int64_t E = 7; E < 400; E *= 7) {
            kernel_case k = { .op = "route_aux",
                              .attr = &losses[i],
                              .in = { mat(F32, 900, E), filled(mat(I32, 900, 3), IDS, -E) },
                              .out = { vec(F32, 1), vec(F32, E), vec(F32, E), vec(F32, 1) } };
            check_on_device(&k, LM_DTYPE_F32, 2e-6, 0, true);
            k.in[2] = vec(F32, E);
            check_on_device(&k, LM_DTYPE_F32, 2e-6, 0, true);
            k.op = "route_aux_dz";
            k.in[2] = vec(F32, 1);
            k.out[0] = mat(F32, 900, E);
            k.out[1] = k.out[2] = k.out[3] = vec(ABSENT, 0);
            check_on_device(&k, LM_DTYPE_F32, 1e-5, 0, true);
            k.in[3] = vec(F32, E);
            check_on_device(&k, LM_DTYPE_F32, 1e-5, 0, true);
        }
}

/* The mean probability is NaN for the experts alone whose logits are not finite. */
static void test_losses_not_finite(void **state)
{
    enum { T = 200, E = 40 };
    static double z[T * E];
    (void)state;
    for (int i = 0; i < T * E; i++)
        z[i] = (double)(i * 37 % 1009) / 512;
    z[5] = INFINITY;
    z[70 * E + 39] = -INFINITY;
    z[199 * E + 5] = NAN;
    for (int i = 0; i < 2; i++) {
        const lm_route_aux_attr a = { .sigmoid = i, .balance = 1 };
        kernel_case k = { .op = "route_aux",
                          .attr = &a,
                          .in = { given(mat(F32, T, E), z), filled(mat(I32, T, 3), IDS, -E) },
                          .out = { vec(F32, 1), vec(F32, E), vec(F32, E), vec(F32, 1) } };
        check_on_device(&k, LM_DTYPE_F32, 2e-6, 0, true);
    }
}

/* Bars of many experts, equal numbers and rows that are not finite; sums of weights over several blocks. */
static void test_loads(void **state)
{
    enum { T = 333, MOST = 2000 };
    static double y[T * MOST];
    (void)state;
    for (int64_t E = 9; E <= MOST; E *= 13) {
        const lm_route_bar_attr bar = { E < 100 ? 2 : 8 };
        const lm_route_importance_attr sums = { E };
        for (int64_t i = 0; i < T * E; i++)
            y[i] = (double)(i * 37 % 1009) / 64;
        y[5] = INFINITY;
        y[7 * E + 1] = NAN;
        kernel_case k = { .op = "route_bar",
                          .attr = &bar,
                          .in = { given(mat(F32, T, E), y) },
                          .out = { mat(F32, T, E), mat(I32, T, 2) } };
        instance x;
        build(&k, LM_DTYPE_F64, LM_DTYPE_F32, &x);
        run(&x, lm_cpu_kernel(k.op, LM_DTYPE_F64, LM_CPU_REF), NULL);
        check_on_device(&k, LM_DTYPE_F32, 0, 0, true);
        kernel_case dy = { .op = "route_bar_dy",
                           .attr = &bar,
                           .in = { k.in[0], given(mat(I32, T, 2), x.out[1].data), mat(F32, T, E) },
                           .out = { mat(F32, T, E) } };
        check_on_device(&dy, LM_DTYPE_F32, 2e-6, 0, true);
        drop(&k, &x);
        kernel_case sum = { .op = "route_importance",
                            .attr = &sums,
                            .in = { mat(F32, T, 3), filled(mat(I32, T, 3), IDS, -E) },
                            .out = { vec(F32, E) } };
        check_on_device(&sum, LM_DTYPE_F32, 2e-6, 0, true);
        kernel_case dw = { .op = "route_importance_dw",
                           .attr = &sums,
                           .in = { filled(mat(I32, T, 3), IDS, -E), vec(F32, E) },
                           .out = { mat(F32, T, 3) } };
        check_on_device(&dw, LM_DTYPE_F32, 0, 0, true);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_choices),
        cmocka_unit_test(test_gradients),
        cmocka_unit_test(test_not_finite),
        cmocka_unit_test(test_plans),
        cmocka_unit_test(test_moves),
        cmocka_unit_test(test_losses),
        cmocka_unit_test(test_losses_not_finite),
        cmocka_unit_test(test_loads),
    };
    return cmocka_run_group_tests_name("cuda_route", tests, open_device, close_device);
}
