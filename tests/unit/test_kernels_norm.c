/* SPDX-License-Identifier: Apache-2.0 */
/* The norm family at every level against the definition, and the definition against finite
 * differences. */
#include "kernel_case.h"

#include "kernels/norm.h"

static const int64_t widths[] = { 1, 3, 31, 33, 127, 1025 };
static const int64_t heights[] = { 1, 33, 131 };

/* norm_dx and norm_dw take any mean (0 for RMSNorm) and reciprocal deviation. */
static const double *stats_like(lm_norm_kind kind)
{
    static double stat[2 * 256];
    for (int i = 0; i < 256; i++) {
        stat[2 * i] = kind == LM_NORM_LAYER ? 0.25 * (i % 5 - 2) : 0;
        stat[2 * i + 1] = 0.5 + i % 3;
    }
    return stat;
}

static void run_norm(int64_t n, int64_t c, lm_norm_kind kind, bool bias, bool residual, int alias)
{
    lm_norm_attr a = { kind, 1e-5, LM_ACC_FIRST, false };
    kernel_case k = { .op = "norm", .attr = &a, .tol_f32 = 1e-6, .tol_bf16 = 8e-3 };
    k.in[0] = mat(ACT, n, c);
    k.in[1] = vec(F32, c);
    k.in[2] = vec(bias ? F32 : ABSENT, c);
    k.in[3] = mat(residual ? ACT : ABSENT, n, c);
    k.out[0] = mat(ACT, n, c);
    k.out[1] = mat(F32, n, 2);
    k.out[2] = mat(residual ? ACT : ABSENT, n, c);
    k.out[2].alias = alias;
    if (c < 3 && kind == LM_NORM_LAYER)
        return;   /* x - mean is 0, so there is no relative error */
    if (c < 31) { /* rows of few, nearly equal numbers amplify the rounding of s */
        k.tol_f32 = 1e-5;
        k.tol_bf16 = 5e-2;
    }
    check_case(&k);
}

static void norm_forward(void **state)
{
    (void)state;
    for (int w = 0; w < 6; w++) {
        for (int h = 0; h < (w == 5 ? 2 : 3); h++) {
            run_norm(heights[h], widths[w], LM_NORM_RMS, false, false, 0);
            run_norm(heights[h], widths[w], LM_NORM_LAYER, true, true, 0);
        }
        run_norm(31, widths[w], LM_NORM_RMS, false, true, 1);
        run_norm(31, widths[w], LM_NORM_RMS, false, true, 4);
        run_norm(31, widths[w], LM_NORM_LAYER, false, true, 1);
    }
}

static void norm_backward(void **state)
{
    (void)state;
    for (int w = 0; w < 6; w++) {
        for (int h = 0; h < (w == 5 ? 2 : 3); h++) {
            for (int v = 0; v < 6; v++) {
                int64_t n = heights[h], c = widths[w];
                lm_norm_attr a = { v & 1 ? LM_NORM_LAYER : LM_NORM_RMS, 1e-5,
                                   v & 2 ? LM_ACC_ADD : LM_ACC_FIRST, false };
                kernel_case k = { .op = "norm_dx", .attr = &a, .tol_f32 = 2e-6, .tol_bf16 = 8e-3 };
                k.in[0] = mat(ACT, n, c);
                k.in[1] = mat(ACT, n, c);
                k.in[2] = vec(F32, c);
                k.in[3] = given(mat(F32, n, 2), stats_like(a.kind));
                k.in[4] = mat(v >= 2 ? ACT : ABSENT, n, c);
                k.out[0] = mat(ACT, n, c);
                k.out[0].alias = v == 4 ? 1 : v == 5 ? 5 : 0;
                check_case(&k);
                kernel_case d = { .op = "norm_dw", .attr = &a, .tol_bf16 = 8e-3 };
                d.tol_f32 = c < 8 ? 1e-5 : 1e-6; /* a few sums may cancel */
                d.in[0] = k.in[0];
                d.in[1] = k.in[1];
                d.in[2] = k.in[3];
                d.out[0] = vec(F32, c);
                d.out[1] = vec(v & 1 ? F32 : ABSENT, c);
                d.step.more = v == 4;
                check_case(&d);
            }
        }
    }
}

static void head_norms(void **state)
{
    (void)state;
    const int64_t dims[] = { 1, 3, 31, 64, 128 };
    for (int i = 0; i < 5; i++) {
        for (int64_t n = 1; n < 200; n = n * 5 + 2) {
            lm_head_norm_attr a = { 4, 2, dims[i], 1e-6, LM_ACC_FIRST, false };
            int64_t c = 8 * dims[i];
            kernel_case k = { .op = "head_norm", .attr = &a, .tol_f32 = 1e-6, .tol_bf16 = 8e-3 };
            k.in[0] = mat(ACT, n, c);
            k.in[1] = k.in[2] = vec(F32, dims[i]);
            k.out[0] = mat(ACT, n, c);
            k.out[1] = mat(F32, n, 6);
            check_case(&k);
            k.out[0].alias = 1;
            check_case(&k);
            kernel_case d = { .op = "head_norm_dx", .attr = &a, .tol_f32 = 2e-6, .tol_bf16 = 8e-3 };
            d.in[0] = d.in[1] = mat(ACT, n, c);
            d.in[2] = d.in[3] = vec(F32, dims[i]);
            d.in[4] = filled(mat(F32, n, 6), POSITIVE, 0);
            d.out[0] = mat(ACT, n, c);
            check_case(&d);
            d.out[0].alias = 1;
            check_case(&d);
            kernel_case w = { .op = "head_norm_dw", .attr = &a, .tol_f32 = 1e-6, .tol_bf16 = 8e-3 };
            if (dims[i] < 8) { /* a few sums may cancel */
                w.tol_f32 = 2e-5;
                w.tol_bf16 = 8e-2;
            }
            w.in[0] = w.in[1] = mat(ACT, n, c);
            w.in[2] = filled(mat(F32, n, 6), POSITIVE, 0);
            w.out[0] = w.out[1] = vec(F32, dims[i]);
            check_case(&w);
            a.acc = LM_ACC_ADD;
            check_case(&w);
        }
    }
}

/* A NaN or infinity affects its own row of the forward only. */
static void bad_numbers_stay_in_their_row(void **state)
{
    (void)state;
    double x[3 * 37];
    for (int bad = 0; bad < 2; bad++) {
        for (int i = 0; i < 3 * 37; i++)
            x[i] = i == 37 + 35 ? (bad ? INFINITY : NAN) : i % 7 - 3;
        for (int kind = 0; kind < 2; kind++) {
            lm_norm_attr a = { (lm_norm_kind)kind, 1e-5, LM_ACC_FIRST, false };
            kernel_case k = { .op = "norm", .attr = &a, .tol_f32 = 1e-6, .tol_bf16 = 8e-3 };
            k.in[0] = given(mat(ACT, 3, 37), x);
            k.in[1] = vec(F32, 37);
            k.out[0] = mat(ACT, 3, 37);
            k.out[1] = mat(F32, 3, 2);
            check_case(&k);
        }
    }
}

/* norm_dx and norm_dw are the gradients of norm: ds and dw of <g, y>. */
static void gradients(void **state)
{
    (void)state;
    for (int v = 0; v < 2; v++) {
        lm_norm_attr a = { v ? LM_NORM_LAYER : LM_NORM_RMS, 1e-5, LM_ACC_FIRST, false };
        kernel_case k = { .op = "norm", .attr = &a };
        k.in[0] = mat(ACT, 4, 9);
        k.in[1] = k.in[2] = vec(F32, 9);
        k.in[2].kind = v ? F32 : ABSENT;
        k.out[0] = mat(ACT, 4, 9);
        k.out[1] = mat(F32, 4, 2);
        instance f, b, w;
        build(&k, LM_DTYPE_F64, LM_DTYPE_F64, &f);
        run(&f, lm_cpu_kernel("norm", LM_DTYPE_F64, LM_CPU_REF), NULL);
        kernel_case d = { .op = "norm_dx", .attr = &a };
        d.in[0] = mat(ACT, 4, 9);
        d.in[1] = given(mat(ACT, 4, 9), f.in[0].data);
        d.in[2] = given(vec(F32, 9), f.in[1].data);
        d.in[3] = given(mat(ACT, 4, 2), f.out[1].data);
        d.out[0] = mat(ACT, 4, 9);
        build(&d, LM_DTYPE_F64, LM_DTYPE_F64, &b);
        memcpy(b.in[2].data, f.in[1].data, 9 * sizeof(double));
        run(&b, lm_cpu_kernel("norm_dx", LM_DTYPE_F64, LM_CPU_REF), NULL);
        kernel_case e = { .op = "norm_dw", .attr = &a };
        e.in[0] = d.in[0];
        e.in[1] = d.in[1];
        e.in[2] = d.in[3];
        e.out[0] = e.out[1] = vec(F32, 9);
        e.out[1].kind = k.in[2].kind;
        build(&e, LM_DTYPE_F64, LM_DTYPE_F64, &w);
        run(&w, lm_cpu_kernel("norm_dw", LM_DTYPE_F64, LM_CPU_REF), NULL);
        check_slope(&k, 0, 0, &b.in[0], &b.out[0]);
        check_slope(&k, 1, 0, &b.in[0], &w.out[0]);
        if (v)
            check_slope(&k, 2, 0, &b.in[0], &w.out[1]);
        drop(&k, &f);
        drop(&d, &b);
        drop(&e, &w);
    }
}

static void head_gradients(void **state)
{
    (void)state;
    lm_head_norm_attr a = { 3, 2, 5, 1e-6, LM_ACC_FIRST, false };
    kernel_case k = { .op = "head_norm", .attr = &a };
    k.in[0] = mat(ACT, 4, 35);
    k.in[1] = k.in[2] = vec(F32, 5);
    k.out[0] = mat(ACT, 4, 35);
    k.out[1] = mat(F32, 4, 5);
    instance f, b, w;
    build(&k, LM_DTYPE_F64, LM_DTYPE_F64, &f);
    run(&f, lm_cpu_kernel("head_norm", LM_DTYPE_F64, LM_CPU_REF), NULL);
    kernel_case d = { .op = "head_norm_dx", .attr = &a };
    d.in[0] = mat(ACT, 4, 35);
    d.in[1] = given(mat(ACT, 4, 35), f.in[0].data);
    d.in[2] = d.in[3] = vec(F32, 5);
    d.in[4] = given(mat(ACT, 4, 5), f.out[1].data);
    d.out[0] = mat(ACT, 4, 35);
    build(&d, LM_DTYPE_F64, LM_DTYPE_F64, &b);
    memcpy(b.in[2].data, f.in[1].data, 5 * sizeof(double));
    memcpy(b.in[3].data, f.in[2].data, 5 * sizeof(double));
    run(&b, lm_cpu_kernel("head_norm_dx", LM_DTYPE_F64, LM_CPU_REF), NULL);
    kernel_case e = { .op = "head_norm_dw", .attr = &a };
    e.in[0] = d.in[0];
    e.in[1] = d.in[1];
    e.in[2] = d.in[4];
    e.out[0] = e.out[1] = vec(F32, 5);
    build(&e, LM_DTYPE_F64, LM_DTYPE_F64, &w);
    run(&w, lm_cpu_kernel("head_norm_dw", LM_DTYPE_F64, LM_CPU_REF), NULL);
    check_slope(&k, 0, 0, &b.in[0], &b.out[0]);
    check_slope(&k, 1, 0, &b.in[0], &w.out[0]);
    check_slope(&k, 2, 0, &b.in[0], &w.out[1]);
    drop(&k, &f);
    drop(&d, &b);
    drop(&e, &w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(norm_forward), cmocka_unit_test(norm_backward),
        cmocka_unit_test(head_norms),   cmocka_unit_test(bad_numbers_stay_in_their_row),
        cmocka_unit_test(gradients),    cmocka_unit_test(head_gradients),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
