/* SPDX-License-Identifier: Apache-2.0 */
/* The vocabulary head on the CUDA backend: many chunks, rows wider than one stretch of a block,
 * padding, ignored rows, bad numbers. */
#include "cuda_case.h"

#include "graph/op.h"
#include "kernels/head.h"

static const lm_dtype acts[] = { LM_DTYPE_F32, LM_DTYPE_BF16, LM_DTYPE_F16 };

static kernel_case case_of(const lm_head_attr *a, int64_t n, int64_t v, int64_t c, bool grad)
{
    kernel_case k = { .op = "head_loss", .attr = a };
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

static void check(const kernel_case *k, int shift)
{
    for (int t = 0; t < 3; t++)
        check_on_device(k, acts[t], t == 0 ? 2e-6 : 1e-2, shift, true);
}

static void all_shapes(void **state)
{
    const int64_t shapes[][3] = { { 1, 1, 1 },     { 3, 7, 5 },    { 31, 33, 16 },
                                  { 33, 127, 31 }, { 6, 1500, 8 }, { 3, 8999, 8 } };
    const int variants[] = { 3, 3, 3, 3, 1, 1 }; /* wide ones take long under the emulation */
    (void)state;
    for (int i = 0; i < 6; i++)
        for (int v = 0; v < variants[i]; v++) {
            int64_t n = shapes[i][0], vocab = shapes[i][1], c = shapes[i][2];
            lm_head_attr a = { vocab, v == 2 ? 4 : 0, v == 1 ? LM_ACC_ADD : LM_ACC_FIRST,
                               v == 1 ? 1.5 : 0 };
            kernel_case k = case_of(&a, n, vocab + (v ? 0 : 9), c, v != 1 || i < 3);
            k.step.more = v == 2;
            check(&k, v % 2);
            k = with_bias(k);
            check(&k, v % 2);
        }
}

/* Rows of which less than half fits into shared memory, so that gradients replace logits that exist
 * in global memory only.  All the probability is at the position whose logit would be lost last.
 * With two cooperating blocks, and with one. */
static void wide_rows(void **state)
{
    enum { MOST = 119987, C = 2 };
    static double w[MOST * C];
    const int64_t vocab[] = { 58103, MOST };
    const double x[C] = { 1, 0.5 }, target[1] = { 7 };
    (void)state;
    for (int i = 0; i < 2; i++) {
        lm_head_attr a = { vocab[i], 0, LM_ACC_FIRST, 0 };
        kernel_case k = case_of(&a, 1, vocab[i], C, true);
        for (int64_t j = 0; j < vocab[i] * C; j++)
            w[j] = 0.01 * (double)(j % 101);
        w[vocab[i] * 498 / 1000 * C] = 20;
        k.in[0] = given(mat(ACT, 1, C), x);
        k.in[1] = given(mat(ACT, vocab[i], C), w);
        k.in[2] = given(vec(I32, 1), target);
        check_on_device(&k, LM_DTYPE_BF16, 1e-2, 0, true);
    }
}

/* Scratch of the head for these rows, in rows of logits. */
static double rows_at_once(int64_t n, int64_t v, int64_t chunk_rows)
{
    lm_head_attr a = { v, chunk_rows, LM_ACC_FIRST, 0 };
    lm_tensor in[4] = { lm_shape2(LM_DTYPE_BF16, n, 64), lm_shape2(LM_DTYPE_BF16, v, 64),
                        lm_shape1(LM_DTYPE_I32, n), lm_shape1(LM_DTYPE_F32, n) };
    lm_tensor out[3] = { lm_shape1(LM_DTYPE_F32, n), in[0], lm_shape2(LM_DTYPE_F32, v, 64) };
    const lm_step step = { 0 };
    lm_call c = { .attr = &a,
                  .in = in,
                  .n_in = 4,
                  .out = out,
                  .n_out = 3,
                  .step = &step,
                  .stream = device->main };
    return (double)device_kernel("head_loss", LM_DTYPE_BF16)->work(&c, 1) / (4.0 * (double)v);
}

/* No more than the contract allows, few chunks where there are many rows, sizes of 64 bits. */
static void scratch_by_shape(void **state)
{
    static const struct {
        int64_t n, v, asked, rows;
    } want[] = { { 100, 50304, 0, 100 },         { 600, 50304, 0, 512 },
                 { 4096, 50304, 0, 1024 },       { 16380, 50304, 0, 3968 },
                 { 65536, 50304, 0, 4096 },      { 65536, 262144, 0, 4096 },
                 { 65536, 50304, 256, 256 },     { 65536, 50304, 8192, 8192 },
                 { 65536, 50304, 65536, 16384 }, { 1 << 20, 262144, 0, 4096 } };
    (void)state;
    for (size_t i = 0; i < sizeof want / sizeof *want; i++) {
        double rows = rows_at_once(want[i].n, want[i].v, want[i].asked);
        if (rows < (double)want[i].rows || rows > (double)want[i].rows * 1.01 + 32)
            fail_msg("%lld rows of %lld: scratch of %.1f rows, not of %lld", (long long)want[i].n,
                     (long long)want[i].v, rows, (long long)want[i].rows);
    }
}

/* Several chunks accumulate into one dw. */
static void many_chunks(void **state)
{
    lm_head_attr a = { 19, 0, LM_ACC_FIRST, 0 };
    kernel_case k = with_bias(case_of(&a, 530, 19, 5, true));
    (void)state;
    check(&k, 0);
    a.chunk_rows = 100;
    check(&k, 0);
}

/* The gradient of padding is zero after the first micro-batch, and unchanged by accumulation. */
static void padding_is_ignored(void **state)
{
    lm_head_attr a = { 50, 0, LM_ACC_FIRST, 0 };
    kernel_case k = with_bias(case_of(&a, 33, 64, 24, true));
    (void)state;
    check(&k, 0);
    a.acc = LM_ACC_ADD;
    check(&k, 0);
}

/* NaN or infinity in one row: its loss is NaN, the losses of the others are unchanged. */
static void bad_numbers_are_detected(void **state)
{
    enum { N = 5, C = 8, V = 40 };
    double x[N * C];
    (void)state;
    for (int bad = 0; bad < 2; bad++) {
        for (int i = 0; i < N * C; i++)
            x[i] = i == 2 * C + 3 ? (bad ? INFINITY : NAN) : 0.1 * (i % 5);
        lm_head_attr a = { V, 0, LM_ACC_FIRST, 0 };
        kernel_case k = case_of(&a, N, V, C, true);
        k.in[0] = given(mat(ACT, N, C), x);
        k.in[2].fill = ZERO;
        check(&k, 0);
    }
}

/* Logits of 1e4: no overflow, and a loss that is the difference of two logits. */
static void large_logits(void **state)
{
    enum { N = 3, C = 4, V = 33 };
    double x[N * C];
    (void)state;
    for (int i = 0; i < N * C; i++)
        x[i] = i % 2 ? 4096 : -4096;
    lm_head_attr a = { V, 0, LM_ACC_FIRST, 0 };
    kernel_case k = case_of(&a, N, V, C, true);
    k.in[0] = given(mat(ACT, N, C), x);
    check(&k, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(all_shapes),         cmocka_unit_test(many_chunks),
        cmocka_unit_test(padding_is_ignored), cmocka_unit_test(bad_numbers_are_detected),
        cmocka_unit_test(large_logits),       cmocka_unit_test(wide_rows),
        cmocka_unit_test(scratch_by_shape),
    };
    return cmocka_run_group_tests(tests, open_device, close_device);
}
