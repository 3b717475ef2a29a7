/* SPDX-License-Identifier: Apache-2.0 */
/* Optimiser steps and the sum of squares at every level against the definition. */
#include "kernel_case.h"

#include "kernels/optim.h"

static const int64_t counts[] = { 1, 3, 31, 33, 127, 1025, 65536 + 40000 + 7 };

static void adamw(void **state)
{
    (void)state;
    for (int i = 0; i < 7; i++) {
        for (int v = i == 6 ? 3 : 0; v < 4; v++) {
            lm_adamw_attr a = { 1e-2, 0.9,   0.999,           1e-8,           v & 1 ? 0.1 : 0,
                                0.1,  0.001, v & 2 ? 0.5 : 1, v & 2 ? 0.3 : 0 };
            kernel_case k = { .op = "adamw", .attr = &a, .tol_f32 = 1e-6, .tol_bf16 = 1e-6 };
            k.in[0] = vec(F32, counts[i]);
            k.out[0] = k.out[1] = vec(F32, counts[i]);
            k.out[2] = filled(vec(F32, counts[i]), POSITIVE, 0);
            check_case(&k);
            k.out[3] = vec(COPY_BF16, counts[i]);
            k.tol_f32 = k.tol_bf16 = 4e-3;
            check_case(&k);
        }
    }
}

static void sgd(void **state)
{
    (void)state;
    for (int i = 0; i < 7; i++) {
        for (int v = i == 6 ? 7 : 0; v < 8; v++) {
            lm_sgd_attr a = { 1e-2, 0.9, 0.1, v & 1 ? 0.1 : 0, 0.7, v & 4 ? 0.3 : 0, v & 2, v & 4 };
            kernel_case k = { .op = "sgd", .attr = &a, .tol_f32 = 1e-6, .tol_bf16 = 1e-6 };
            k.in[0] = k.out[0] = vec(F32, counts[i]);
            check_case(&k);
            k.out[1] = vec(F32, counts[i]);
            check_case(&k);
            k.out[2] = vec(COPY_BF16, counts[i]);
            k.tol_f32 = k.tol_bf16 = 4e-3;
            check_case(&k);
        }
    }
}

/* The copy is the rounding of the master weight, bit for bit, on every path (streamed lines and
 * tail). */
static void copy_is_rounded_master(void **state)
{
    (void)state;
    lm_adamw_attr a = { 1e-2, 0.9, 0.999, 1e-8, 0.1, 0.1, 0.001, 1, 0 };
    kernel_case k = { .op = "adamw", .attr = &a };
    k.in[0] = k.out[0] = k.out[1] = vec(F32, 100003);
    k.out[2] = filled(vec(F32, 100003), POSITIVE, 0);
    k.out[3] = vec(COPY_BF16, 100003);
    for (int level = 0; level <= (int)lm_cpu_detect(); level++) {
        instance x;
        build(&k, LM_DTYPE_F32, LM_DTYPE_F32, &x);
        run(&x, lm_cpu_kernel("adamw", LM_DTYPE_F32, (lm_cpu_level)level), pool_of(2));
        for (int i = 0; i < 100003; i++)
            assert_int_equal(((uint16_t *)x.out[3].data)[i],
                             lm_f32_to_bf16(((float *)x.out[0].data)[i]));
        drop(&k, &x);
    }
}

/* All of x in blocks from element `at` on, whose sums begin at the third place; returns their number. */
static int64_t blocks_of(int64_t at, int64_t n, lm_sum_block *out)
{
    int64_t b = 0;
    for (; at < n; at += LM_SUM_BLOCK, b++)
        out[b] = (lm_sum_block){ .page = (int32_t)(at / LM_SUM_BLOCK),
                                 .first = (int32_t)(at % LM_SUM_BLOCK),
                                 .count = (int32_t)(n - at < LM_SUM_BLOCK ? n - at : LM_SUM_BLOCK),
                                 .place = (int32_t)b + 2 };
    return b;
}

static kernel_case sumsq_case(operand x, int64_t blocks, const lm_sum_block *block)
{
    kernel_case k = { .op = "sumsq", .tol_f32 = 1e-13, .tol_bf16 = 1e-13 };
    k.in[0] = x;
    k.in[1] = given((operand){ .kind = I32, .rows = blocks, .cols = 4 }, block);
    k.out[0] = vec(F64, blocks + 3);
    return k;
}

static void sums_of_squares(void **state)
{
    lm_sum_block block[8];
    (void)state;
    for (int i = 0; i < 7; i++)
        for (int64_t at = 0; at < 4 && at < counts[i]; at += 3) {
            const int64_t n = blocks_of(at, counts[i], block);
            block[n] = (lm_sum_block){ .first = 5 }; /* empty */
            kernel_case k = sumsq_case(vec(F32, counts[i]), n + 1, block);
            check_case(&k);
        }
}

static const double sixteen = 16, not_a_number = NAN, infinite = INFINITY;

/* A step with all of its outputs; clipping is in the attributes, which the caller owns. */
static kernel_case step_case(const char *op, const void *attr, int64_t n)
{
    kernel_case k = { .op = op, .attr = attr, .tol_f32 = 4e-3, .tol_bf16 = 4e-3 };
    bool adam = !strcmp(op, "adamw");
    k.in[0] = k.out[0] = k.out[1] = vec(F32, n);
    k.out[2] = adam ? filled(vec(F32, n), POSITIVE, 0) : vec(COPY_BF16, n);
    if (adam)
        k.out[3] = vec(COPY_BF16, n);
    return k;
}

/* Gradients of norm 4 and a bound of 1: the step uses a quarter of each; with a bound of 5, without
 * a bound or without a norm, it uses all of it.  Plain SGD with a rate of 1 shows the factor. */
static void clips_by_norm(void **state)
{
    (void)state;
    for (int v = 0; v < 4; v++) {
        const double bound[] = { 1, 5, 0, 1 }, factor[] = { 0.25, 1, 1, 1 };
        lm_sgd_attr a = { .lr = 1, .clip_norm = bound[v] };
        kernel_case k = { .op = "sgd", .attr = &a, .tol_f32 = 1e-6, .tol_bf16 = 1e-6 };
        k.in[0] = vec(F32, 127);
        k.in[1] = given(vec(v == 3 ? ABSENT : F64, 1), &sixteen);
        k.in[2] = given(vec(v == 1 ? ABSENT : F64, 1), &sixteen);
        k.out[0] = filled(vec(F32, 127), ZERO, 0);
        check_case(&k);
        for (int level = 0; level <= (int)lm_cpu_detect(); level++) {
            instance x;
            build(&k, LM_DTYPE_F32, LM_DTYPE_F32, &x);
            run(&x, lm_cpu_kernel("sgd", LM_DTYPE_F32, (lm_cpu_level)level), pool_of(1));
            for (int i = 0; i < 127; i++) {
                double want = -factor[v] * ((float *)x.in[0].data)[i];
                assert_true(fabs(((float *)x.out[0].data)[i] - want) <= 1e-6 * fabs(want));
            }
            drop(&k, &x);
        }
        lm_adamw_attr b = { 1e-2, 0.9, 0.999, 1e-8, 0.1, 0.1, 0.001, bound[v], 0.3 };
        kernel_case w = step_case("adamw", &b, 127);
        w.in[1] = k.in[1];
        w.in[2] = k.in[2];
        check_case(&w);
    }
}

/* Hyper-parameters from memory give the same bits as those of an attribute.  a: an attribute for
 * numbers in memory, b: an attribute with the numbers. */
static void check_same(const char *op, const void *a, const void *b, const double *now, int n_now)
{
    kernel_case k = step_case(op, a, 1025);
    kernel_case s = step_case(op, b, 1025);
    k.in[3] = given(vec(F64, n_now), now);
    check_case(&k);
    for (int level = 0; level <= (int)lm_cpu_detect(); level++) {
        instance x, y;
        build(&k, LM_DTYPE_F32, LM_DTYPE_F32, &x);
        build(&s, LM_DTYPE_F32, LM_DTYPE_F32, &y);
        run(&x, lm_cpu_kernel(op, LM_DTYPE_F32, (lm_cpu_level)level), pool_of(2));
        run(&y, lm_cpu_kernel(op, LM_DTYPE_F32, (lm_cpu_level)level), pool_of(2));
        for (int o = 0; o < 4; o++)
            if (x.out[o].data)
                assert_memory_equal(x.out[o].data, y.out[o].data, bytes_of(&y.out[o]));
        drop(&k, &x);
        drop(&s, &y);
    }
}

static void numbers_come_from_memory(void **state)
{
    (void)state;
    const double now[3] = { 1e-2, 0.1, 0.001 };
    lm_adamw_attr a = { NAN, 0.9, 0.999, 1e-8, 0.1, NAN, NAN, 0, 0.3 }, b = a;
    b.lr = now[0], b.bc1 = now[1], b.bc2 = now[2];
    check_same("adamw", &a, &b, now, 3);
    for (int first = 0; first < 2; first++) {
        const double rate[2] = { 0.3, first };
        lm_sgd_attr c = { .lr = NAN, .momentum = 0.9, .weight_decay = 0.1, .first = !first }, d = c;
        d.lr = rate[0], d.first = first;
        check_same("sgd", &c, &d, rate, 2);
    }
}

/* Nothing is written if the norm or the watched number is not finite, with or without clipping; a
 * norm that is not used for clipping counts, too. */
static void check_untouched(kernel_case *k, lm_cpu_level level)
{
    const double *bad[] = { &not_a_number, &infinite };
    for (int i = 0; i < 5; i++) {
        instance x, was;
        k->in[1] = given(vec(F64, 1), i < 2 ? bad[i] : &sixteen);
        k->in[2] = given(vec(F64, 1), i < 2 || i == 4 ? &sixteen : bad[i - 2]);
        build(k, LM_DTYPE_F32, LM_DTYPE_F32, &x);
        build(k, LM_DTYPE_F32, LM_DTYPE_F32, &was);
        run(&x, lm_cpu_kernel(k->op, LM_DTYPE_F32, level), pool_of(2));
        for (int o = 0; o < 4; o++)
            if (x.out[o].data) /* the fifth step is valid: shows that the check can fail */
                assert_int_equal(!memcmp(x.out[o].data, was.out[o].data, bytes_of(&x.out[o])),
                                 i < 4);
        drop(k, &x);
        drop(k, &was);
    }
}

static void nothing_is_written(void **state)
{
    (void)state;
    for (int clip = 0; clip < 2; clip++) {
        lm_adamw_attr a = { 1e-2, 0.9, 0.999, 1e-8, 0.1, 0.1, 0.001, clip, 0 };
        lm_sgd_attr b = { .lr = 0.1, .momentum = 0.9, .clip_norm = clip };
        kernel_case w = step_case("adamw", &a, 1025), s = step_case("sgd", &b, 1025);
        for (int level = 0; level <= (int)lm_cpu_detect(); level++) {
            check_untouched(&w, (lm_cpu_level)level);
            check_untouched(&s, (lm_cpu_level)level);
        }
    }
}

/* total replaces its output, or adds to it if the step requires it; strided copies every stride-th.
 */
static void sums_and_strides(void **state)
{
    (void)state;
    double x[7] = { 1, 2, 4, 8, 16, 32, 64 }, was = 1000;
    for (int more = 0; more < 2; more++) {
        kernel_case k = { .op = "total", .tol_f32 = 0, .tol_bf16 = 0, .step = { .more = more } };
        instance i;
        k.in[0] = given(vec(F32, 7), x);
        k.out[0] = given(vec(F64, 1), &was);
        check_case(&k);
        build(&k, LM_DTYPE_F32, LM_DTYPE_F32, &i);
        run(&i, lm_cpu_kernel("total", LM_DTYPE_F32, lm_cpu_detect()), NULL);
        assert_true(*(double *)i.out[0].data == 127 + more * 1000);
        drop(&k, &i);
    }
    lm_strided_attr a = { 3 };
    kernel_case k = { .op = "strided", .attr = &a };
    instance i;
    k.in[0] = given(vec(F32, 7), x);
    k.out[0] = vec(F32, 3);
    check_case(&k);
    build(&k, LM_DTYPE_F32, LM_DTYPE_F32, &i);
    run(&i, lm_cpu_kernel("strided", LM_DTYPE_F32, lm_cpu_detect()), NULL);
    for (int j = 0; j < 3; j++)
        assert_true(((float *)i.out[0].data)[j] == x[3 * j]);
    drop(&k, &i);
}

/* A NaN gradient makes its weight, its states and the norm NaN; clipping does not hide it.
 */
static void nan_is_not_hidden(void **state)
{
    (void)state;
    double g[37] = { 0 };
    g[3] = NAN, g[36] = INFINITY;
    lm_adamw_attr a = { 1e-2, 0.9, 0.999, 1e-8, 0.1, 0.1, 0.001, 1, 0.5 };
    lm_sgd_attr b = { .lr = 0.1, .clip_value = 0.5 };
    kernel_case k = { .op = "adamw", .attr = &a, .tol_f32 = 1e-6, .tol_bf16 = 1e-6 };
    k.in[0] = given(vec(F32, 37), g);
    k.out[0] = k.out[1] = vec(F32, 37);
    k.out[2] = filled(vec(F32, 37), POSITIVE, 0);
    check_case(&k);
    kernel_case s = { .op = "sgd", .attr = &b, .tol_f32 = 1e-6, .tol_bf16 = 1e-6 };
    s.in[0] = k.in[0];
    s.out[0] = vec(F32, 37);
    check_case(&s);
    lm_sum_block block[1];
    kernel_case q = sumsq_case(k.in[0], blocks_of(0, 37, block), block);
    check_case(&q);
}

/* One step by hand: t = 1, from zero states, moves every weight by lr against the sign of its
 * gradient. */
static void first_step_is_lr(void **state)
{
    (void)state;
    double g[2] = { 3, -0.001 }, p[2] = { 1, 2 }, zero[2] = { 0 };
    lm_adamw_attr a = { 0.5, 0.9, 0.999, 0, 0, 1 - 0.9, 1 - 0.999, 1, 0 };
    kernel_case k = { .op = "adamw", .attr = &a };
    k.in[0] = given(vec(F32, 2), g);
    k.out[0] = given(vec(F32, 2), p);
    k.out[1] = k.out[2] = given(vec(F32, 2), zero);
    instance x;
    build(&k, LM_DTYPE_F64, LM_DTYPE_F64, &x);
    run(&x, lm_cpu_kernel("adamw", LM_DTYPE_F64, LM_CPU_REF), NULL);
    assert_true(fabs(((double *)x.out[0].data)[0] - 0.5) < 1e-6);
    assert_true(fabs(((double *)x.out[0].data)[1] - 2.5) < 1e-6);
    drop(&k, &x);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(adamw),
        cmocka_unit_test(sgd),
        cmocka_unit_test(copy_is_rounded_master),
        cmocka_unit_test(sums_of_squares),
        cmocka_unit_test(clips_by_norm),
        cmocka_unit_test(numbers_come_from_memory),
        cmocka_unit_test(nothing_is_written),
        cmocka_unit_test(sums_and_strides),
        cmocka_unit_test(nan_is_not_hidden),
        cmocka_unit_test(first_step_is_lr),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
