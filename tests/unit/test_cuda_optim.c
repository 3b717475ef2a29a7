/* SPDX-License-Identifier: Apache-2.0 */
/* Optimiser steps, sums and strided copies on the CUDA backend against the definition. */
#include "cuda_case.h"

#include "kernels/optim.h"

static const int64_t counts[] = { 1, 2, 3, 4, 5, 31, 33, 127, 1025, 5000, 65536 + 40000 + 7 };
enum { N_COUNTS = sizeof counts / sizeof *counts };

static const double four = 4, not_a_number = NAN, infinite = INFINITY;

static kernel_case adamw_case(const lm_adamw_attr *a, int64_t n)
{
    kernel_case k = { .op = "adamw", .attr = a };
    k.in[0] = k.out[0] = k.out[1] = vec(F32, n);
    k.out[2] = filled(vec(F32, n), POSITIVE, 0);
    return k;
}

static void adamw(void **state)
{
    (void)state;
    for (int i = 0; i < N_COUNTS; i++) {
        for (int v = i == N_COUNTS - 1 ? 7 : 0; v < 8; v++) {
            lm_adamw_attr a = { 1e-2, 0.9,   0.999, 1e-8,           v & 1 ? 0.1 : 0,
                                0.1,  0.001, 0.7,   v & 2 ? 0.3 : 0 };
            kernel_case k = adamw_case(&a, counts[i]);
            if (v & 4) {
                k.in[1] = given(vec(F64, 1), &four);
                k.in[2] = given(vec(F64, 1), &four);
            }
            check_on_device(&k, LM_DTYPE_F32, 1e-6, v & 1, true);
            k.out[3] = vec(COPY_BF16, counts[i]);
            check_on_device(&k, LM_DTYPE_F32, 4e-3, v >> 1 & 1, true);
        }
    }
}

static void sgd(void **state)
{
    (void)state;
    for (int i = 0; i < N_COUNTS; i++) {
        for (int v = i == N_COUNTS - 1 ? 7 : 0; v < 8; v++) {
            lm_sgd_attr a = { 1e-2, 0.9, 0.1, v & 1 ? 0.1 : 0, 0.7, v & 4 ? 0.3 : 0, v & 2, v & 4 };
            kernel_case k = { .op = "sgd", .attr = &a };
            k.in[0] = k.out[0] = vec(F32, counts[i]);
            check_on_device(&k, LM_DTYPE_F32, 1e-6, v & 1, true);
            k.in[1] = given(vec(F64, 1), &four);
            k.out[1] = vec(F32, counts[i]);
            check_on_device(&k, LM_DTYPE_F32, 1e-6, v >> 1 & 1, true);
            k.out[2] = vec(COPY_BF16, counts[i]);
            check_on_device(&k, LM_DTYPE_F32, 4e-3, 0, true);
        }
    }
}

/* The first step with momentum does not read the buffer. */
static void first_step_ignores_buffer(void **state)
{
    (void)state;
    double junk[9];
    lm_sgd_attr a = { .lr = 0.1, .momentum = 0.9, .first = true };
    kernel_case k = { .op = "sgd", .attr = &a };
    for (int i = 0; i < 9; i++)
        junk[i] = NAN;
    k.in[0] = k.out[0] = vec(F32, 9);
    k.out[1] = given(vec(F32, 9), junk);
    check_on_device(&k, LM_DTYPE_F32, 1e-6, 0, true);
}

/* The copy is the rounding of the master weight, bit for bit. */
static void copy_is_rounded_master(void **state)
{
    (void)state;
    lm_adamw_attr a = { 1e-2, 0.9, 0.999, 1e-8, 0.1, 0.1, 0.001, 1, 0 };
    kernel_case k = adamw_case(&a, 5003);
    k.out[3] = vec(COPY_BF16, 5003);
    for (int shift = 0; shift < 2; shift++) {
        instance x;
        build(&k, LM_DTYPE_F32, LM_DTYPE_F32, &x);
        run_on_device(&x, device_kernel("adamw", LM_DTYPE_F32), shift);
        for (int i = 0; i < 5003; i++)
            assert_int_equal(((uint16_t *)x.out[3].data)[i],
                             lm_f32_to_bf16(((float *)x.out[0].data)[i]));
        drop(&k, &x);
    }
}

/* Hyper-parameters from memory give the same bits as those of an attribute.  a: an attribute for
 * numbers in memory, b: an attribute with the numbers. */
static void check_same(const char *op, const void *a, const void *b, const double *now, int n_now)
{
    for (int i = 0; i < N_COUNTS - 1; i++) {
        bool adam = !strcmp(op, "adamw");
        kernel_case k = { .op = op, .attr = a }, s;
        k.in[0] = k.out[0] = k.out[1] = vec(F32, counts[i]);
        k.out[2] = adam ? filled(vec(F32, counts[i]), POSITIVE, 0) : vec(COPY_BF16, counts[i]);
        s = k;
        s.attr = b;
        k.in[3] = given(vec(F64, n_now), now);
        check_on_device(&k, LM_DTYPE_F32, 4e-3, i & 1, true);
        instance x, y;
        build(&k, LM_DTYPE_F32, LM_DTYPE_F32, &x);
        build(&s, LM_DTYPE_F32, LM_DTYPE_F32, &y);
        run_on_device(&x, device_kernel(op, LM_DTYPE_F32), 0);
        run_on_device(&y, device_kernel(op, LM_DTYPE_F32), 0);
        for (int o = 0; o < 3; o++)
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

/* No output changes when the norm or the watched number is not finite. */
static void check_untouched(kernel_case *k)
{
    const double *bad[] = { &not_a_number, &infinite };
    for (int i = 0; i < 4; i++) {
        instance x, was;
        k->in[1] = given(vec(F64, 1), i < 2 ? bad[i] : &four);
        k->in[2] = given(vec(F64, 1), i < 2 ? &four : bad[i - 2]);
        build(k, LM_DTYPE_F32, LM_DTYPE_F32, &x);
        build(k, LM_DTYPE_F32, LM_DTYPE_F32, &was);
        run_on_device(&x, device_kernel(k->op, LM_DTYPE_F32), 0);
        for (int o = 0; o < 4; o++)
            if (x.out[o].data)
                assert_memory_equal(x.out[o].data, was.out[o].data, bytes_of(&x.out[o]));
        drop(k, &x);
        drop(k, &was);
    }
}

static void nothing_is_written(void **state)
{
    (void)state;
    for (int clip = 0; clip < 2; clip++) { /* also when no clipping is asked for */
        lm_adamw_attr a = { 1e-2, 0.9, 0.999, 1e-8, 0.1, 0.1, 0.001, clip, 0 };
        lm_sgd_attr b = { .lr = 0.1, .momentum = 0.9, .clip_norm = clip };
        kernel_case k = adamw_case(&a, 1025);
        k.out[3] = vec(COPY_BF16, 1025);
        check_untouched(&k);
        kernel_case s = { .op = "sgd", .attr = &b };
        s.in[0] = s.out[0] = s.out[1] = vec(F32, 1025);
        s.out[2] = vec(COPY_BF16, 1025);
        check_untouched(&s);
    }
}

/* A NaN gradient makes its weight, its states and the sums NaN; clipping does not hide it. */
static void nan_is_not_hidden(void **state)
{
    (void)state;
    double g[37] = { 0 };
    g[3] = NAN, g[36] = INFINITY;
    lm_adamw_attr a = { 1e-2, 0.9, 0.999, 1e-8, 0.1, 0.1, 0.001, 1, 0.5 };
    lm_sgd_attr b = { .lr = 0.1, .clip_value = 0.5 };
    kernel_case k = adamw_case(&a, 37), s = { .op = "sgd", .attr = &b };
    k.in[0] = s.in[0] = given(vec(F32, 37), g);
    s.out[0] = vec(F32, 37);
    check_on_device(&k, LM_DTYPE_F32, 1e-6, 0, true);
    check_on_device(&s, LM_DTYPE_F32, 1e-6, 0, true);
    const lm_sum_block block = { .count = 37 };
    for (int i = 0; i < 2; i++) {
        kernel_case q = { .op = i ? "total" : "sumsq" };
        q.in[0] = k.in[0];
        if (i == 0)
            q.in[1] = given((operand){ .kind = I32, .rows = 1, .cols = 4 }, &block);
        q.out[0] = vec(F64, 1);
        check_on_device(&q, LM_DTYPE_F32, 0, 0, true);
    }
}

static void sums(void **state)
{
    (void)state;
    for (int i = 0; i <= N_COUNTS; i++) {
        int64_t n = i < N_COUNTS ? counts[i] : 4 * 65536 + 3;
        for (int v = 0; v < 4; v++) { /* of F32, and of sums in F64 */
            kernel_case k = { .op = "total", .step = { .more = v & 1 } };
            k.in[0] = filled(vec(v < 2 ? F32 : F64, n), POSITIVE, 0);
            k.out[0] = filled(vec(F64, 1), POSITIVE, 0);
            check_on_device(&k, LM_DTYPE_F32, v < 2 ? 1e-13 : 1e-11, v & 1, true);
        }
    }
}

/* Blocks that begin at multiples of four elements, or not; an empty one. */
static void sums_of_squares(void **state)
{
    (void)state;
    for (int i = 0; i <= N_COUNTS; i++) {
        const int64_t n = i < N_COUNTS ? counts[i] : 4 * LM_SUM_BLOCK + 3;
        lm_sum_block block[8] = { { 0 } };
        int64_t b = 1;
        for (int64_t at = i % 2 ? n % 4 : 0; at < n; at += LM_SUM_BLOCK)
            block[b++] =
                (lm_sum_block){ .page = (int32_t)(at / LM_SUM_BLOCK),
                                .first = (int32_t)(at % LM_SUM_BLOCK),
                                .count = (int32_t)(n - at < LM_SUM_BLOCK ? n - at : LM_SUM_BLOCK),
                                .place = (int32_t)b + 1 };
        kernel_case k = { .op = "sumsq" };
        k.in[0] = vec(F32, n);
        k.in[1] = given((operand){ .kind = I32, .rows = b, .cols = 4 }, block);
        k.out[0] = vec(F64, b + 2);
        check_on_device(&k, LM_DTYPE_F32, 1e-13, 0, true);
    }
}

static void strided(void **state)
{
    (void)state;
    const int64_t strides[] = { 1, 3, 50 };
    for (int s = 0; s < 3; s++) {
        for (int64_t n = 1; n <= 5000; n = n * 3 + 1) {
            lm_strided_attr a = { strides[s] };
            kernel_case k = { .op = "strided", .attr = &a };
            k.in[0] = vec(F32, (n - 1) * strides[s] + 1);
            k.out[0] = vec(F32, n);
            check_on_device(&k, LM_DTYPE_F32, 0, 0, true);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(adamw),
        cmocka_unit_test(sgd),
        cmocka_unit_test(first_step_ignores_buffer),
        cmocka_unit_test(copy_is_rounded_master),
        cmocka_unit_test(numbers_come_from_memory),
        cmocka_unit_test(nothing_is_written),
        cmocka_unit_test(nan_is_not_hidden),
        cmocka_unit_test(sums),
        cmocka_unit_test(sums_of_squares),
        cmocka_unit_test(strided),
    };
    return cmocka_run_group_tests(tests, open_device, close_device);
}
