/* SPDX-License-Identifier: Apache-2.0 */
/* Kernels of F64 (kernels/cpu/double_simd.c): the bits of the reference on every level that this machine has, and any
 * number of threads. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/mem.h"
#include "base/rng.h"
#include "graph/exec.h"
#include "graph/passes.h"
#include "tune/rule.h"

enum { INPUTS = 3 };

/* One node on random operands; sizes: what `build` makes of them. */
typedef struct {
    int ndim[INPUTS];
    int64_t dim[INPUTS][LM_MAX_DIMS];
    lm_vid (*build)(lm_rule *r, const lm_vid *in, int variant);
    int variant;
} trial;

static lm_vid product(lm_rule *r, const lm_vid *in, int variant)
{
    return lm_r_matmul(r, in[0], variant & 1, in[1], variant & 2);
}

static lm_vid formula(lm_rule *r, const lm_vid *in, int variant)
{
    static const char *const texts[] = {
        "y = a + 0.1 * b - c / a",
        "y = where(a < b, sqrt(abs(c)), max(a, c)) * min(b, 0.5)",
        "y = exp(a) * tanh(b) + log(abs(c)) - cos(a) * sin(b) + round(4 * c)",
        "y = a",
    };
    return LM_R_MAP(r, texts[variant], LM_IS("a", in[0]), LM_IS("b", in[1]), LM_IS("c", in[2]));
}

static lm_vid permutation(lm_rule *r, const lm_vid *in, int variant)
{
    static const int perm[][3] = { { 1, 0, 2 }, { 2, 1, 0 }, { 0, 2, 1 }, { 2, 0, 1 } };
    static const int64_t dim[] = { 7, 30, 41 };
    const int *p = perm[variant];
    return lm_r_permute(r, in[0], 3, dim, p, 2,
                        (const int64_t[]){ dim[p[0]], dim[p[1]] * dim[p[2]] });
}

/* The result of a trial; the caller frees it. */
static double *run(const trial *t, lm_cpu_level level, int threads, int64_t *count)
{
    lm_err e = { 0 };
    lm_graph *g = NULL;
    lm_arena *arena = NULL;
    lm_par *par = NULL;
    lm_backend *b = NULL;
    lm_exec *x = NULL;
    lm_vid in[INPUTS];
    double *data[INPUTS] = { NULL }, *out = NULL;
    const lm_precision exact = { .low = LM_DTYPE_F64 };
    const lm_step step = { 0 };

    assert_int_equal(lm_graph_new(&g, &e), LM_OK);
    assert_int_equal(lm_arena_new(&arena, 4096, &e), LM_OK);
    assert_int_equal(lm_par_new(&par, threads, &e), LM_OK);
    lm_rule r = { .g = g, .arena = arena, .e = &e };
    for (int i = 0; i < INPUTS; i++) {
        lm_tensor shape = { .dtype = LM_DTYPE_F32, .ndim = t->ndim[i] };
        lm_rng rng = lm_rng_make(5, "test", (uint64_t)i);
        memcpy(shape.dim, t->dim[i], sizeof shape.dim);
        in[i] = LM_NONE;
        if (!t->ndim[i])
            continue;
        assert_int_equal(lm_graph_value(g, LM_ROLE_INPUT, shape, "x", &in[i], &e), LM_OK);
        int64_t n = lm_tensor_count(&shape);
        assert_int_equal(lm_alloc_n(&data[i], (size_t)n, sizeof **data, "x", &e), LM_OK);
        for (int64_t k = 0; k < n; k++)
            data[i][k] = lm_rng_normal(rng, (uint64_t)k);
    }
    lm_vid y = t->build(&r, in, t->variant);
    if (e.code)
        fail_msg("%s: %s", e.where, e.what);
    assert_int_equal(lm_pass_precision(g, &exact, &e), LM_OK);
    assert_int_equal(lm_backend_cpu(level, par, &b, &e), LM_OK);
    assert_int_equal(lm_exec_new(g, b, &y, 1, &x, &e), LM_OK);
    for (int i = 0; i < INPUTS; i++)
        if (data[i])
            lm_exec_bind(x, in[i], data[i]);
    assert_int_equal(lm_exec_run(x, &step, &e), LM_OK);
    *count = lm_tensor_count(&g->value[y].t);
    assert_int_equal(lm_alloc_n(&out, (size_t)*count, sizeof *out, "y", &e), LM_OK);
    memcpy(out, lm_exec_data(x, y), (size_t)*count * sizeof *out);
    lm_exec_free(x);
    lm_backend_close(b);
    lm_rule_fini(&r);
    lm_graph_free(g);
    lm_arena_free(arena);
    lm_par_free(par);
    for (int i = 0; i < INPUTS; i++)
        lm_free(data[i]);
    return out;
}

static void check(const trial *t)
{
    int64_t n, m;
    double *want = run(t, LM_CPU_REF, 1, &n);
    for (lm_cpu_level l = LM_CPU_AVX2; l <= lm_cpu_detect(); l++)
        for (int threads = 1; threads <= 3; threads++) {
            double *got = run(t, l, threads, &m);
            assert_int_equal(m, n);
            assert_memory_equal(got, want, (size_t)n * sizeof *got);
            lm_free(got);
        }
    lm_free(want);
}

static void products(void **state)
{
    static const int64_t size[][4] = { /* batch of a and b, m, n, k */
                                       { 1, 5, 7, 3 }, { 1, 300, 33, 70 }, { 6, 9, 16, 17 },
                                       { 1, 1, 1, 1 }, { 1, 4, 260, 9 },   { 3, 257, 2, 5 }
    };
    (void)state;
    for (size_t i = 0; i < sizeof size / sizeof *size; i++)
        for (int v = 0; v < 4; v++)
            for (int both = 0; both < (size[i][0] > 1 ? 3 : 1); both++) {
                int64_t m = size[i][1], n = size[i][2], k = size[i][3];
                trial t = { .build = product, .variant = v, .ndim = { 3, 3 } };
                t.dim[0][0] = both == 1 ? 1 : size[i][0];
                t.dim[0][1] = v & 1 ? k : m;
                t.dim[0][2] = v & 1 ? m : k;
                t.dim[1][0] = both == 2 ? 1 : size[i][0];
                t.dim[1][1] = v & 2 ? n : k;
                t.dim[1][2] = v & 2 ? k : n;
                check(&t);
            }
}

static void formulas(void **state)
{
    (void)state;
    for (int v = 0; v < 4; v++) {
        check(&(trial){ .build = formula,
                        .variant = v,
                        .ndim = { 2, 2, 2 },
                        .dim = { { 61, 300 }, { 61, 1 }, { 1, 300 } } });
        check(&(trial){ .build = formula,
                        .variant = v,
                        .ndim = { 2, 2, 2 },
                        .dim = { { 3, 5 }, { 1, 1 }, { 3, 5 } } });
    }
}

static void permutations(void **state)
{
    (void)state;
    for (int v = 0; v < 4; v++)
        check(&(trial){
            .build = permutation, .variant = v, .ndim = { 1 }, .dim = { { 7 * 30 * 41 } } });
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(products),
        cmocka_unit_test(formulas),
        cmocka_unit_test(permutations),
    };
    return cmocka_run_group_tests_name("kernels_double", tests, NULL, NULL);
}
