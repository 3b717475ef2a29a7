/* SPDX-License-Identifier: Apache-2.0 */
/* The linear families on the CUDA backend, on every path of its kernels, against the reference in
 * double. */
#include "gemm_case.h"

/* ---- the operators ---- */

static const lm_linear_attr first_pass = { LM_ACC_FIRST }, adding = { LM_ACC_ADD };

static void check_linear(int64_t n, int64_t m, int64_t k, lm_dtype act, int turn, const char *path)
{
    bool wide = act != LM_DTYPE_F32 && turn % 2;
    lm_step step = { .seed = 5, .step = 2, .more = turn % 3 == 1 };
    kernel_case y = { .op = "linear",
                      .attr = &first_pass,
                      .in = { mat(ACT, n, k), mat(ACT, m, k),
                              turn % 3 ? vec(F32, m) : vec(ABSENT, 0) },
                      .out = { mat(wide ? F32 : ACT, n, m) } };
    kernel_case dx = { .op = "linear_dx",
                       .attr = &first_pass,
                       .in = { mat(ACT, n, m), mat(ACT, m, k) },
                       .out = { mat(ACT, n, k) } };
    kernel_case dw = { .op = "linear_dw",
                       .attr = turn % 2 ? &adding : &first_pass,
                       .in = { mat(ACT, n, m), mat(ACT, n, k) },
                       .out = { mat(F32, m, k), turn % 4 ? vec(F32, m) : vec(ABSENT, 0) },
                       .step = step };
    lm_linear_act_attr gelu_attr = { turn % 2 ? LM_ACT_GELU_EXACT : LM_ACT_GELU };
    kernel_case f = { .op = "linear_act",
                      .attr = &gelu_attr,
                      .in = { y.in[0], y.in[1], y.in[2] },
                      .out = { mat(ACT, n, m), turn % 4 < 2 ? mat(ACT, n, m) : vec(ABSENT, 0) } };
    kernel_case df = { .op = "linear_act_dx",
                       .attr = &gelu_attr,
                       .in = { mat(ACT, n, m), mat(ACT, m, k), mat(ACT, n, k) },
                       .out = { mat(ACT, n, k) } };
    int shift = turn % 5 == 1;
    check_on_device(&f, act, allowed(act, act, path), shift, true);
    check_on_device(&df, act, allowed(act, act, path), shift, true);
    check_on_device(&y, act, allowed(act, wide ? LM_DTYPE_F32 : act, path), shift, true);
    check_on_device(&dx, act, allowed(act, act, path), shift, true);
    check_on_device(&dw, act, allowed(act, LM_DTYPE_F32, path), shift, true);
}

static void test_operators(void **state)
{
    static const int64_t shapes[][3] = { { 1, 1, 1 },    { 5, 3, 17 },  { 1, 96, 64 },
                                         { 64, 48, 40 }, { 33, 70, 9 }, { 700, 24, 16 },
                                         { 130, 257, 8 } };
    static const lm_dtype acts[] = { LM_DTYPE_F32, LM_DTYPE_BF16, LM_DTYPE_F16 };
    (void)state;
    for (int path = 0; path < 3; path++) {
        open_path(paths[path]);
        for (int s = 0; s < 7; s++)
            for (int a = 0; a < 3; a++)
                check_linear(shapes[s][0], shapes[s][1], shapes[s][2], acts[a], s * 2 + a,
                             paths[path]);
        close_path(paths[path]);
    }
}

/* On the plain path the bits of a row depend on the number of rows by its class alone (kernels/linear.h). */
static void test_row_classes(void **state)
{
    static const int64_t counts[] = {
        8, 1, 2, 3, 4, 5, 7, 150, 9, 16, 17, 32, 33, 64, 70, 128, 129
    };
    static const lm_dtype acts[] = { LM_DTYPE_F32, LM_DTYPE_BF16, LM_DTYPE_F16 };
    enum { COUNTS = sizeof counts / sizeof *counts };
    (void)state;
    open_path("plain");
    for (int a = 0; a < 3; a++) {
        instance first = { 0 }, x;
        kernel_case k = { .op = "linear", .attr = &first_pass };
        for (int i = 0; i < COUNTS; i++) {
            int64_t n = counts[i];
            k.in[0] = mat(ACT, n, 200);
            k.in[1] = mat(ACT, 70, 200);
            k.in[2] = vec(F32, 70);
            k.out[0] = mat(F32, n, 70);
            bool begins = n == 8 || n == 150; /* a class: its rows are the first of these */
            instance *it = begins ? &first : &x;
            if (begins && first.in[0].data)
                drop(&k, &first);
            build(&k, acts[a], acts[a], it);
            run_on_device(it, device_kernel("linear", acts[a]), 0);
            if (begins)
                continue;
            if (memcmp(x.out[0].data, first.out[0].data, bytes_of(&x.out[0])))
                fail_msg("%s: other bits of %d rows", lm_dtype_name(acts[a]), (int)n);
            drop(&k, &x);
        }
        drop(&k, &first);
    }
    close_path("plain");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_operators),
        cmocka_unit_test(test_row_classes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
