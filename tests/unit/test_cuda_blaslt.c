/* SPDX-License-Identifier: Apache-2.0 */
/* The queries to cuBLASLt for the products of the CUDA backend, the cache of its answers, and the
 * products computed by other kernels. */
#include "gemm_case.h"

static void product_of(int64_t m, int64_t n, int64_t k, lm_dtype d, bool once)
{
    product p = { .g = { .m = m, .n = n, .k = k, .ab = d, .cd = d },
                  .once = once,
                  .tol = allowed(d, d, "") };
    check_product(&p); /* three times, unless once: in three orders of threads */
}

static void test_choices_are_kept(void **state)
{
    (void)state;
    open_path("plain");
    product_of(16, 16, 16, LM_DTYPE_F32, true);
    assert_int_equal(counts_now().shapes, 0);
    lm_backend_close(device);

    open_path("tensor");
    product_of(16, 24, 8, LM_DTYPE_BF16, false);
    lm_lt_counts c = counts_now();
    assert_int_equal(c.shapes, 1);
    assert_int_equal(c.hits, 2);
    product_of(16, 24, 8, LM_DTYPE_F32, false); /* another type is another shape */
    product_of(16, 24, 8, LM_DTYPE_BF16, false);
    c = counts_now();
    assert_int_equal(c.shapes, 2);
    assert_int_equal(c.hits, 7);
    for (int64_t i = 0; i < 511; i++) /* one more than the cache holds: it is emptied */
        product_of(6 + i, 1, 1, LM_DTYPE_F32, true);
    product_of(16, 24, 8, LM_DTYPE_BF16, true);
    c = counts_now();
    assert_int_equal(c.shapes, 2 + 511 + 1);
    assert_int_equal(c.hits, 7);
    assert_int_equal(c.unserved_shapes, 0);
    assert_int_equal(c.unserved, 0);
    lm_backend_close(device);
}

/* A product without an algorithm of cuBLASLt is computed by the plain kernels and counted. */
static void test_unserved(void **state)
{
    void (*picky)(int) = NULL;
    (void)state;
    open_path("tensor");
    if (!get_symbol("lm_emu_picky", &picky))
        skip();
    picky(1); /* rows must be multiples of 16 bytes */
    product_of(16, 24, 17, LM_DTYPE_BF16, false);
    product_of(16, 24, 8, LM_DTYPE_BF16, false);
    lm_lt_counts c = counts_now();
    picky(0);
    assert_int_equal(c.shapes, 2);
    assert_int_equal(c.unserved_shapes, 1);
    assert_int_equal(c.unserved, 3);
    lm_backend_close(device);
}

/* Forward and derivative have separate entries in the cache; the address of z may change between
 * calls. */
static void test_functions_kept(void **state)
{
    product forward = {
        .g = { .m = 16, .n = 64, .k = 32, .ab = LM_DTYPE_BF16, .cd = LM_DTYPE_BF16 },
        .act = LM_ACT_GELU,
        .want_z = true,
        .once = true,
        .tol = 4e-3
    };
    product slope = forward;
    char other[16 * 64 * 2 + GUARD] = { 0 };
    (void)state;
    slope.want_z = false, slope.slope = true;
    open_path("tensor");
    check_product(&forward);
    check_product(&slope);
    void *taken = device_twin(other, sizeof other, 0); /* where z just was */
    void *more = device_twin(other, sizeof other, 0);
    check_product(&forward);
    check_product(&slope);
    device_drop(taken, sizeof other, 0);
    device_drop(more, sizeof other, 0);
    if (!cuda_is_real())
        assert_int_equal(counts_now().shapes, 2);
    close_path("tensor");
}

/* If cuBLASLt lacks an epilogue, it still computes the product; it is asked for the epilogue
 * once. */
static void test_epilogues_refused(void **state)
{
    void (*picky)(int) = NULL;
    types t = narrow_types[1];
    static const int64_t shape[] = { 16, 64, 32 };
    (void)state;
    open_path("tensor");
    if (!get_symbol("lm_emu_picky", &picky))
        skip();
    for (int turn = 1; turn < 6; turn += 2) /* the tanh form: z, slope, neither; no odd pitches */
        check_function(shape, true, t, (int[]){ 1, 5, 15 }[turn / 2], "tensor");
    lm_lt_counts c = counts_now();
    assert_int_equal(c.refused, 0);
    assert_null(device->shortfall(device));
    assert_int_equal(c.shapes, 3);
    assert_int_equal(c.hits, 6);
    lm_backend_close(device);

    open_path("tensor");
    picky(2);
    check_function(shape, true, t, 1, "tensor");
    c = counts_now();
    assert_int_equal(c.refused, 3);
    assert_int_equal(c.refused_shapes, 1);
    assert_int_equal(c.unserved, 0);
    assert_int_equal(c.shapes, 2); /* with and without */
    assert_string_equal(device->shortfall(device),
                        "cuBLASLt served 1 shapes of products, not 0 others, which plain kernels "
                        "made, and 1 only without the function or sums behind them");
    walk_functions("tensor");
    walk_sums("tensor");
    picky(0);
    c = counts_now();
    assert_int_equal(c.unserved, 0);
    assert_int_equal(c.unserved_shapes, 0);
    lm_backend_close(device);

    open_path("tensor");
    picky(1); /* neither the epilogue nor the product */
    check_function((int64_t[]){ 16, 24, 17 }, true, t, 1, "tensor");
    picky(0);
    c = counts_now();
    assert_int_equal(c.refused, 3);
    assert_int_equal(c.unserved, 3);
    assert_int_equal(c.unserved_shapes, 1);
    lm_backend_close(device);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_choices_are_kept),
        cmocka_unit_test(test_unserved),
        cmocka_unit_test(test_functions_kept),
        cmocka_unit_test(test_epilogues_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
