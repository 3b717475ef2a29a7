/* SPDX-License-Identifier: Apache-2.0 */
/* Embedding lookup and its gradient at every level against the definition. */
#include "kernel_case.h"

#include "kernels/embed.h"
#include "kernels/panels.h"

static const int64_t widths[] = { 1, 3, 31, 33, 127, 1025 };

static void lookup(void **state)
{
    (void)state;
    for (int w = 0; w < 6; w++) {
        for (int places = 0; places < 2; places++) {
            lm_embed_attr a = { LM_ACC_FIRST, LM_ACC_FIRST, 0 };
            kernel_case k = { .op = "embed", .attr = &a, .tol_f32 = 1e-6, .tol_bf16 = 4e-3 };
            k.in[0] = filled(vec(I32, 131), IDS, 57);
            k.in[1] = mat(ACT, 57, widths[w]);
            k.in[2] = filled(vec(places ? I32 : ABSENT, 131), IDS, 33);
            k.in[3] = mat(places ? ACT : ABSENT, 33, widths[w]);
            k.out[0] = mat(ACT, 131, widths[w]);
            check_case(&k);
        }
    }
}

/* A table in panels gives the rows of the table in the order of rows. */
static void lookup_in_panels(void **state)
{
    (void)state;
    enum { V = 64, N = 131 };
    for (int64_t width = 32; width <= 160; width += 64)
        for (int level = LM_CPU_REF; level <= (int)lm_cpu_detect(); level++) {
            lm_embed_attr a = { LM_ACC_FIRST, LM_ACC_FIRST, 5.65685 };
            kernel_case k = { .op = "embed", .attr = &a };
            k.in[0] = filled(vec(I32, N), IDS, V);
            k.in[1] = mat(ACT, V, width);
            k.in[2] = filled(vec(I32, N), IDS, 33);
            k.in[3] = mat(ACT, 33, width);
            k.out[0] = mat(ACT, N, width);
            instance x, y;
            build(&k, LM_DTYPE_BF16, LM_DTYPE_F32, &x);
            build(&k, LM_DTYPE_BF16, LM_DTYPE_F32, &y);
            for (int64_t i = 0; i < V * width; i++)
                ((uint16_t *)y.in[1].data)[lm_panel_at(i / width, i % width, width)] =
                    ((uint16_t *)x.in[1].data)[i];
            y.in[1].panels = true;
            const lm_kernel *kernel = lm_cpu_kernel("embed", LM_DTYPE_BF16, (lm_cpu_level)level);
            run(&x, kernel, NULL);
            run(&y, kernel, NULL);
            assert_memory_equal(x.out[0].data, y.out[0].data, N * width * 2);
            drop(&k, &x);
            drop(&k, &y);
        }
}

static kernel_case gradient_case(const lm_embed_attr *a, int64_t n, int64_t vocab, int64_t c)
{
    kernel_case k = { .op = "embed_dw", .attr = a, .tol_f32 = 1e-6, .tol_bf16 = 1e-6 };
    k.in[0] = mat(ACT, n, c);
    k.in[1] = filled(vec(I32, n), IDS, vocab);
    k.in[2] = filled(vec(I32, n), IDS, 33);
    k.out[0] = mat(F32, vocab, c);
    k.out[1] = mat(F32, 33, c);
    return k;
}

static void gradient_rows(void **state)
{
    (void)state;
    const int64_t vocabs[] = { 7, 1, 500 };
    for (int w = 0; w < 6; w++) {
        for (int v = 0; v < (w == 5 ? 1 : 3); v++) {
            for (int acc = 0; acc < 4; acc++) {
                lm_embed_attr a = { acc & 1 ? LM_ACC_ADD : LM_ACC_FIRST,
                                    acc & 2 ? LM_ACC_ADD : LM_ACC_FIRST, 0 };
                kernel_case k = gradient_case(&a, 131, vocabs[v], widths[w]);
                k.tol_f32 = k.tol_bf16 = widths[w] < 31 ? 1e-5 : 1e-6;
                check_case(&k);
                k.step.more = true;
                k.in[2].kind = k.out[1].kind = ABSENT;
                check_case(&k);
            }
        }
    }
}

static void gradient(void **state)
{
    (void)state;
    lm_embed_attr a = { LM_ACC_FIRST, LM_ACC_FIRST, 0 };
    kernel_case f = { .op = "embed", .attr = &a };
    f.in[0] = filled(vec(I32, 9), IDS, 4);
    f.in[1] = mat(ACT, 4, 5);
    f.in[2] = filled(vec(I32, 9), IDS, 6);
    f.in[3] = mat(ACT, 6, 5);
    f.out[0] = mat(ACT, 9, 5);
    instance x, y;
    build(&f, LM_DTYPE_F64, LM_DTYPE_F64, &x);
    kernel_case b = gradient_case(&a, 9, 4, 5);
    b.in[1] = given(b.in[1], x.in[0].data);
    b.in[2] = given(b.in[2], x.in[2].data);
    b.out[1].rows = 6;
    build(&b, LM_DTYPE_F64, LM_DTYPE_F64, &y);
    run(&y, lm_cpu_kernel("embed_dw", LM_DTYPE_F64, LM_CPU_REF), NULL);
    check_slope(&f, 1, 0, &y.in[0], &y.out[0]);
    check_slope(&f, 3, 0, &y.in[0], &y.out[1]);
    drop(&f, &x);
    drop(&b, &y);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(lookup),
        cmocka_unit_test(lookup_in_panels),
        cmocka_unit_test(gradient_rows),
        cmocka_unit_test(gradient),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
