/* SPDX-License-Identifier: Apache-2.0 */
/* Short convolutions: every level against the definition in double, at starts of documents and in packed columns; the
 * definition against finite differences and by hand; and in pieces from a tail, which give what one call gives. */
#include "kernel_case.h"

#include "kernels/conv.h"

enum { B = 2, T = 150 };

static int32_t starts[B * T];

/* Documents begin at the rows of `start`, which ends with a negative number. */
static void fill_starts(const lm_conv_attr *a, const int *start)
{
    for (int64_t i = 0; i < a->batch * a->seq; i++) {
        starts[i] = 0;
        for (const int *s = start; *s >= 0; s++)
            if (*s <= i % a->seq)
                starts[i] = *s;
    }
}

static lm_conv_attr plain(int64_t seq, int64_t channels, int64_t taps)
{
    return (lm_conv_attr){
        .batch = B, .seq = seq, .columns = channels, .channels = channels, .taps = taps
    };
}

static lm_conv_attr packed(int64_t seq, int64_t taps, int64_t heads, int64_t keys, int64_t key_dim,
                           int64_t value_dim)
{
    lm_conv_attr a = { .batch = B,
                       .seq = seq,
                       .taps = taps,
                       .packed = true,
                       .heads = heads,
                       .key_heads = keys,
                       .key_dim = key_dim,
                       .value_dim = value_dim };
    a.channels = 2 * keys * key_dim + heads * value_dim;
    a.columns = a.channels + heads * value_dim;
    return a;
}

static kernel_case forward_of(const lm_conv_attr *a)
{
    int64_t n = a->batch * a->seq;
    kernel_case k = { .op = "conv", .attr = a, .tol_f32 = 1e-6, .tol_bf16 = 4e-3 };
    k.in[0] = mat(ACT, n, a->columns);
    k.in[1] = mat(F32, a->channels, a->taps);
    k.in[2] = given(vec(I32, n), starts);
    k.out[0] = mat(ACT, n, a->channels);
    if (a->packed)
        k.out[1] = mat(ACT, n, a->heads * a->value_dim);
    return k;
}

static kernel_case backward_of(const kernel_case *f, const char *op)
{
    const lm_conv_attr *a = f->attr;
    bool dx = !strcmp(op, "conv_dx");
    kernel_case b = {
        .op = op, .attr = a, .tol_f32 = dx ? 1e-6 : 1e-5, .tol_bf16 = dx ? 4e-3 : 1e-2
    };
    b.in[0] = f->out[0];
    memcpy(&b.in[1], f->in, 3 * sizeof *f->in);
    if (dx && a->packed)
        b.in[4] = f->out[1];
    b.out[0] = f->in[dx ? 0 : 1];
    b.out[0].data = NULL;
    return b;
}

static void check_all(lm_conv_attr a, const int *start)
{
    fill_starts(&a, start);
    kernel_case f = forward_of(&a), x = backward_of(&f, "conv_dx"), w = backward_of(&f, "conv_dw");
    check_case(&f);
    check_case(&x);
    check_case(&w);
}

static void all_shapes(void **state)
{
    (void)state;
    static const int none[] = { -1 }, some[] = { 1, 2, 63, 64, 65, 130, -1 };
    for (int64_t taps = 1; taps <= LM_CONV_MOST; taps++) {
        check_all(plain(T, 1 + 13 * taps, taps), some);
        check_all(plain(taps, 20, taps), none);
        check_all(packed(T, taps, 4, 2, 9, 5), some);
        check_all(packed(66, taps, 3, 1, 16, 8), none);
    }
}

static void gradients_are_slopes(void **state)
{
    (void)state;
    static const int some[] = { 4, 5, -1 };
    lm_conv_attr a = packed(9, 3, 2, 1, 3, 2);
    fill_starts(&a, some);
    kernel_case f = forward_of(&a), x = backward_of(&f, "conv_dx"), w = backward_of(&f, "conv_dw");
    instance y, dx, dw;
    build(&f, LM_DTYPE_F64, LM_DTYPE_F64, &y);
    x.in[4].kind = ABSENT; /* through y alone */
    x.in[1] = w.in[1] = given(x.in[1], y.in[0].data);
    x.in[2] = w.in[2] = given(x.in[2], y.in[1].data);
    build(&x, LM_DTYPE_F64, LM_DTYPE_F64, &dx);
    build(&w, LM_DTYPE_F64, LM_DTYPE_F64, &dw);
    run(&dx, lm_cpu_kernel("conv_dx", LM_DTYPE_F64, LM_CPU_REF), NULL);
    run(&dw, lm_cpu_kernel("conv_dw", LM_DTYPE_F64, LM_CPU_REF), NULL);
    check_slope(&f, 0, 0, &dx.in[0], &dx.out[0]);
    check_slope(&f, 1, 0, &dx.in[0], &dw.out[0]);
    drop(&f, &y);
    drop(&x, &dx);
    drop(&w, &dw);
}

/* Taps 2 and 3 over 1, 10, 100, of which the last begins a document. */
static void by_hand(void **state)
{
    (void)state;
    lm_conv_attr a = plain(3, 1, 2);
    static const int start[] = { 2, -1 };
    const double x[] = { 1, 10, 100, 0, 0, 0 }, w[] = { 2, 3 }, sum[] = { 3, 32, 300 };
    instance y;
    fill_starts(&a, start);
    kernel_case f = forward_of(&a);
    f.in[0] = given(f.in[0], x);
    f.in[1] = given(f.in[1], w);
    build(&f, LM_DTYPE_F64, LM_DTYPE_F64, &y);
    run(&y, lm_cpu_kernel("conv", LM_DTYPE_F64, LM_CPU_REF), NULL);
    for (int i = 0; i < 3; i++)
        assert_float_equal(lm_get(LM_DTYPE_F64, y.out[0].data, i), sum[i] / (1 + exp(-sum[i])),
                           1e-12);
    drop(&f, &y);
}

/* Key heads of 1 and 2 numbers: columns q0 k0 v0 z0 q1 k1 v1 z1; with a last tap of 1 alone y is SiLU of q0 q1 k0 k1 v0 v1. */
static void packed_columns(void **state)
{
    (void)state;
    lm_conv_attr a = packed(1, 2, 2, 2, 1, 1);
    static const int none[] = { -1 };
    const double x[16] = { 1, 2, 3, 4, 5, 6, 7, 8 }, want[] = { 1, 5, 2, 6, 3, 7 };
    const double w[12] = { 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1 };
    instance y;
    fill_starts(&a, none);
    kernel_case f = forward_of(&a);
    f.in[0] = given(f.in[0], x);
    f.in[1] = given(f.in[1], w);
    build(&f, LM_DTYPE_F64, LM_DTYPE_F64, &y);
    run(&y, lm_cpu_kernel("conv", LM_DTYPE_F64, LM_CPU_REF), NULL);
    for (int i = 0; i < 6; i++)
        assert_float_equal(lm_get(LM_DTYPE_F64, y.out[0].data, i), want[i] / (1 + exp(-want[i])),
                           1e-12);
    assert_float_equal(lm_get(LM_DTYPE_F64, y.out[1].data, 0), 4, 0);
    assert_float_equal(lm_get(LM_DTYPE_F64, y.out[1].data, 1), 8, 0);
    drop(&f, &y);
}

/* Rows of one sequence from `at` on through conv_cached, at a level. */
static void run_piece(const lm_conv_attr *whole, lm_cpu_level level, const float *x, const float *w,
                      int64_t at, int64_t n, float *tail, float *y)
{
    lm_conv_attr a = *whole;
    int32_t used = (int32_t)at, fresh = (int32_t)n;
    a.batch = 1;
    a.seq = n;
    lm_tensor in[7] = {
        { .dtype = LM_DTYPE_F32, .ndim = 2, .dim = { n, a.columns } },
        { .dtype = LM_DTYPE_F32, .ndim = 2, .dim = { a.channels, a.taps } },
        { .dtype = LM_DTYPE_I32, .ndim = 1, .dim = { 1 }, .data = &used },
        { .dtype = LM_DTYPE_I32, .ndim = 1, .dim = { 1 }, .data = &fresh },
    };
    lm_tensor out[3] = {
        { .dtype = LM_DTYPE_F32, .ndim = 2, .dim = { n, a.channels }, .data = y },
        { .dtype = LM_DTYPE_F32, .ndim = 3, .dim = { 1, a.taps - 1, a.channels }, .data = tail },
    };
    in[0].data = (void *)(uintptr_t)(x + at * a.columns);
    in[1].data = (void *)(uintptr_t)w;
    instance i = { .call = { .attr = &a, .in = in, .n_in = 7, .out = out, .n_out = 3 } };
    run(&i, lm_cpu_kernel("conv_cached", LM_DTYPE_F32, level), pool_of(2));
}

/* Every cut of 9 rows into two pieces, and all in single rows; the tail is not read before it is written. */
static void pieces_make_the_whole(void **state)
{
    (void)state;
    enum { ROWS = 9, C = 20 };
    lm_conv_attr a = plain(ROWS, C, 4);
    float x[ROWS * C], w[C * 4], tail[3 * C], whole[ROWS * C], y[ROWS * C];
    for (int i = 0; i < ROWS * C; i++)
        x[i] = (float)bell(lm_philox((uint64_t)i, 1, 3));
    for (int i = 0; i < C * 4; i++)
        w[i] = (float)bell(lm_philox((uint64_t)i, 2, 3));
    for (int level = 0; level <= (int)lm_cpu_detect(); level++) {
        memset(tail, 0xff, sizeof tail);
        run_piece(&a, (lm_cpu_level)level, x, w, 0, ROWS, tail, whole);
        for (int64_t cut = 1; cut < ROWS; cut++) {
            memset(tail, 0xff, sizeof tail);
            run_piece(&a, (lm_cpu_level)level, x, w, 0, cut, tail, y);
            run_piece(&a, (lm_cpu_level)level, x, w, cut, ROWS - cut, tail, y + cut * C);
            assert_memory_equal(y, whole, sizeof y);
        }
        memset(tail, 0xff, sizeof tail);
        for (int64_t t = 0; t < ROWS; t++)
            run_piece(&a, (lm_cpu_level)level, x, w, t, 1, tail, y + t * C);
        assert_memory_equal(y, whole, sizeof y);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(all_shapes),
        cmocka_unit_test(gradients_are_slopes),
        cmocka_unit_test(by_hand),
        cmocka_unit_test(packed_columns),
        cmocka_unit_test(pieces_make_the_whole),
    };
    return cmocka_run_group_tests_name("kernels_conv", tests, NULL, NULL);
}
