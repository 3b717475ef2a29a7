/* SPDX-License-Identifier: Apache-2.0 */
/* The gated norm, and gates of attention and of the delta rule: every level against the definition in double, which is
 * checked against finite differences and by hand. */
#include "kernel_case.h"

#include "kernels/gated_norm.h"
#include "kernels/gates.h"

/* ---- gated_norm ---- */

static kernel_case norm_of(const lm_gated_norm_attr *a, int64_t n)
{
    int64_t width = a->heads * a->head_dim;
    kernel_case k = { .op = "gated_norm", .attr = a, .tol_f32 = 1e-6, .tol_bf16 = 8e-3 };
    k.in[0] = k.in[1] = mat(ACT, n, width);
    k.in[2] = vec(F32, a->head_dim);
    k.out[0] = mat(ACT, n, width);
    k.out[1] = mat(F32, n, a->heads);
    return k;
}

/* Backward cases with the numbers of a forward pass. */
static void norm_back(const kernel_case *f, const instance *y, kernel_case *dx, kernel_case *dw)
{
    *dx =
        (kernel_case){ .op = "gated_norm_dx", .attr = f->attr, .tol_f32 = 2e-6, .tol_bf16 = 8e-3 };
    dx->in[0] = f->out[0];
    dx->in[1] = given(f->in[0], y->in[0].data);
    dx->in[2] = given(f->in[1], y->in[1].data);
    dx->in[3] = given(f->in[2], y->in[2].data);
    dx->in[4] = given(f->out[1], y->out[1].data);
    dx->out[0] = f->in[0];
    dx->out[1] = f->in[1];
    *dw = *dx;
    dw->op = "gated_norm_dw";
    dw->tol_f32 = 1e-5;
    dw->in[3] = dx->in[4];
    dw->in[4] = (operand){ 0 };
    dw->out[0] = f->in[2];
    dw->out[1] = (operand){ 0 };
}

static void norm_shapes(void **state)
{
    (void)state;
    static const int64_t dims[] = { 2, 3, 8, 17, 64, 128 };
    for (int i = 0; i < 6; i++) {
        lm_gated_norm_attr a = { 1 + i % 3, dims[i], 1e-6, LM_ACC_FIRST };
        kernel_case f = norm_of(&a, i == 2 ? 700 : 5 + i), dx, dw;
        instance y;
        check_case(&f);
        build(&f, LM_DTYPE_F64, LM_DTYPE_BF16, &y);
        run(&y, lm_cpu_kernel("gated_norm", LM_DTYPE_F64, LM_CPU_REF), NULL);
        norm_back(&f, &y, &dx, &dw);
        check_case(&dx);
        check_case(&dw);
        drop(&f, &y);
    }
}

static void norm_slopes(void **state)
{
    (void)state;
    lm_gated_norm_attr a = { 2, 5, 1e-3, LM_ACC_FIRST };
    kernel_case f = norm_of(&a, 4), dx, dw;
    instance y, x, w;
    build(&f, LM_DTYPE_F64, LM_DTYPE_F64, &y);
    run(&y, lm_cpu_kernel("gated_norm", LM_DTYPE_F64, LM_CPU_REF), NULL);
    norm_back(&f, &y, &dx, &dw);
    dx.in[4].kind = dw.in[3].kind = ACT; /* not rounded to a float */
    build(&dx, LM_DTYPE_F64, LM_DTYPE_F64, &x);
    build(&dw, LM_DTYPE_F64, LM_DTYPE_F64, &w);
    run(&x, lm_cpu_kernel("gated_norm_dx", LM_DTYPE_F64, LM_CPU_REF), NULL);
    run(&w, lm_cpu_kernel("gated_norm_dw", LM_DTYPE_F64, LM_CPU_REF), NULL);
    check_slope(&f, 0, 0, &x.in[0], &x.out[0]);
    check_slope(&f, 1, 0, &x.in[0], &x.out[1]);
    check_slope(&f, 2, 0, &x.in[0], &w.out[0]);
    drop(&f, &y);
    drop(&dx, &x);
    drop(&dw, &w);
}

/* 3 and 4 have the length 5, the root mean square 5 / sqrt 2; SiLU(ln 3) is 3/4 ln 3. */
static void norm_by_hand(void **state)
{
    (void)state;
    lm_gated_norm_attr a = { 1, 2, 0, LM_ACC_FIRST };
    const double x[] = { 3, 4 }, z[] = { log(3), 0 }, w[] = { 10, 1 };
    kernel_case f = norm_of(&a, 1);
    instance y;
    f.in[0] = given(f.in[0], x);
    f.in[1] = given(f.in[1], z);
    f.in[2] = given(f.in[2], w);
    build(&f, LM_DTYPE_F64, LM_DTYPE_F64, &y);
    run(&y, lm_cpu_kernel("gated_norm", LM_DTYPE_F64, LM_CPU_REF), NULL);
    assert_float_equal(lm_get(LM_DTYPE_F64, y.out[0].data, 0), 10 * 3 * sqrt(2) / 5 * 0.75 * log(3),
                       1e-12);
    assert_float_equal(lm_get(LM_DTYPE_F64, y.out[0].data, 1), 0, 0);
    drop(&f, &y);
}

/* ---- gates ---- */

static kernel_case gates_of(const lm_delta_gates_attr *a, int64_t n)
{
    kernel_case k = { .op = "delta_gates", .attr = a, .tol_f32 = 1e-6, .tol_bf16 = 4e-3 };
    k.in[0] = mat(ACT, n, 2 * a->heads);
    k.in[1] = k.in[2] = vec(F32, a->heads);
    k.out[0] = k.out[1] = mat(F32, n, a->heads);
    return k;
}

static void gates_slopes(void **state)
{
    (void)state;
    lm_delta_gates_attr a = { 6, 2, LM_ACC_FIRST };
    kernel_case f = gates_of(&a, 5);
    instance y, x, w;
    check_case(&f);
    build(&f, LM_DTYPE_F64, LM_DTYPE_F64, &y);
    kernel_case dx = { .op = "delta_gates_dx", .attr = &a, .tol_f32 = 1e-6, .tol_bf16 = 4e-3 };
    dx.in[0] = f.out[0];
    for (int i = 0; i < 3; i++)
        dx.in[2 + i] = given(f.in[i], y.in[i].data);
    dx.out[0] = f.in[0];
    kernel_case dw = { .op = "delta_gates_dw", .attr = &a, .tol_f32 = 1e-5, .tol_bf16 = 1e-2 };
    dw.in[0] = f.out[0];
    memcpy(&dw.in[1], &dx.in[2], 3 * sizeof *dx.in);
    dw.out[0] = dw.out[1] = f.in[1];
    build(&dx, LM_DTYPE_F64, LM_DTYPE_F64, &x);
    build(&dw, LM_DTYPE_F64, LM_DTYPE_F64, &w);
    run(&x, lm_cpu_kernel("delta_gates_dx", LM_DTYPE_F64, LM_CPU_REF), NULL);
    run(&w, lm_cpu_kernel("delta_gates_dw", LM_DTYPE_F64, LM_CPU_REF), NULL);
    check_slope(&f, 0, 0, &x.in[0], &x.out[0]);
    check_slope(&f, 1, 0, &x.in[0], &w.out[0]);
    check_slope(&f, 2, 0, &x.in[0], &w.out[1]);
    drop(&dx, &x);
    dx.in[1] = f.out[1]; /* through corrections */
    dx.in[0] = (operand){ 0 };
    build(&dx, LM_DTYPE_F64, LM_DTYPE_F64, &x);
    run(&x, lm_cpu_kernel("delta_gates_dx", LM_DTYPE_F64, LM_CPU_REF), NULL);
    check_slope(&f, 0, 1, &x.in[1], &x.out[0]);
    drop(&f, &y);
    drop(&dx, &x);
    drop(&dw, &w);
}

/* Two key heads of two value heads: rows are b0 b1 a0 a1 b2 b3 a2 a3.  A decay far beyond 1 and one of nothing stay finite. */
static void gates_by_hand(void **state)
{
    (void)state;
    lm_delta_gates_attr a = { 4, 2, LM_ACC_FIRST };
    const double ba[] = { 0, log(3), 0, 1000, -log(3), 0, -1000, 0 };
    const double a_log[] = { 0, 0, 0, log(2) }, dt[4] = { 0 };
    const double g[] = { -log(2), -1000, 0, -2 * log(2) }, beta[] = { 0.5, 0.75, 0.25, 0.5 };
    kernel_case f = gates_of(&a, 1);
    f.in[0] = given(f.in[0], ba);
    f.in[1] = given(f.in[1], a_log);
    f.in[2] = given(f.in[2], dt);
    for (int level = 0; level <= (int)lm_cpu_detect(); level++) {
        instance y;
        build(&f, LM_DTYPE_F32, LM_DTYPE_F32, &y);
        run(&y, lm_cpu_kernel("delta_gates", LM_DTYPE_F32, (lm_cpu_level)level), pool_of(1));
        for (int h = 0; h < 4; h++) {
            assert_float_equal(((float *)y.out[0].data)[h], g[h], 1e-4);
            assert_float_equal(((float *)y.out[1].data)[h], beta[h], 1e-6);
        }
        drop(&f, &y);
    }
}

/* Rows of two heads of two numbers, one key and one value: q0 g0 q1 g1 k v. */
static void gates_split_and_join(void **state)
{
    (void)state;
    lm_gate_split_attr a = { 2, 1, 2 };
    const double x[] = { 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12 };
    const double qkv[] = { 1, 2, 5, 6, 9, 10, 11, 12 }, gate[] = { 3, 4, 7, 8 };
    kernel_case s = { .op = "gate_split", .attr = &a }, j = { .op = "gate_join", .attr = &a };
    s.in[0] = j.out[0] = given(mat(ACT, 1, 12), x);
    s.out[0] = j.in[0] = given(mat(ACT, 1, 8), qkv);
    s.out[1] = j.in[1] = given(mat(ACT, 1, 4), gate);
    for (int level = 0; level <= (int)lm_cpu_detect(); level++) {
        instance y, want;
        build(&s, LM_DTYPE_BF16, LM_DTYPE_BF16, &want);
        s.out[0].data = s.out[1].data = NULL;
        build(&s, LM_DTYPE_BF16, LM_DTYPE_BF16, &y);
        run(&y, lm_cpu_kernel("gate_split", LM_DTYPE_BF16, (lm_cpu_level)level), pool_of(1));
        assert_memory_equal(y.out[0].data, want.out[0].data, 8 * 2);
        assert_memory_equal(y.out[1].data, want.out[1].data, 4 * 2);
        drop(&s, &y);
        drop(&s, &want);
        s.out[0] = j.in[0];
        s.out[1] = j.in[1];
        build(&j, LM_DTYPE_BF16, LM_DTYPE_BF16, &want);
        j.out[0].data = NULL;
        build(&j, LM_DTYPE_BF16, LM_DTYPE_BF16, &y);
        run(&y, lm_cpu_kernel("gate_join", LM_DTYPE_BF16, (lm_cpu_level)level), pool_of(1));
        assert_memory_equal(y.out[0].data, want.out[0].data, 12 * 2);
        drop(&j, &y);
        drop(&j, &want);
        j.out[0].data = x;
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(norm_shapes),   cmocka_unit_test(norm_slopes),
        cmocka_unit_test(norm_by_hand),  cmocka_unit_test(gates_slopes),
        cmocka_unit_test(gates_by_hand), cmocka_unit_test(gates_split_and_join),
    };
    return cmocka_run_group_tests_name("kernels_gated_norm", tests, NULL, NULL);
}
