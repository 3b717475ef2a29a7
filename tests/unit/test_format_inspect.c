/* SPDX-License-Identifier: Apache-2.0 */
/* Statistics and comparison of tensors, against plain loops, over several spans, for any number of
 * threads. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/file.h"
#include "base/mem.h"
#include "base/rng.h"
#include "format/inspect.h"
#include "format/inspect_report.h"

enum { N = 300001 }; /* three spans, the last one ragged */

static char dir[64];

static int make_dir(void **state)
{
    (void)state;
    strcpy(dir, "/tmp/lm-test-XXXXXX");
    return mkdtemp(dir) ? 0 : -1;
}

static int drop_dir(void **state)
{
    lm_err e = { 0 };
    (void)state;
    return lm_rm_rf(dir, &e);
}

/* dir/name with one tensor `tensor` of n elements of x, as dtype. */
static lm_model_source *model_of(const char *name, const char *tensor, lm_dtype dtype,
                                 lm_dtype from, const void *x, int64_t n)
{
    char path[128];
    lm_st_plan *p = NULL;
    lm_st_writer *w = NULL;
    lm_model_source *m = NULL;
    lm_err e = { 0 };

    snprintf(path, sizeof path, "%s/%s", dir, name);
    assert_int_equal(lm_st_plan_new(&p, &e), LM_OK);
    assert_int_equal(lm_st_plan_add(p, tensor, dtype, 1, &n, &e), LM_OK);
    assert_int_equal(lm_st_create(path, true, p, &w, &e), LM_OK);
    assert_int_equal(lm_st_write_as(w, from, x, n, &e), LM_OK);
    assert_int_equal(lm_st_commit(w, &e), LM_OK);
    lm_st_plan_free(p);
    assert_int_equal(lm_model_source_open(path, NULL, &m, &e), LM_OK);
    return m;
}

static double *random_values(void)
{
    double *x = NULL;
    lm_err e = { 0 };
    lm_rng r = lm_rng_make(1, "test", 0);

    assert_int_equal(lm_alloc_n(&x, N, sizeof *x, "test", &e), LM_OK);
    for (int i = 0; i < N; i++)
        x[i] = 5 + (float)lm_rng_normal(r, (uint64_t)i);
    for (int i = 0; i < N; i += 1000)
        x[i] = i % 2000 ? -0.0 : 0.0;
    x[77] = NAN;
    x[150000] = INFINITY;
    x[150001] = -INFINITY;
    x[299999] = -40; /* the least is in the last span, the greatest in the middle one */
    x[200000] = 60;
    return x;
}

static void test_stats(void **state)
{
    double *x = random_values(), sum = 0, squares = 0;
    int64_t finite = 0, zeros = 0;
    lm_tensor_stats first = { 0 }, s;
    lm_err e = { 0 };
    (void)state;

    for (int i = 0; i < N; i++) {
        zeros += x[i] == 0;
        finite += isfinite(x[i]) != 0;
        sum += isfinite(x[i]) ? x[i] : 0;
    }
    double mean = sum / (double)finite;
    for (int i = 0; i < N; i++)
        squares += isfinite(x[i]) ? (x[i] - mean) * (x[i] - mean) : 0;
    lm_model_source *m = model_of("a.safetensors", "w", LM_DTYPE_F32, LM_DTYPE_F64, x, N);
    for (int threads = 1; threads <= 5; threads += 2) {
        lm_par *par = NULL;
        assert_int_equal(lm_par_new(&par, threads, &e), LM_OK);
        assert_int_equal(lm_tensor_stats_of(m, lm_model_source_at(m, 0), par, &s, &e), LM_OK);
        if (threads == 1)
            first = s;
        assert_memory_equal(&first, &s, sizeof s);
        lm_par_free(par);
    }
    assert_int_equal(s.count, N);
    assert_int_equal(s.zeros, zeros);
    assert_int_equal(s.nans, 1);
    assert_int_equal(s.infs, 2);
    assert_true(s.min == -40 && s.max == 60);
    assert_true(fabs(s.mean - mean) < 1e-12 * fabs(mean));
    assert_true(fabs(s.std - sqrt(squares / (double)finite)) < 1e-11);
    lm_model_source_close(m);
    lm_free(x);
}

static void test_stats_of_nothing(void **state)
{
    float nan2[2] = { NAN, INFINITY };
    lm_tensor_stats s;
    lm_err e = { 0 };
    (void)state;

    for (int64_t n = 0; n <= 2; n += 2) {
        lm_model_source *m = model_of("a.safetensors", "w", LM_DTYPE_F32, LM_DTYPE_F32, nan2, n);
        assert_int_equal(lm_tensor_stats_of(m, lm_model_source_at(m, 0), NULL, &s, &e), LM_OK);
        assert_int_equal(s.count, n);
        assert_true(isnan(s.min) && isnan(s.max) && isnan(s.mean) && isnan(s.std));
        lm_model_source_close(m);
    }
}

static lm_model_diff diff_of(lm_model_source *a, lm_model_source *b, lm_compare_opts opts)
{
    lm_model_diff d, d1;
    lm_par *par = NULL;
    lm_err e = { 0 };

    assert_int_equal(lm_par_new(&par, 3, &e), LM_OK);
    assert_int_equal(lm_model_compare(a, b, &opts, NULL, NULL, &d1, &e), LM_OK);
    assert_int_equal(lm_model_compare(a, b, &opts, par, NULL, &d, &e), LM_OK);
    assert_int_equal(d.n, d1.n);
    for (size_t i = 0; i < d.n; i++) /* the same bits with one thread and with three */
        assert_memory_equal(&d.pair[i].max_abs, &d1.pair[i].max_abs, 3 * sizeof(double));
    lm_model_diff_fini(&d1);
    lm_par_free(par);
    return d;
}

static void test_compare(void **state)
{
    double *x = random_values(), norm = 0;
    (void)state;

    for (int i = 0; i < N; i++)
        norm += isfinite(x[i]) ? x[i] * x[i] : 0;
    lm_model_source *a = model_of("a.safetensors", "w", LM_DTYPE_F64, LM_DTYPE_F64, x, N);
    lm_model_diff d = diff_of(a, a, (lm_compare_opts){ 0 }); /* NaN and Inf agree with themselves */
    assert_true(d.same && d.pair[0].measured && d.pair[0].differing == 0 && d.max_abs == 0);
    assert_true(d.pair[0].rel_l2 == 0);
    lm_model_diff_fini(&d);

    x[250000] += 0.25;
    x[3] += 0.125;
    lm_model_source *b = model_of("b.safetensors", "w", LM_DTYPE_F64, LM_DTYPE_F64, x, N);
    d = diff_of(a, b, (lm_compare_opts){ 0 });
    assert_false(d.same);
    assert_int_equal(d.differing, 1);
    assert_int_equal(d.pair[0].differing, 2);
    assert_true(fabs(d.pair[0].max_abs - 0.25) < 1e-9);
    assert_true(fabs(d.pair[0].rel_l2 - sqrt((0.0625 + 0.015625) / norm)) < 1e-9);
    lm_model_diff_fini(&d);
    d = diff_of(a, b, (lm_compare_opts){ .atol = 0.2 });
    assert_int_equal(d.pair[0].differing, 1);
    lm_model_diff_fini(&d);
    lm_model_source_close(b);

    x[77] = 1; /* was NaN */
    b = model_of("b.safetensors", "w", LM_DTYPE_F64, LM_DTYPE_F64, x, N);
    d = diff_of(a, b, (lm_compare_opts){ .atol = 1e9 });
    assert_int_equal(d.pair[0].differing, 1);
    assert_true(isinf(d.max_abs));
    lm_model_diff_fini(&d);
    lm_model_source_close(b);
    lm_model_source_close(a);
    lm_free(x);
}

static void test_wide_integers(void **state)
{
    int64_t x[3] = { INT64_C(1) << 60, -5, INT64_MIN },
            y[3] = { (INT64_C(1) << 60) + 1, -5, INT64_MIN };
    (void)state;

    lm_model_source *a = model_of("a.safetensors", "w", LM_DTYPE_I64, LM_DTYPE_I64, x, 3);
    lm_model_source *b = model_of("b.safetensors", "w", LM_DTYPE_I64, LM_DTYPE_I64, y, 3);
    lm_model_diff d = diff_of(a, b, (lm_compare_opts){ 0 });
    assert_int_equal(d.pair[0].differing, 1);
    assert_true(d.pair[0].max_abs == 1);
    lm_model_diff_fini(&d);
    d = diff_of(a, b, (lm_compare_opts){ .atol = 1 });
    assert_true(d.same);
    lm_model_diff_fini(&d);
    lm_model_source_close(a);
    lm_model_source_close(b);
}

static void test_one_sided(void **state)
{
    float x[2] = { 1, 2 };
    const char *const only[] = { "z*" };
    lm_compare_opts opts = { .only = only, .n_only = 1 };
    lm_model_diff d;
    lm_err e = { 0 };
    (void)state;

    lm_model_source *none = model_of("0.safetensors", "e", LM_DTYPE_F32, LM_DTYPE_F32, x, 0);
    lm_model_source *a = model_of("a.safetensors", "w", LM_DTYPE_F32, LM_DTYPE_F32, x, 2);
    lm_model_source *b = model_of("b.safetensors", "w", LM_DTYPE_F32, LM_DTYPE_F32, x, 1);
    d = diff_of(none, a, (lm_compare_opts){ 0 });
    assert_true(!d.same && d.only_a == 1 && d.only_b == 1 && d.n == 2);
    lm_model_diff_fini(&d);
    d = diff_of(a, b, (lm_compare_opts){ 0 });
    assert_true(!d.same && d.shapes == 1 && !d.pair[0].measured);
    lm_model_diff_fini(&d);
    assert_int_equal(lm_model_compare(a, b, &opts, NULL, NULL, &d, &e), LM_EUSAGE);
    lm_model_diff_fini(&d);

    /* B alone has more: that too is a difference. */
    lm_st_plan *p = NULL;
    lm_st_writer *w = NULL;
    lm_model_source *more = NULL;
    char path[128];
    int64_t dim = 2;
    e = (lm_err){ 0 };
    snprintf(path, sizeof path, "%s/more.safetensors", dir);
    assert_int_equal(lm_st_plan_new(&p, &e), LM_OK);
    assert_int_equal(lm_st_plan_add(p, "w", LM_DTYPE_F32, 1, &dim, &e), LM_OK);
    assert_int_equal(lm_st_plan_add(p, "x", LM_DTYPE_F32, 1, &dim, &e), LM_OK);
    assert_int_equal(lm_st_create(path, true, p, &w, &e), LM_OK);
    assert_int_equal(lm_st_write(w, x, 8, &e), LM_OK);
    assert_int_equal(lm_st_write(w, x, 8, &e), LM_OK);
    assert_int_equal(lm_st_commit(w, &e), LM_OK);
    lm_st_plan_free(p);
    assert_int_equal(lm_model_source_open(path, NULL, &more, &e), LM_OK);
    d = diff_of(a, more, (lm_compare_opts){ 0 });
    assert_true(!d.same && d.only_a == 0 && d.only_b == 1 && d.differing == 0);
    lm_model_diff_fini(&d);
    lm_model_source_close(more);
    lm_model_source_close(none);
    lm_model_source_close(a);
    lm_model_source_close(b);
}

/* Every float dtype, written from f32 and read back, differs from it by its rounding alone. */
static void test_across_dtypes(void **state)
{
    static const struct {
        lm_dtype d;
        double rel;
    } types[] = { { LM_DTYPE_F64, 0 },
                  { LM_DTYPE_BF16, 1.0 / 256 },
                  { LM_DTYPE_F16, 1.0 / 2048 },
                  { LM_DTYPE_F8E4M3, 1.0 / 16 },
                  { LM_DTYPE_F8E5M2, 1.0 / 8 } };
    float x[1000];
    (void)state;

    for (int i = 0; i < 1000; i++)
        x[i] = (float)(1 + i) / 8;
    lm_model_source *a = model_of("a.safetensors", "w", LM_DTYPE_F32, LM_DTYPE_F32, x, 1000);
    for (size_t k = 0; k < sizeof types / sizeof *types; k++) {
        lm_model_source *b = model_of("b.safetensors", "w", types[k].d, LM_DTYPE_F32, x, 1000);
        lm_model_diff d = diff_of(a, b, (lm_compare_opts){ .rtol = types[k].rel });
        assert_true(d.same && d.dtypes == 1 && d.max_rel <= types[k].rel);
        assert_true(d.max_rel > 0 || k == 0 || types[k].d == LM_DTYPE_F16);
        lm_model_diff_fini(&d);
        d = diff_of(a, b, (lm_compare_opts){ .rtol = 1, .strict = true });
        assert_false(d.same);
        lm_model_diff_fini(&d);
        lm_model_source_close(b);
    }
    lm_model_source_close(a);
}

int main(void)
{
#define WITH_DIR(f) cmocka_unit_test_setup_teardown(f, make_dir, drop_dir)
    const struct CMUnitTest tests[] = {
        WITH_DIR(test_stats),         WITH_DIR(test_stats_of_nothing), WITH_DIR(test_compare),
        WITH_DIR(test_wide_integers), WITH_DIR(test_one_sided),        WITH_DIR(test_across_dtypes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
