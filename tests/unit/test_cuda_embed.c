/* SPDX-License-Identifier: Apache-2.0 */
/* Embeddings on the CUDA backend: lookup, and both forms of the gradient, over tables and rows
 * that take several passes and tiles of the sort. */
#include "cuda_cards.h"

#include "kernels/embed.h"

static lm_backend *fixed, *quick; /* deterministic, and not */

static void lookup(void **state)
{
    (void)state;
    static const lm_dtype acts[] = { LM_DTYPE_F32, LM_DTYPE_BF16, LM_DTYPE_F16 };
    const int64_t widths[] = { 1, 3, 8, 33, 320 };
    lm_embed_attr a = { LM_ACC_FIRST, LM_ACC_FIRST, 0 };
    device = fixed;
    for (int i = 0; i < 5 * 2 * 3 * 2; i++) {
        bool places = i / 5 % 2;
        int64_t c = widths[i % 5], n = c == 3 ? 2100 : 131; /* 2100: some blocks have two turns */
        kernel_case k = { .op = "embed", .attr = &a };
        k.in[0] = filled(vec(I32, n), IDS, 57);
        k.in[1] = mat(ACT, 57, c);
        k.in[2] = filled(vec(places ? I32 : ABSENT, n), IDS, 33);
        k.in[3] = mat(places ? ACT : ABSENT, 33, c);
        k.out[0] = mat(ACT, n, c);
        check_on_device(&k, acts[i / 10 % 3], i / 10 % 3 ? 4e-3 : 1e-6, i / 30, true);
    }
}

static kernel_case gradient_case(const lm_embed_attr *a, int64_t n, int64_t vocab, int64_t c)
{
    kernel_case k = { .op = "embed_dw", .attr = a };
    k.in[0] = mat(ACT, n, c);
    k.in[1] = filled(vec(I32, n), IDS, vocab);
    k.in[2] = filled(vec(I32, n), IDS, 33);
    k.out[0] = mat(F32, vocab, c);
    k.out[1] = mat(F32, 33, c);
    return k;
}

/* Rows of virtual ids, and of those that another rank has, belong to no row of the table. */
static void gradient_of_known_ids(void **state)
{
    lm_embed_attr a = { LM_ACC_ADD, LM_ACC_ADD, 0 };
    kernel_case k = gradient_case(&a, 131, 20, 32);
    (void)state;
    k.in[1] = filled(vec(I32, 131), IDS, 27);
    for (int form = 0; form < 2; form++) {
        device = form ? quick : fixed;
        check_on_device(&k, LM_DTYPE_F32, 1e-5, 0, form == 0);
    }
}

static void gradient_rows(void **state)
{
    (void)state;
    const int64_t vocabs[] = { 1, 7, 500, 20 }, widths[] = { 1, 3, 32, 130, 264 };
    for (int i = 0; i < 20; i++) {
        lm_embed_attr a = { i & 1 ? LM_ACC_ADD : LM_ACC_FIRST, i & 2 ? LM_ACC_ADD : LM_ACC_FIRST,
                            0 };
        kernel_case k = gradient_case(&a, i % 7 ? 131 : 1, vocabs[i % 4], widths[i % 5]);
        lm_dtype act = i % 3 ? LM_DTYPE_F32 : LM_DTYPE_BF16;
        for (int form = 0; form < 2; form++) {
            device = form ? quick : fixed;
            check_on_device(&k, act, 1e-5, i & 1, form == 0);
            k.step.more = true;
            check_on_device(&k, act, 1e-5, 0, form == 0);
            k.step.more = false;
        }
        k.in[2].kind = k.out[1].kind = ABSENT;
        device = fixed;
        check_on_device(&k, act, 1e-5, 0, true);
    }
}

/* For sizes at which the reference's search is too slow: a stable counting sort, then sums in
 * double. */
static void check_large(int64_t n, int64_t vocab, int64_t c, int most)
{
    lm_embed_attr a = { LM_ACC_FIRST, LM_ACC_FIRST, 0 };
    kernel_case k = gradient_case(&a, n, vocab, c);
    k.in[2].kind = k.out[1].kind = ABSENT;
    if (most) /* few ids, at the far end of the table */
        k.in[1].limit = most;
    instance x;
    build(&k, LM_DTYPE_F32, LM_DTYPE_F32, &x);
    int32_t *id = x.in[1].data;
    const float *dx = x.in[0].data, *dw = x.out[0].data;
    double *want = take((size_t)(vocab * c) * sizeof *want), diff = 0, norm = 0;
    memset(want, 0, (size_t)(vocab * c) * sizeof *want);
    for (int64_t i = 0; i < n; i++) {
        id[i] += most ? (int32_t)(vocab - most) : 0;
        for (int64_t j = 0; j < c; j++)
            want[id[i] * c + j] += dx[i * c + j];
    }
    run_on_device(&x, device_kernel("embed_dw", LM_DTYPE_F32), 0);
    for (int64_t i = 0; i < vocab * c; i++) {
        diff += (dw[i] - want[i]) * (dw[i] - want[i]);
        norm += want[i] * want[i];
    }
    if (!(sqrt(diff / norm) <= 1e-5))
        fail_msg("embed_dw of %lld rows into %lld x %lld: relative error %.3g", (long long)n,
                 (long long)vocab, (long long)c, sqrt(diff / norm));
    lm_free(want);
    drop(&k, &x);
}

static void large_tables(void **state)
{
    (void)state;
    for (int form = 0; form < 2; form++) {
        device = form ? quick : fixed;
        check_large(5000, 70000, 4, 0);
        check_large(5000, 70000, 3, 2);
        check_large(4097, 300, 5, 0);
        check_large(2048, 256, 8, 3);
        check_large(2049, 257, 1, 257);
    }
}

/* Rows of one id are always added in the same order, for any order of threads and blocks and any
 * number of blocks. */
static void order_is_fixed(void **state)
{
    (void)state;
    lm_embed_attr a = { LM_ACC_FIRST, LM_ACC_FIRST, 0 };
    kernel_case k = gradient_case(&a, 4500, 3, 40);
    k.in[2].kind = k.out[1].kind = ABSENT;
    device = fixed;
    check_on_device(&k, LM_DTYPE_F32, 1e-4, 0, true);
    k = gradient_case(&a, 4500, 700, 40); /* runs of a few rows, and of many */
    check_on_cards(&k, LM_DTYPE_F32);
}

static int open_devices(void **state)
{
    lm_err e = { 0 };
    (void)state;
    device_must(cuda_open("plain", true, &fixed, &e), &e);
    device_must(cuda_open("plain", false, &quick, &e), &e);
    return 0;
}

static int close_devices(void **state)
{
    (void)state;
    lm_backend_close(fixed);
    lm_backend_close(quick);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(lookup),
        cmocka_unit_test(gradient_rows),
        cmocka_unit_test(gradient_of_known_ids),
        cmocka_unit_test(large_tables),
        cmocka_unit_test(order_is_fixed),
    };
    return cmocka_run_group_tests(tests, open_devices, close_devices);
}
