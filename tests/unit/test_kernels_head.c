/* SPDX-License-Identifier: Apache-2.0 */
/* The vocabulary head at every level against the definition. */
#include "kernel_case.h"

#include "kernels/head.h"

static kernel_case case_of(const lm_head_attr *a, int64_t n, int64_t v, int64_t c, bool grad)
{
    kernel_case k = { .op = "head_loss", .attr = a, .tol_f32 = 2e-6, .tol_bf16 = 1e-2 };
    k.in[0] = mat(ACT, n, c);
    k.in[1] = mat(ACT, v, c);
    k.in[2] = filled(vec(I32, n), IDS, -a->vocab);
    k.in[3] = vec(F32, n);
    k.out[0] = vec(F32, n);
    k.out[1] = mat(grad ? ACT : ABSENT, n, c);
    k.out[2] = mat(grad ? F32 : ABSENT, v, c);
    return k;
}

/* The same with a bias of V numbers, and their gradient. */
static kernel_case with_bias(kernel_case k)
{
    int64_t v = k.in[1].rows;
    k.in[4] = vec(F32, v);
    k.out[3] = vec(k.out[2].kind == ABSENT ? ABSENT : F32, v);
    return k;
}

static void all_shapes(void **state)
{
    (void)state;
    const int64_t shapes[][3] = { { 1, 1, 1 },     { 3, 7, 5 },     { 31, 33, 16 },
                                  { 33, 127, 31 }, { 65, 257, 33 }, { 7, 1025, 64 } };
    for (int i = 0; i < 6; i++) {
        for (int v = 0; v < 4; v++) {
            int64_t n = shapes[i][0], vocab = shapes[i][1], c = shapes[i][2];
            lm_head_attr a = { vocab, v == 2 ? 16 : 0, v == 1 ? LM_ACC_ADD : LM_ACC_FIRST,
                               v == 3 ? 1.5 : 0 };
            kernel_case k = case_of(&a, n, vocab, c, true);
            k.step.more = v == 2;
            check_case(&k);
            k = with_bias(k);
            check_case(&k);
            k = case_of(&a, n, vocab, c, false);
            check_case(&k);
            k = with_bias(k);
            check_case(&k);
        }
    }
}

/* Rows of w beyond the vocabulary do not exist: no probability, zero gradient. */
static void padding_is_ignored(void **state)
{
    (void)state;
    lm_head_attr a = { 50, 0, LM_ACC_FIRST, 0 };
    kernel_case k = with_bias(case_of(&a, 33, 64, 24, true));
    check_case(&k);
    a.acc = LM_ACC_ADD;
    check_case(&k);
}

/* Several chunks accumulate into one dw. */
static void many_chunks(void **state)
{
    (void)state;
    lm_head_attr a = { 67, 0, LM_ACC_FIRST, 0 };
    kernel_case k = with_bias(case_of(&a, 1300, 67, 17, true));
    check_case(&k);
    a.chunk_rows = 100;
    check_case(&k);
    a.acc = LM_ACC_ADD;
    check_case(&k);
}

/* Few rows have targets, or none: prompts before answers, alone and over chunks of 100 rows, the last of which are whole.
 * What was in the outputs does not stay. */
static void few_targets(void **state)
{
    (void)state;
    enum { N = 1300, V = 67 };
    int32_t target[N];
    for (int form = 0; form < 4; form++) {
        for (int i = 0; i < N; i++) {
            bool answer = form == 0 ? i % 150 > 110 : form == 1 ? i == 700 : form == 2 && i >= 17;
            target[i] = answer ? i % V : -1;
        }
        for (int v = 0; v < 4; v++) {
            lm_head_attr a = { V, v & 1 ? 100 : 0, v & 2 ? LM_ACC_ADD : LM_ACC_FIRST, 0 };
            kernel_case k = with_bias(case_of(&a, N, V, 17, true));
            k.in[2] = given(vec(I32, N), target);
            check_case(&k);
            k.out[2].kind = k.out[3].kind = ABSENT;
            check_case(&k);
        }
    }
}

/* dx of a large vocabulary is the sum of several products, with dw and without. */
static void large_vocabulary(void **state)
{
    (void)state;
    lm_head_attr a = { 2 * 8192 + 5, 0, LM_ACC_FIRST, 0 };
    for (int dw = 0; dw < 2; dw++) {
        kernel_case k = case_of(&a, 5, 2 * 8192 + 9, 41, true);
        k.out[2] = mat(dw ? F32 : ABSENT, 2 * 8192 + 9, 41);
        check_case(&k);
    }
}

/* NaN or infinity in one row: its loss is NaN, the losses of the others are unchanged. */
static void bad_numbers_are_detected(void **state)
{
    (void)state;
    enum { N = 5, C = 8, V = 40 };
    double x[N * C];
    for (int bad = 0; bad < 2; bad++) {
        for (int i = 0; i < N * C; i++)
            x[i] = i == 2 * C + 3 ? (bad ? INFINITY : NAN) : 0.1 * (i % 5);
        lm_head_attr a = { V, 0, LM_ACC_FIRST, 0 };
        kernel_case k = case_of(&a, N, V, C, true);
        k.in[0] = given(mat(ACT, N, C), x);
        k.in[2].fill = ZERO;
        check_case(&k);
    }
}

/* Logits of 1e4: no overflow, and a loss that is the difference of two logits. */
static void large_logits(void **state)
{
    (void)state;
    enum { N = 3, C = 4, V = 33 };
    double x[N * C];
    for (int i = 0; i < N * C; i++)
        x[i] = i % 2 ? 4096 : -4096;
    lm_head_attr a = { V, 0, LM_ACC_FIRST, 0 };
    kernel_case k = case_of(&a, N, V, C, true);
    k.in[0] = given(mat(ACT, N, C), x);
    check_case(&k);
}

/* The losses of the halves have the bits of the joined form, their gradients are as near as the
 * contract requires, and 1 - p of the target keeps its precision for p near 1. */
static void halves(void **state)
{
    (void)state;
    const int64_t shapes[][3] = { { 1, 1, 1 }, { 3, 7, 5 }, { 33, 127, 31 }, { 65, 257, 33 } };
    for (int i = 0; i < 4; i++)
        for (int act = 0; act < 2; act++)
            for (int level = 0; level <= (int)lm_cpu_detect(); level++) {
                int64_t n = shapes[i][0], vocab = shapes[i][1], c = shapes[i][2];
                lm_dtype d = act ? LM_DTYPE_BF16 : LM_DTYPE_F32;
                lm_head_attr a = { vocab, i == 3 ? 16 : 0, LM_ACC_FIRST, 0 };
                kernel_case k = case_of(&a, n, vocab, c, true), s = case_of(&a, n, vocab, c, false);
                kernel_case g = k;
                instance joined, stats, grad;
                s.op = "head_stats";
                s.in[3].kind = ABSENT;
                s.out[1] = s.out[2] = vec(F32, n);
                build(&k, d, d, &joined);
                build(&s, d, d, &stats);
                run(&joined, lm_cpu_kernel("head_loss", d, (lm_cpu_level)level), NULL);
                run(&stats, lm_cpu_kernel("head_stats", d, (lm_cpu_level)level), NULL);
                assert_memory_equal(joined.out[0].data, stats.out[0].data, (size_t)n * 4);
                double lse[65];
                for (int64_t r = 0; r < n; r++) {
                    lse[r] = ((float *)stats.out[1].data)[r];
                    double loss = lse[r] - ((float *)stats.out[2].data)[r];
                    assert_true(fabs(loss - ((float *)stats.out[0].data)[r]) < 1e-5);
                }
                g.op = "head_grad";
                g.in[4] = k.in[3];
                g.in[3] = given(vec(F32, n), lse);
                g.out[0] = k.out[1];
                g.out[1] = k.out[2];
                g.out[2].kind = ABSENT;
                build(&g, d, d, &grad);
                memcpy(grad.in[4].data, joined.in[3].data, (size_t)n * 4);
                run(&grad, lm_cpu_kernel("head_grad", d, (lm_cpu_level)level), NULL);
                for (int o = 0; o < 2; o++)
                    assert_true(distance(&grad.out[o], &joined.out[o + 1]) < (act ? 1e-2 : 3e-6));
                drop(&k, &joined);
                drop(&s, &stats);
                drop(&g, &grad);
            }
}

static void gradients(void **state)
{
    (void)state;
    for (int i = 0; i < 2; i++) {
        lm_head_attr a = { 11, 0, LM_ACC_FIRST, i * 1.5 };
        kernel_case k = with_bias(case_of(&a, 6, 13, 5, true));
        double one[6] = { 1, 1, 1, 1, 1, 1 };
        k.in[3] = given(vec(F32, 6), one);
        instance x;
        build(&k, LM_DTYPE_F64, LM_DTYPE_F64, &x);
        run(&x, lm_cpu_kernel("head_loss", LM_DTYPE_F64, LM_CPU_REF), NULL);
        check_slope(&k, 0, 0, NULL, &x.out[1]);
        check_slope(&k, 1, 0, NULL, &x.out[2]);
        check_slope(&k, 4, 0, NULL, &x.out[3]);
        drop(&k, &x);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(all_shapes),
        cmocka_unit_test(padding_is_ignored),
        cmocka_unit_test(many_chunks),
        cmocka_unit_test(few_targets),
        cmocka_unit_test(bad_numbers_are_detected),
        cmocka_unit_test(large_logits),
        cmocka_unit_test(gradients),
        cmocka_unit_test(halves),
        cmocka_unit_test(large_vocabulary),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
