/* SPDX-License-Identifier: Apache-2.0 */
/* The norm family on the CUDA backend in every shape of its launches: rows of a warp, of a block,
 * of a large block, and rows that do not fit registers; whole packs and single numbers. */
#include "cuda_cards.h"

#include "kernels/norm.h"

static const lm_dtype acts[] = { LM_DTYPE_F32, LM_DTYPE_BF16, LM_DTYPE_F16 };

/* bf16: 8 bits; f16: 11. */
static double tolerance(lm_dtype act)
{
    return act == LM_DTYPE_F32 ? 1e-6 : act == LM_DTYPE_BF16 ? 8e-3 : 1e-3;
}

static const double *stats_like(lm_norm_kind kind)
{
    static double stat[2 * 5000];
    for (int i = 0; i < 5000; i++) {
        stat[2 * i] = kind == LM_NORM_LAYER ? 0.25 * (i % 5 - 2) : 0;
        stat[2 * i + 1] = 0.5 + i % 3;
    }
    return stat;
}

static void check_norm(int64_t n, int64_t c, int variant, int shift, lm_dtype act)
{
    bool layer = variant & 1, residual = variant & 2;
    lm_norm_attr a = { layer ? LM_NORM_LAYER : LM_NORM_RMS, 1e-5, LM_ACC_FIRST, false };
    kernel_case k = { .op = "norm", .attr = &a };
    k.in[0] = mat(ACT, n, c);
    k.in[1] = vec(F32, c);
    k.in[2] = vec(layer ? F32 : ABSENT, c);
    k.in[3] = mat(residual ? ACT : ABSENT, n, c);
    k.out[0] = mat(ACT, n, c);
    k.out[1] = mat(F32, n, 2);
    k.out[2] = mat(residual ? ACT : ABSENT, n, c);
    if (variant == 2)
        k.out[2] = over(k.out[2], 0); /* s over x */
    if (variant == 3)
        k.out[2] = over(k.out[2], 3); /* s over r */
    check_on_device(&k, act, tolerance(act), shift, true);
}

static void check_norm_dx(int64_t n, int64_t c, int variant, int shift, lm_dtype act)
{
    lm_norm_attr a = { variant & 1 ? LM_NORM_LAYER : LM_NORM_RMS, 1e-5, LM_ACC_FIRST, false };
    kernel_case k = { .op = "norm_dx", .attr = &a };
    k.in[0] = k.in[1] = mat(ACT, n, c);
    k.in[2] = vec(F32, c);
    k.in[3] = given(mat(F32, n, 2), stats_like(a.kind));
    k.in[4] = mat(variant & 2 ? ACT : ABSENT, n, c);
    k.out[0] = mat(ACT, n, c);
    if (variant > 1)
        k.out[0] = over(k.out[0], variant == 2 ? 0 : 4);
    check_on_device(&k, act, 2 * tolerance(act), shift, true);
}

static void check_norm_dw(int64_t n, int64_t c, int variant, int shift, lm_dtype act)
{
    bool layer = variant & 1;
    lm_norm_attr a = { layer ? LM_NORM_LAYER : LM_NORM_RMS, 1e-5, LM_ACC_FIRST, false };
    kernel_case k = { .op = "norm_dw", .attr = &a, .step = { .more = variant & 2 } };
    k.in[0] = k.in[1] = mat(ACT, n, c);
    k.in[2] = given(mat(F32, n, 2), stats_like(a.kind));
    k.out[0] = vec(F32, c);
    k.out[1] = vec(layer ? F32 : ABSENT, c);
    check_on_device(&k, act, act == LM_DTYPE_F32 ? 1e-6 : 8e-3, shift, true);
}

/* Variants: bit 0 LayerNorm, with its bias; then nothing, ds over dy, ds over dres, dres apart. */
static kernel_case joined(const lm_norm_attr *a, int64_t n, int64_t c, int variant)
{
    bool layer = a->kind == LM_NORM_LAYER;
    kernel_case k = { .op = "norm_dx_dw", .attr = a };
    k.in[0] = k.in[1] = mat(ACT, n, c);
    k.in[2] = vec(F32, c);
    k.in[3] = given(mat(F32, n, 2), stats_like(a->kind));
    k.in[4] = mat(variant > 3 ? ACT : ABSENT, n, c);
    k.out[0] = mat(ACT, n, c);
    if (variant / 2 == 1 || variant / 2 == 2)
        k.out[0] = over(k.out[0], variant / 2 == 1 ? 0 : 4);
    k.out[1] = vec(F32, c);
    k.out[2] = vec(layer ? F32 : ABSENT, c);
    return k;
}

static lm_norm_attr joined_attr(int variant)
{
    return (lm_norm_attr){ variant & 1 ? LM_NORM_LAYER : LM_NORM_RMS, 1e-5, LM_ACC_FIRST, false };
}

static void check_joined(int64_t n, int64_t c, int variant, int more, int shift, lm_dtype act)
{
    lm_norm_attr a = joined_attr(variant);
    kernel_case k = joined(&a, n, c, variant);
    k.step.more = more;
    check_on_device(&k, act, 2 * tolerance(act), shift, true);
}

/* The gradient of the row has the bits that norm_dx gives it. */
static void check_same_row(int64_t n, int64_t c, int variant, int shift, lm_dtype act)
{
    lm_norm_attr a = joined_attr(variant);
    kernel_case k = joined(&a, n, c, variant), dx = k;
    instance both, alone;
    dx.op = "norm_dx";
    dx.out[1].kind = dx.out[2].kind = ABSENT;
    build(&k, act, act, &both);
    build(&dx, act, act, &alone);
    run_on_device(&both, device_kernel(k.op, act), shift);
    run_on_device(&alone, device_kernel(dx.op, act), shift);
    assert_memory_equal(both.out[0].data, alone.out[0].data, bytes_of(&both.out[0]));
    drop(&k, &both);
    drop(&dx, &alone);
}

static void joined_gradients(void **state)
{
    static const struct {
        int64_t n, c;
    } shapes[] = { { 11, 1 },   { 40, 8 },    { 9, 129 },   { 37, 256 }, { 21, 768 }, { 70, 1000 },
                   { 5, 2047 }, { 7, 2048 },  { 3, 4096 },  { 3, 5000 }, { 2, 8192 }, { 2, 8200 },
                   { 2, 9001 }, { 2, 16384 }, { 2, 16391 }, { 1, 4096 }, { 1, 28000 } };
    (void)state;
    for (int i = 0; i < 17; i++)
        for (int t = 0; t < 3; t++) {
            int variant = (3 * i + t) % 8;
            check_joined(shapes[i].n, shapes[i].c, variant, i % 2, 0, acts[t]);
            check_same_row(shapes[i].n, shapes[i].c, variant, 0, acts[t]);
            if (shapes[i].c < 3000) {
                check_joined(shapes[i].n, shapes[i].c, variant ^ 1, t % 2, 1, acts[t]);
                check_same_row(shapes[i].n, shapes[i].c, variant ^ 1, 1, acts[t]);
            }
        }
}

/* Rows whose sums do not fit into the shared memory of a block are not joined. */
static void too_wide_to_join(void **state)
{
    lm_tensor in[5] = { 0 }, out[3] = { 0 };
    lm_norm_attr a = joined_attr(1);
    lm_call c = { .attr = &a, .in = in, .n_in = 5, .out = out, .n_out = 3 };
    (void)state;
    for (int wide = 0; wide < 2; wide++) {
        int64_t width = wide ? (int64_t)1 << 20 : 4096;
        in[0] = in[1] = out[0] =
            (lm_tensor){ .dtype = LM_DTYPE_BF16, .ndim = 2, .dim = { 64, width } };
        in[2] = out[1] = out[2] = (lm_tensor){ .dtype = LM_DTYPE_F32, .ndim = 1, .dim = { width } };
        in[3] = (lm_tensor){ .dtype = LM_DTYPE_F32, .ndim = 2, .dim = { 64, 2 } };
        assert_int_equal(device->joins(device, "norm_dx_dw", LM_DTYPE_BF16, &c), !wide);
    }
}

static void every_launch(void **state)
{
    static const int64_t widths[] = { 8,    31,   120,  127,   255,   256,   512,  1000,
                                      1024, 4096, 8192, 16384, 20000, 33000, 40000 };
    (void)state;
    for (int w = 0; w < 15; w++) {
        for (int t = 0; t < 3; t++) {
            int variant = (w + t) % 4;
            int64_t n = widths[w] < 300 ? 11 : 2;
            check_norm(n, widths[w], variant, 0, acts[t]);
            check_norm_dx(n, widths[w], variant, 0, acts[t]);
            check_norm_dw(n, widths[w], variant, 0, acts[t]);
            if (widths[w] < 9000) {
                check_norm(n, widths[w], variant, 1, acts[t]);
                check_norm_dx(n, widths[w], variant, 1, acts[t]);
                check_norm_dw(n, widths[w], variant, 1, acts[t]);
            }
        }
    }
}

/* More rows than chunks have at least, and more than blocks do. */
static void many_rows(void **state)
{
    (void)state;
    for (int t = 0; t < 3; t++) {
        check_norm_dw(4200, 8, 1, 0, acts[t]);
        check_norm(4200, 3, 0, 0, acts[t]);
        check_norm_dx(4200, 3, 0, 0, acts[t]);
        check_joined(4200, 8, 1 + 2 * t, 0, 0, acts[t]); /* each group has several rows */
        check_joined(4200, 3, 2 * t, 1, 0, acts[t]);
    }
}

/* The order of a sum over rows depends on the shape alone, not on the card. */
static void sums_do_not_depend_on_the_card(void **state)
{
    (void)state;
    for (int t = 0; t < 2; t++) {
        lm_norm_attr a = joined_attr(1);
        kernel_case k = joined(&a, 1100, t ? 24 : 5, 1), w = { .op = "norm_dw", .attr = &a };
        w.in[0] = w.in[1] = k.in[0];
        w.in[2] = k.in[3];
        w.out[0] = w.out[1] = k.out[1];
        check_on_cards(&k, acts[t]);
        check_on_cards(&w, acts[t]);

        lm_head_norm_attr h = { 3, 1, 16, 1e-6, LM_ACC_FIRST, false };
        kernel_case d = { .op = "head_norm_dw", .attr = &h };
        d.in[0] = d.in[1] = mat(ACT, 300, 5 * 16);
        d.in[2] = filled(mat(F32, 300, 4), POSITIVE, 0);
        d.out[0] = d.out[1] = vec(F32, 16);
        check_on_cards(&d, acts[t]);
    }
}

/* A mean a thousand times the deviation does not reduce the precision of the normed row. */
static void a_large_mean(void **state)
{
    enum { N = 3, C = 700 };
    static double x[N * C];
    (void)state;
    for (int i = 0; i < N * C; i++)
        x[i] = 1000 + (i * 37 % 256 - 128) / 128.0; /* exact in F32 */
    lm_norm_attr a = { LM_NORM_LAYER, 1e-5, LM_ACC_FIRST, false };
    kernel_case k = { .op = "norm", .attr = &a };
    k.in[0] = given(mat(ACT, N, C), x);
    k.in[1] = vec(F32, C);
    k.out[0] = mat(ACT, N, C);
    k.out[1] = mat(F32, N, 2);
    check_on_device(&k, LM_DTYPE_F32, 1e-6, 0, true);
}

static void bad_numbers_stay_in_their_row(void **state)
{
    enum { N = 5, C = 300 };
    static double x[N * C];
    (void)state;
    for (int i = 0; i < N * C; i++)
        x[i] = i == 2 * C + 3 ? NAN : 0.1 * (i % 5);
    for (int kind = 0; kind < 2; kind++) {
        lm_norm_attr a = { (lm_norm_kind)kind, 1e-5, LM_ACC_FIRST, false };
        kernel_case k = { .op = "norm", .attr = &a };
        k.in[0] = given(mat(ACT, N, C), x);
        k.in[1] = vec(F32, C);
        k.out[0] = mat(ACT, N, C);
        k.out[1] = mat(F32, N, 2);
        check_on_device(&k, LM_DTYPE_F32, 1e-6, 0, true);
    }
}

static void check_heads(int64_t n, lm_head_norm_attr a, int shift, lm_dtype act)
{
    int64_t all = (a.heads + 2 * a.kv_heads) * a.head_dim;
    kernel_case k = { .op = "head_norm", .attr = &a };
    k.in[0] = mat(ACT, n, all);
    k.in[1] = k.in[2] = vec(F32, a.head_dim);
    k.out[0] = mat(ACT, n, all);
    k.out[1] = mat(F32, n, a.heads + a.kv_heads);
    check_on_device(&k, act, tolerance(act), shift, true);

    kernel_case d = { .op = "head_norm_dx", .attr = &a };
    d.in[0] = d.in[1] = mat(ACT, n, all);
    d.in[2] = d.in[3] = vec(F32, a.head_dim);
    d.in[4] = filled(mat(F32, n, a.heads + a.kv_heads), POSITIVE, 0);
    d.out[0] = over(mat(ACT, n, all), 0);
    check_on_device(&d, act, 2 * tolerance(act), shift, true);

    kernel_case w = { .op = "head_norm_dw", .attr = &a, .step = { .more = shift } };
    w.in[0] = w.in[1] = mat(ACT, n, all);
    w.in[2] = filled(mat(F32, n, a.heads + a.kv_heads), POSITIVE, 0);
    w.out[0] = w.out[1] = vec(F32, a.head_dim);
    check_on_device(&w, act, act == LM_DTYPE_F32 ? 1e-6 : 8e-3, shift, true);
}

static void head_norms(void **state)
{
    static const int64_t dims[] = { 2, 5, 16, 64, 80, 100, 128, 192, 256, 264 };
    (void)state;
    for (int i = 0; i < 10; i++)
        for (int t = 0; t < 3; t++) {
            lm_head_norm_attr a = { 1 + i % 4, 1 + i % 2, dims[i], 1e-6, LM_ACC_FIRST, false };
            check_heads(i % 3 ? 37 : 3, a, 0, acts[t]);
            check_heads(5, a, 1, acts[t]);
        }
    check_heads(4500, (lm_head_norm_attr){ 1, 1, 4, 1e-6, LM_ACC_FIRST, false }, 0, LM_DTYPE_F32);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_launch),     cmocka_unit_test(many_rows),
        cmocka_unit_test(a_large_mean),     cmocka_unit_test(bad_numbers_stay_in_their_row),
        cmocka_unit_test(head_norms),       cmocka_unit_test(joined_gradients),
        cmocka_unit_test(too_wide_to_join), cmocka_unit_test(sums_do_not_depend_on_the_card),
    };
    return cmocka_run_group_tests(tests, open_device, close_device);
}
