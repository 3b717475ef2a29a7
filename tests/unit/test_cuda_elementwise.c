/* SPDX-License-Identifier: Apache-2.0 */
/* Maps, dropout, casts and rotations on the CUDA backend: cases that the registry's examples lack:
 * odd alignments, results in the memory of operands, draws that begin inside a block, extreme
 * numbers. */
#include "cuda_case.h"

#include "kernels/elementwise.h"
#include "kernels/noise.h"
#include "kernels/rope.h"

static const lm_dtype acts[] = { LM_DTYPE_F32, LM_DTYPE_BF16, LM_DTYPE_F16 };
static const double tolerance[] = { 1e-6, 4e-3, 1e-3 };
static const int64_t counts[] = { 1, 2, 7, 8, 9, 64, 257, 4095, 5000 };

static void check_all(const kernel_case *k)
{
    for (int t = 0; t < 3; t++)
        for (int shift = 0; shift < 2; shift++)
            check_on_device(k, acts[t], tolerance[t], shift, true);
}

static void maps(void **state)
{
    (void)state;
    for (int i = 0; i < 9; i++) {
        for (int exact = 0; exact < 2; exact++) {
            lm_gelu_attr a = { exact };
            kernel_case k = { .op = "gelu", .attr = &a };
            k.in[0] = k.out[0] = vec(ACT, counts[i]);
            check_all(&k);
            k.op = "gelu_dx";
            k.in[1] = vec(ACT, counts[i]);
            check_all(&k);
            k.out[0] = over(vec(ACT, counts[i]), 0);
            check_all(&k);
        }
        for (int alias = 0; alias < 3; alias++) {
            kernel_case k = { .op = "add" };
            k.in[0] = k.in[1] = k.out[0] = vec(ACT, counts[i]);
            k.out[0].alias = alias;
            check_all(&k);
        }
    }
    kernel_case k = { .op = "add" }; /* more than one round of a grid's blocks */
    k.in[0] = k.in[1] = k.out[0] = vec(ACT, 66000);
    check_on_device(&k, LM_DTYPE_F32, 1e-6, 1, true);
}

/* For large arguments the functions give 0 and 1, not NaN; NaN stays NaN. */
static void extremes(void **state)
{
    (void)state;
    double x[10] = { -1e30, -3e4, -200, -90, -20, 20, 90, 200, 3e4, NAN }, ones[20];
    for (int i = 0; i < 20; i++)
        ones[i] = 1;
    for (int exact = 0; exact < 2; exact++) {
        lm_gelu_attr a = { exact };
        kernel_case k = { .op = "gelu", .attr = &a };
        k.in[0] = given(mat(ACT, 1, 10), x);
        k.out[0] = mat(ACT, 1, 10);
        check_on_device(&k, LM_DTYPE_F32, 1e-6, 0, true);
        check_on_device(&k, LM_DTYPE_BF16, 4e-3, 0, true);
        k.op = "gelu_dx";
        k.in[0] = given(mat(ACT, 1, 10), ones);
        k.in[1] = given(mat(ACT, 1, 10), x);
        check_on_device(&k, LM_DTYPE_F32, 1e-6, 0, true);
    }
    kernel_case k = { .op = "swiglu" };
    memcpy(ones, x, sizeof x); /* the gates; up is 1 */
    k.in[0] = given(mat(ACT, 1, 20), ones);
    k.out[0] = mat(ACT, 1, 10);
    check_on_device(&k, LM_DTYPE_F32, 1e-6, 0, true);
}

/* Activations of infinity, for 16-bit types in their own arithmetic: infinity or NaN, as in the
 * definition; other numbers of the pack are not affected. */
static void infinities(void **state)
{
    const double x[8] = { 1, INFINITY, -1, -INFINITY, 3, NAN, -3, 0 }, up[8] = { 1, 1, 1, 1 };
    double gates[8];
    (void)state;
    for (int t = 0; t < 3; t++) {
        for (int exact = 0; exact < 2; exact++) {
            lm_gelu_attr a = { exact };
            kernel_case k = { .op = "gelu", .attr = &a };
            k.in[0] = given(vec(ACT, 8), x);
            k.out[0] = vec(ACT, 8);
            check_on_device(&k, acts[t], tolerance[t], 0, true);
        }
        for (int i = 0; i < 8; i++)
            gates[i] = i < 4 ? x[i] : up[i - 4];
        kernel_case k = { .op = "swiglu" };
        k.in[0] = given(mat(ACT, 1, 8), gates);
        k.out[0] = mat(ACT, 1, 4);
        check_on_device(&k, acts[t], tolerance[t], 0, true);
    }
}

/* Each number by itself, also where the function is small. */
static void exact_gelu(void **state)
{
    (void)state;
    lm_gelu_attr a = { true };
    double one = 1;
    for (double x = -5.3; x < 6; x += 0.171) {
        kernel_case k = { .op = "gelu", .attr = &a };
        k.in[0] = given(vec(ACT, 1), &x);
        k.out[0] = vec(ACT, 1);
        check_on_device(&k, LM_DTYPE_F32, 3e-6, 0, true);
        check_on_device(&k, LM_DTYPE_BF16, 4e-3, 0, true);
        k.op = "gelu_dx";
        k.in[1] = k.in[0];
        k.in[0] = given(vec(ACT, 1), &one);
        check_on_device(&k, LM_DTYPE_F32, 3e-6, 0, true);
        check_on_device(&k, LM_DTYPE_BF16, 4e-3, 0, true);
    }
}

static void swiglu(void **state)
{
    (void)state;
    const int64_t widths[] = { 1, 3, 8, 40, 257, 700 };
    for (int w = 0; w < 6; w++) {
        kernel_case k = { .op = "swiglu" };
        k.in[0] = mat(ACT, 11, 2 * widths[w]);
        k.out[0] = mat(ACT, 11, widths[w]);
        check_all(&k);
        k.op = "swiglu_dx";
        k.in[1] = k.out[0] = k.in[0];
        k.in[0] = mat(ACT, 11, widths[w]);
        check_all(&k);
    }
}

/* The mask equals that of the definition in each element, for any position of the first draw in a
 * block. */
static void dropout(void **state)
{
    (void)state;
    for (int i = 0; i < 8; i++) {
        for (int v = 0; v < 4; v++) {
            lm_dropout_attr a = { .p = v == 3 ? 0 : 0.3, .site = 5 + v };
            kernel_case k = { .op = "dropout", .attr = &a };
            k.step = (lm_step){ .seed = 0x123456789abcdef0u + (uint64_t)v,
                                .step = v == 2 ? INT64_C(1) << 47 : v, /* an index beyond 2^64 */
                                .micro = 3 * v };
            k.in[0] = vec(ACT, counts[i]);
            k.out[0] = vec(ACT, counts[i]);
            check_all(&k);
            k.out[0] = over(k.out[0], 0);
            check_all(&k);
            /* two ranges of a piece of a whole */
            a.origin = (lm_origin){ .count = 2 * counts[i] + 9,
                                    .level = { { .period = counts[i] + 4,
                                                 .from0 = 1,
                                                 .count0 = (counts[i] + 1) / 2,
                                                 .from1 = (counts[i] + 1) / 2 + 3,
                                                 .count1 = counts[i] / 2 } } };
            check_all(&k);
        }
    }
}

/* Noise in a part of a whole of one piece more. */
static void noise_of_a_part(void **state)
{
    (void)state;
    for (int i = 0; i < 8; i++)
        for (int kind = 0; kind < 3; kind++) {
            lm_noise_attr a = { .amount = 0.5,
                                .kind = (lm_noise_kind)kind,
                                .site = 2,
                                .origin = { .count = 3 * counts[i] + 14,
                                            .level = { { .period = counts[i] + 7,
                                                         .from0 = 5,
                                                         .count0 = counts[i] } } } };
            kernel_case k = { .op = "noise", .attr = &a, .step = { .seed = 7, .step = 3 } };
            k.in[0] = k.out[0] = vec(ACT, counts[i]);
            check_all(&k);
        }
}

/* One array cast to one type: the bits of lm_convert, except the payload of NaN. */
static void check_cast(lm_dtype from, lm_dtype to, int64_t n, int shift)
{
    static const double special[] = { 0,     -0.0,  NAN,    INFINITY,   -INFINITY, 65504,
                                      65519, 65520, 1e9,    3.3e38,     6e-8,      2.9e-8,
                                      3e-8,  1e-40, -1e-44, 1.00390625, 1.01171875 };
    enum { N_SPECIAL = sizeof special / sizeof *special };
    kernel_case k = { .op = "cast" };
    instance x = { 0 };
    x.in[0] = (lm_tensor){ .dtype = from, .ndim = 1, .dim = { n } };
    x.out[0] = (lm_tensor){ .dtype = to, .ndim = 1, .dim = { n } };
    x.in[0].data = take((size_t)n * lm_dtype_size(from));
    x.out[0].data = take((size_t)n * lm_dtype_size(to));
    x.call = (lm_call){ .in = x.in, .n_in = 6, .out = x.out, .n_out = 4, .step = &k.step };
    for (int64_t i = 0; i < n; i++)
        lm_set(from, x.in[0].data, i,
               i < N_SPECIAL ? special[i] : bell(lm_philox((uint64_t)i, 1, 2)));
    run_on_device(&x, device_kernel("cast", from), shift);
    for (int64_t i = 0; i < n; i++) {
        unsigned char want[8];
        size_t size = lm_dtype_size(to);
        char *got = (char *)x.out[0].data + (size_t)i * size;
        lm_convert(from, (char *)x.in[0].data + (size_t)i * lm_dtype_size(from), to, want, 1);
        if (memcmp(want, got, size) && !(isnan(lm_get(to, want, 0)) && isnan(lm_get(to, got, 0))))
            fail_msg("%s to %s: %g became %g, not %g", lm_dtype_name(from), lm_dtype_name(to),
                     lm_get(from, x.in[0].data, i), lm_get(to, got, 0), lm_get(to, want, 0));
    }
    lm_free(x.in[0].data);
    lm_free(x.out[0].data);
}

static void casts(void **state)
{
    (void)state;
    for (int i = 0; i < 9; i++)
        for (int n = 0; n < 9; n++)
            for (int shift = 0; shift < 2; shift++)
                check_cast(acts[i / 3], acts[i % 3], counts[n], shift);
}

static void rows(void **state)
{
    (void)state;
    const int64_t widths[] = { 1, 3, 8, 40, 257 };
    for (int w = 0; w < 5; w++) {
        kernel_case k = { .op = "rows" };
        int64_t n = w ? 50 : 2100; /* more than one round of a grid's blocks */
        k.in[0] = mat(ACT, 37, widths[w]);
        k.in[1] = filled(vec(I32, n), IDS, 37);
        k.out[0] = mat(ACT, n, widths[w]);
        check_all(&k);
    }
}

static void rope(void **state)
{
    (void)state;
    const lm_rope_attr shapes[] = { { 2, 1, 64, 64, false }, { 3, 3, 64, 32, true },
                                    { 4, 2, 10, 6, false },  { 1, 1, 2, 2, true },
                                    { 2, 2, 16, 0, false },  { 12, 4, 128, 128, false } };
    for (int i = 0; i < 12; i++) {
        const lm_rope_attr *a = &shapes[i % 6];
        kernel_case k = { .op = "rope", .attr = a };
        int64_t n = a->head_dim == 2 ? 2100 : 9; /* more than one round of a grid's blocks */
        k.in[0] = mat(ACT, n, (a->heads + 2 * a->kv_heads) * a->head_dim);
        k.in[1] = filled(vec(I32, n), IDS, 40);
        k.in[2] = mat(F32, 40, a->rotary_dim ? a->rotary_dim : 1);
        k.out[0] = k.in[0];
        k.out[0].alias = i / 6; /* in place */
        check_all(&k);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(maps),
        cmocka_unit_test(extremes),
        cmocka_unit_test(infinities),
        cmocka_unit_test(exact_gelu),
        cmocka_unit_test(swiglu),
        cmocka_unit_test(dropout),
        cmocka_unit_test(noise_of_a_part),
        cmocka_unit_test(casts),
        cmocka_unit_test(rows),
        cmocka_unit_test(rope),
    };
    return cmocka_run_group_tests(tests, open_device, close_device);
}
