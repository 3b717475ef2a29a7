/* SPDX-License-Identifier: Apache-2.0 */
/* Norm and linear layer of a few rows in one kernel (norm_linear) on the CUDA backend: against its
 * parts in double; the same bits in any order of threads, on any number of multiprocessors, and for
 * any other rows in the batch; calls that are not joined. */
#include "cuda_case.h"
#include "kernels/cuda/stream.h"
#include "kernels/linear.h"

/* Parameters of a case. */
typedef struct {
    int64_t rows, c, m; /* m: columns of y */
    lm_norm_kind kind;
    lm_activation act;
    bool bias, residual, wide; /* wide: y is F32 */
} shape;

static kernel_case case_of(const shape *s, lm_norm_linear_attr *attr)
{
    int64_t w_rows = s->act == LM_ACT_SWIGLU ? 2 * s->m : s->m;
    bool layer = s->kind == LM_NORM_LAYER;
    kernel_case k = { .op = "norm_linear", .attr = attr };

    *attr = (lm_norm_linear_attr){ s->kind, 1e-5, s->act, false };
    k.in[0] = mat(ACT, s->rows, s->c);
    k.in[1] = vec(F32, s->c);
    if (layer)
        k.in[2] = vec(F32, s->c);
    if (s->residual)
        k.in[3] = k.in[0];
    k.in[4] = mat(ACT, w_rows, s->c);
    if (s->bias)
        k.in[5] = vec(F32, w_rows);
    k.out[0] = mat(s->wide ? F32 : ACT, s->rows, s->m);
    if (s->residual)
        k.out[1] = k.in[0];
    return k;
}

/* Against the reference, which rounds where the contract requires it: the kernel must not round
 * elsewhere.  Numbers near the middle of two representable ones may be rounded to either. */
static void check_rounded(const kernel_case *k, lm_dtype act, int shift)
{
    instance want, x;
    build(k, act, act, &want);
    run(&want, lm_cpu_kernel(k->op, act, LM_CPU_REF), NULL);
    build(k, act, act, &x);
    run_on_device(&x, device_kernel(k->op, act), shift);
    for (int o = 0; o < 2; o++) {
        if (k->out[o].kind == ABSENT)
            continue;
        double d = distance(&x.out[o], &want.out[o]), tol = o                       ? 0
                                                            : k->out[0].kind == F32 ? 2e-4
                                                                                    : 2e-3;
        if (!(d <= tol))
            fail_msg("%s %s out %d, %lld x %lld: relative error %.3g, allowed %.3g", k->op,
                     lm_dtype_name(act), o, (long long)k->in[0].rows, (long long)k->in[0].cols, d,
                     tol);
    }
    drop(k, &want);
    drop(k, &x);
}

static void check(const shape *s, lm_dtype act, int shift)
{
    lm_norm_linear_attr attr;
    kernel_case k = case_of(s, &attr);

    if (act == LM_DTYPE_F32) {
        check_on_device(&k, act, 2e-6, shift, true);
    } else { /* few terms, some of which cancel, so that roundings are visible */
        check_on_device(&k, act, s->c > 1000 ? 1e-2 : 4e-2, shift, true);
        check_rounded(&k, act, shift);
    }
}

/* ---- sizes ---- */

static const lm_dtype acts[] = { LM_DTYPE_BF16, LM_DTYPE_F32, LM_DTYPE_F16 };

/* Widths of real models, every number of rows, every function, with and without what is
 * optional. */
static void test_real_sizes(void **state)
{
    static const int64_t widths[] = { 2048, 4096, 8192 }, rows[] = { 1, 2, 3, 4, 5, 8 };
    int turn = 0;
    (void)state;
    for (int c = 0; c < 3; c++)
        for (int n = 0; n < 6; n++, turn++) {
            shape s = { .rows = rows[n], .c = widths[c], .m = 19 + 4 * (turn % 3) };
            s.kind = turn % 2 ? LM_NORM_LAYER : LM_NORM_RMS;
            s.act = (lm_activation)((turn + turn / 4) % 4);
            s.bias = turn % 3 != 1;
            s.residual = turn % 5 < 3;
            s.wide = n % 3 == 0;
            lm_dtype act = widths[c] * rows[n] > 40000 ? LM_DTYPE_BF16 : acts[turn % 3];
            check(&s, act, 0);
        }
}

/* All of them at a small size, each with every function and optional operand. */
static void test_options(void **state)
{
    (void)state;
    for (int i = 0; i < 4 * 2 * 2 * 2 * 3; i++) {
        shape s = { .rows = 1 + i % 8, .c = 64 + 8 * (i % 5), .m = 5 + i % 7 };
        s.act = (lm_activation)(i / 24);
        s.kind = i / 12 % 2 ? LM_NORM_LAYER : LM_NORM_RMS;
        s.bias = i / 6 % 2;
        s.residual = i / 3 % 2;
        s.wide = i % 5 < 2;
        check(&s, acts[i % 3], 0);
    }
}

/* Rows that cannot be read in packs, and pointers off their alignment; widths that end in the
 * middle of a lane's turn. */
static void test_ragged(void **state)
{
    static const int64_t widths[] = { 1, 7, 33, 257, 511, 768, 1001, 2056, 4100 };
    (void)state;
    for (int i = 0; i < 18; i++) {
        shape s = { .rows = 1 + (3 * i) % 8, .c = widths[i % 9], .m = 1 + 6 * (i % 4) };
        s.act = (lm_activation)(i % 4);
        s.kind = i % 3 && s.c > 1 ? LM_NORM_LAYER : LM_NORM_RMS;
        s.bias = i % 2;
        s.residual = i % 5 < 3;
        check(&s, acts[(i + i / 9) % 3], i / 9);
    }
}

/* A mean much larger than the deviation does not reduce the precision. */
static void test_far_mean(void **state)
{
    enum { C = 1000, ROWS = 3 };
    static double x[ROWS * C];
    shape s = { ROWS, C, 21, LM_NORM_LAYER, LM_ACT_NONE, true, false, false };
    lm_norm_linear_attr attr;
    kernel_case k = case_of(&s, &attr);
    (void)state;
    for (int i = 0; i < ROWS * C; i++)
        x[i] = 4096 + (i * 7919 % 997) * 0x1p-9; /* exact in F32 */
    k.in[0] = given(k.in[0], x);
    check_on_device(&k, LM_DTYPE_F32, 1e-5, 0, true);
}

/* ---- the same bits ---- */

/* The outputs of a case, one after the other. */
static void *made(const kernel_case *k, lm_dtype act, size_t *bytes)
{
    instance x;
    build(k, act, act, &x);
    run_on_device(&x, device_kernel(k->op, act), 0);
    size_t y = bytes_of(&x.out[0]), s = k->out[1].kind == ABSENT ? 0 : bytes_of(&x.out[1]);
    char *p = take(y + s);
    memcpy(p, x.out[0].data, y);
    if (s)
        memcpy(p + y, x.out[1].data, s);
    *bytes = y + s;
    drop(k, &x);
    return p;
}

/* The number of multiprocessors changes the assignment of columns to warps; small devices compute
 * eight rows in two passes of four. */
static void test_multiprocessors(void **state)
{
    static const int sms[] = { 4, 1, 3, 17, 132 };
    (void)state;
    for (int i = 0; i < 12; i++) {
        shape s = { .rows = 1 + 7 * i % 8, .c = 300 + 4 * i, .m = 70 + i, .residual = i % 2 };
        lm_norm_linear_attr attr;
        size_t bytes = 0, same = 0;
        void *first = NULL;
        s.act = (lm_activation)(i % 4);
        s.bias = true;
        kernel_case k = case_of(&s, &attr);
        int there = device->main->sms;
        for (int j = 0; j < 5; j++) {
            device->main->sms = sms[j];
            void *p = made(&k, acts[i % 3], j ? &same : &bytes);
            if (!j) {
                first = p;
                continue;
            }
            assert_int_equal(same, bytes);
            assert_memory_equal(p, first, bytes);
            lm_free(p);
        }
        device->main->sms = there;
        lm_free(first);
    }
}

/* A row is the same alone and among others. */
static void test_rows_alone(void **state)
{
    enum { C = 600, M = 37 };
    static double x[8 * C];
    operand o = { .kind = ACT };
    (void)state;
    for (int i = 0; i < 8 * C; i++)
        x[i] = value_at(&o, 3, i);
    for (int64_t rows = 2; rows <= 8; rows++) {
        shape s = { rows, C, M, LM_NORM_LAYER, (lm_activation)(rows % 4), true, false, true };
        lm_norm_linear_attr attr;
        size_t bytes = 0, one = 0;
        kernel_case k = case_of(&s, &attr);
        k.in[0] = given(k.in[0], x);
        char *all = made(&k, LM_DTYPE_BF16, &bytes);
        s.rows = 1;
        for (int64_t row = 0; row < rows; row++) {
            k = case_of(&s, &attr);
            k.in[0] = given(k.in[0], x + row * C);
            void *alone = made(&k, LM_DTYPE_BF16, &one);
            assert_int_equal(bytes, one * (size_t)rows);
            assert_memory_equal(alone, all + (size_t)row * one, one);
            lm_free(alone);
        }
        lm_free(all);
    }
}

/* ---- what is served ---- */

static bool served(int64_t rows, int64_t c, lm_dtype act)
{
    shape s = { rows, c, 6, LM_NORM_RMS, LM_ACT_NONE, false, false, false };
    lm_norm_linear_attr attr;
    kernel_case k = case_of(&s, &attr);
    instance x;
    build(&k, act, act, &x);
    bool yes = device->joins(device, k.op, act, &x.call);
    drop(&k, &x);
    return yes;
}

static void test_served(void **state)
{
    lm_backend *plain = device;
    lm_err e = { 0 };
    (void)state;
    assert_true(served(8, 8192, LM_DTYPE_BF16));
    assert_false(served(9, 16, LM_DTYPE_BF16));
    assert_true(served(8, 4096, LM_DTYPE_F32));
    assert_false(served(8, 8192, LM_DTYPE_F32)); /* more than shared memory holds */
    device_must(cuda_open("tensor", true, &device, &e), &e);
    assert_true(served(4, 8192, LM_DTYPE_BF16));
    assert_false(served(5, 16, LM_DTYPE_BF16)); /* a product of cuBLASLt */
    lm_backend_close(device);
    device = plain;
}

/* The largest number of rows that fits into shared memory. */
static void test_largest(void **state)
{
    int64_t c = (int64_t)(device->main->shared_max / sizeof(float));
    (void)state;
    assert_false(served(1, c, LM_DTYPE_F32));
    while (!served(1, c, LM_DTYPE_F32))
        c--;
    assert_true(c * 4 > (int64_t)device->main->shared_max - 4096);
    shape s = { 1, c, 3, LM_NORM_RMS, LM_ACT_NONE, false, true, false };
    lm_norm_linear_attr attr;
    kernel_case k = case_of(&s, &attr);
    check_on_device(&k, LM_DTYPE_F32, 2e-6, 0, true);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_real_sizes),      cmocka_unit_test(test_options),
        cmocka_unit_test(test_ragged),          cmocka_unit_test(test_far_mean),
        cmocka_unit_test(test_multiprocessors), cmocka_unit_test(test_rows_alone),
        cmocka_unit_test(test_served),          cmocka_unit_test(test_largest),
    };
    return cmocka_run_group_tests(tests, open_device, close_device);
}
