/* SPDX-License-Identifier: Apache-2.0 */
/* Grouped products: groups of uneven sizes that threads share or have alone, depths of any remainder, rows of no group; weights in
 * panels give the bits of weights in rows. */
#include "base/cpu.h"
#include "kernel_case.h"
#include "kernels/grouped.h"
#include "kernels/panels.h"

enum { G = 16, K = 192, M = 128, MOST = 400 };

typedef struct {
    const char *name;
    int32_t offsets[G + 1], rows; /* of all, those of no group included */
} split;

/* In "even" no group has more than a sixth of the rows, so that each is one thread's for up to 3 threads; in "hot" one has most. */
static const split splits[] = {
    { "even", { 0, 1, 9, 41, 74, 74, 80, 97, 129, 160, 161, 163, 190, 212, 244, 250, 283 }, 290 },
    { "hot", { 0, 0, 1, 3, 6, 10, 15, 330, 340, 350, 351, 351, 352, 353, 354, 355, 360 }, MOST },
    { "few", { 0, 0, 0, 0, 0, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 8 }, 8 },
    { "none", { 0 }, 3 },
};
enum { SPLITS = sizeof splits / sizeof *splits };

static void check(const char *op, const split *p, lm_acc acc, operand a, operand b, operand out)
{
    const lm_grouped_attr attr = { G, M, acc };
    check_case(&(kernel_case){ .op = op,
                               .attr = &attr,
                               .in = { a, b, given(vec(I32, G + 1), p->offsets) },
                               .out = { out },
                               .tol_f32 = 1e-6,
                               .tol_bf16 = 4e-3 });
}

static void products(void **state)
{
    (void)state;
    for (int s = 0; s < SPLITS; s++) {
        const split *p = &splits[s];
        const operand x = mat(ACT, p->rows, K), dy = mat(ACT, p->rows, M), w = mat(ACT, G * M, K);
        check("grouped_linear", p, LM_ACC_FIRST, x, w, dy);
        check("grouped_linear_dx", p, LM_ACC_FIRST, dy, w, x);
        check("grouped_linear_dw", p, LM_ACC_FIRST, dy, x, mat(F32, G * M, K));
        check("grouped_linear_dw", p, LM_ACC_ADD, dy, x, mat(F32, G * M, K));
    }
}

/* ---- panels ---- */

static void call(const lm_kernel *k, const void *attr, lm_tensor *in, int n_in, lm_tensor *out,
                 lm_par *par)
{
    static const lm_step step = { .seed = 1 };
    instance x = {
        .call = { .attr = attr, .in = in, .n_in = n_in, .out = out, .n_out = 1, .step = &step }
    };
    run(&x, k, par);
}

static void check_panels(lm_cpu_level level, const split *p, bool dx, int threads)
{
    static uint16_t x[MOST * K], w[G * M * K], turned[G * M * K], y[MOST * K], z[MOST * K];
    const lm_dtype act = LM_DTYPE_BF16;
    lm_par *par = pool_of(threads);
    const lm_grouped_attr attr = { G, M, LM_ACC_FIRST };
    const int64_t from = dx ? M : K, to = dx ? K : M;
    const lm_rng r = lm_rng_make(3, "panels", 0);
    for (int64_t i = 0; i < MOST * K; i++)
        lm_set(act, x, i, lm_rng_normal(r, (uint64_t)i));
    for (int64_t i = 0; i < G * M * K; i++)
        lm_set(act, w, i, lm_rng_normal(r, (uint64_t)(i + MOST * K)));
    lm_tensor in[3] = {
        { .data = x, .dtype = act, .ndim = 2, .dim = { p->rows, from } },
        { .data = w, .dtype = act, .ndim = 2, .dim = { G * M, K } },
        { .data = (void *)p->offsets, .dtype = LM_DTYPE_I32, .ndim = 1, .dim = { G + 1 } },
    };
    lm_tensor out = { .data = y, .dtype = act, .ndim = 2, .dim = { p->rows, to } };
    lm_tensor packed = {
        .data = turned, .dtype = act, .ndim = 2, .dim = { G * M, K }, .panels = true
    };
    const lm_kernel *k = lm_cpu_kernel(dx ? "grouped_linear_dx" : "grouped_linear", act, level);
    call(lm_cpu_kernel("panels", act, level), NULL, &in[1], 1, &packed, par);
    call(k, &attr, in, 3, &out, par);
    in[1] = packed;
    out.data = z;
    call(k, &attr, in, 3, &out, par);
    assert_memory_equal(y, z, (size_t)(p->rows * to) * sizeof *y);
}

static void weights_in_panels(void **state)
{
    (void)state;
    if (lm_cpu_detect() < LM_CPU_BF16)
        skip();
    for (int level = LM_CPU_BF16; level <= (int)lm_cpu_detect(); level++)
        for (int s = 0; s < SPLITS; s++)
            for (int v = 0; v < 6; v++)
                check_panels((lm_cpu_level)level, &splits[s], v & 1, 1 + v / 2);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(products),
        cmocka_unit_test(weights_in_panels),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
