/* SPDX-License-Identifier: Apache-2.0 */
/* test_merge_search.c -- each search on objectives whose minimum is known; resumption; limits. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/mem.h"
#include "base/rng.h"
#include "merge/search.h"
#include "merge/search_log.h"

enum { SETS = 2 };

/* An objective and the points at which it was measured. */
typedef struct {
    double (*f)(const double *w, int n);
    int64_t measured, reported, bests, stop_after;
    lm_candidates log;
    lm_err *e;
    char kinds[64];
} trial;

static lm_code measure(void *ctx, lm_candidate *c, lm_err *e)
{
    trial *t = ctx;
    if (t->stop_after && t->measured == t->stop_after)
        return lm_fail(e, LM_EIO, "test", NULL, "stopped");
    t->measured++;
    c->objective = t->f(c->weight, c->n);
    c->loss[0] = c->objective + 1;
    c->loss[1] = c->objective - 1;
    c->seconds = 0.5;
    return LM_OK;
}

static lm_code report(void *ctx, const lm_candidate *c, lm_err *e)
{
    trial *t = ctx;
    assert_int_equal(c->index, t->reported);
    assert_int_equal(c->sets, SETS);
    t->reported++;
    t->bests += c->best;
    if (t->reported <= 40)
        t->kinds[t->reported - 1] = c->kind[0];
    assert_true(c->loss[0] == c->objective + 1 || isnan(c->objective));
    return lm_candidates_add(&t->log, c->n, c->sets, c->weight, c->loss, c->objective, c->seconds,
                             e);
}

static lm_code go(trial *t, const lm_search_opts *o, const lm_candidates *known, double *best,
                  double *objective)
{
    static lm_err e;
    lm_search_hooks h = { measure, report, t };
    memset(&e, 0, sizeof e);
    t->e = &e;
    return lm_search_run(o, SETS, known, &h, best, objective, &e);
}

/* Minimum 3 at 0.75, 0.25, 1, ... */
static double bowl(const double *w, int n)
{
    static const double at[] = { 0.75, 0.25, 1.0, 0.5 };
    double sum = 3;
    for (int i = 0; i < n; i++)
        sum += (i + 1) * (w[i] - at[i]) * (w[i] - at[i]);
    return sum;
}

/* A valley diagonal to the axes: coordinate descent needs more than one round. */
static double valley(const double *w, int n)
{
    (void)n;
    double a = w[0] + w[1] - 1, b = w[0] - w[1];
    return a * a + 0.5 * b * b;
}

static void test_grid(void **state)
{
    trial t = { .f = bowl };
    double best[2], f;
    (void)state;
    assert_int_equal(go(&t, &(lm_search_opts){ .kind = LM_SEARCH_GRID, .n = 2 }, NULL, best, &f),
                     0);
    assert_int_equal(t.measured, 49);
    assert_true(best[0] == 0.75 && best[1] == 0.25 && f == 3);
    assert_true(t.log.weight[0] == 0 && t.log.weight[1] == 0 && t.log.weight[3] == 0.25);
    assert_true(t.log.weight[2 * 48] == 1.5 && t.log.weight[2 * 48 + 1] == 1.5);
    lm_candidates_fini(&t.log);

    const double grid[] = { -1, 0.3, 2 };
    trial u = { .f = bowl };
    const lm_search_opts own = { .kind = LM_SEARCH_GRID, .n = 2, .grid = grid, .n_grid = 3 };
    assert_int_equal(go(&u, &own, NULL, best, &f), 0);
    assert_int_equal(u.measured, 9);
    assert_true(best[0] == 0.3 && best[1] == 0.3);
    lm_candidates_fini(&u.log);
}

static void test_grid_limits(void **state)
{
    lm_search *s = NULL;
    lm_err e = { 0 };
    const double falls[] = { 0, 1, 1 };
    (void)state;
    lm_search_opts o = { .kind = LM_SEARCH_GRID, .n = 4, .max = 100 };
    assert_int_equal(lm_search_new(&o, &s, &e), LM_EUSAGE);
    assert_non_null(strstr(e.what, "2401 points"));
    memset(&e, 0, sizeof e);
    o = (lm_search_opts){ .kind = LM_SEARCH_GRID, .n = 1, .grid = falls, .n_grid = 3 };
    assert_int_equal(lm_search_new(&o, &s, &e), LM_EUSAGE);
    memset(&e, 0, sizeof e);
    o = (lm_search_opts){ .kind = LM_SEARCH_GRID, .n = 0 };
    assert_int_equal(lm_search_new(&o, &s, &e), LM_EUSAGE);
    memset(&e, 0, sizeof e);
    o = (lm_search_opts){ .kind = LM_SEARCH_CMAES, .n = 2, .lo = 1, .hi = 0.5 };
    assert_int_equal(lm_search_new(&o, &s, &e), LM_EUSAGE);
    memset(&e, 0, sizeof e);
    o = (lm_search_opts){ .kind = LM_SEARCH_CMAES, .n = 2, .start = (double[]){ 0.5, 2 } };
    assert_int_equal(lm_search_new(&o, &s, &e), LM_EUSAGE);
    assert_null(s);
}

static void test_simplex(void **state)
{
    trial t = { .f = bowl };
    double best[3], f, mean[3] = { 0 };
    (void)state;
    const lm_search_opts o = { .kind = LM_SEARCH_SIMPLEX, .n = 3, .max = 400, .seed = 7 };
    assert_int_equal(go(&t, &o, NULL, best, &f), 0);
    assert_int_equal(t.measured, 400);
    assert_memory_equal(t.kinds, "ccccrrr", 7);
    for (int64_t i = 0; i < t.measured; i++) {
        double sum = 0;
        for (int k = 0; k < 3; k++) {
            double w = t.log.weight[i * 3 + k];
            assert_true(w >= 0 && w <= 1);
            sum += w;
            mean[k] += w / 400;
        }
        assert_true(fabs(sum - 1) < 1e-12);
    }
    for (int k = 0; k < 3; k++)
        assert_true(fabs(mean[k] - 1.0 / 3) < 0.04);
    lm_candidates_fini(&t.log);
}

static void test_coordinate(void **state)
{
    trial t = { .f = bowl };
    double best[4], f;
    (void)state;
    lm_search_opts o = { .kind = LM_SEARCH_COORDINATE, .n = 4 };
    assert_int_equal(go(&t, &o, NULL, best, &f), 0);
    assert_true(f == 3 && best[0] == 0.75 && best[1] == 0.25 && best[2] == 1 && best[3] == 0.5);
    assert_true(t.measured < 25);
    assert_memory_equal(t.kinds, "sd", 2);
    lm_candidates_fini(&t.log);

    trial v = { .f = valley };
    o = (lm_search_opts){ .kind = LM_SEARCH_COORDINATE, .n = 2, .start = (double[]){ 1.45, -3.0 } };
    assert_int_equal(go(&v, &o, NULL, best, &f), 0);
    assert_true(v.log.weight[0] == 1.5 && v.log.weight[1] == 0);
    assert_true(best[0] == 0.5 && best[1] == 0.5 && f == 0);
    lm_candidates_fini(&v.log);
}

/* An ellipsoid of condition 1e3, turned by a fixed rotation, its minimum at 0.4, 0.5, ... */
static double ellipsoid(const double *w, int n)
{
    double sum = 0;
    for (int i = 0; i < n; i++) {
        double along = 0; /* row i of a Householder reflection with v = (1, 2, ..., n) */
        double vv = n * (n + 1) * (2 * n + 1) / 6.0;
        for (int k = 0; k < n; k++)
            along += ((i == k) - 2.0 * (i + 1) * (k + 1) / vv) * (w[k] - (0.4 + 0.1 * k));
        sum += pow(1e3, n > 1 ? (double)i / (n - 1) : 0) * along * along;
    }
    return sum;
}

static void test_cmaes_converges(void **state)
{
    (void)state;
    for (int n = 1; n <= 5; n++)
        for (uint64_t seed = 1; seed <= 3; seed++) {
            trial t = { .f = ellipsoid };
            double best[5], f;
            const lm_search_opts o = {
                .kind = LM_SEARCH_CMAES, .n = n, .max = 20000, .tol = 1e-9, .seed = seed
            };
            assert_int_equal(go(&t, &o, NULL, best, &f), 0);
            if (!(f < 1e-12) || t.measured > 400 * n)
                print_error("n %d seed %d: %g after %d\n", n, (int)seed, f, (int)t.measured);
            assert_true(f < 1e-12);
            assert_true(t.measured <= 400 * n); /* it ends without the limit, and soon */
            for (int i = 0; i < n; i++)
                assert_true(fabs(best[i] - (0.4 + 0.1 * i)) < 1e-6);
            lm_candidates_fini(&t.log);
        }
}

/* The minimum is outside the bounds: the search ends on their edge. */
static double outside(const double *w, int n)
{
    double sum = 0;
    for (int i = 0; i < n; i++)
        sum += (w[i] - (i % 2 ? 0.6 : -0.4)) * (w[i] - (i % 2 ? 0.6 : -0.4));
    return sum;
}

static void test_cmaes_bounds(void **state)
{
    trial t = { .f = outside };
    double best[3], f;
    (void)state;
    const lm_search_opts o = { .kind = LM_SEARCH_CMAES, .n = 3, .max = 3000, .tol = 1e-6 };
    assert_int_equal(go(&t, &o, NULL, best, &f), 0);
    for (int64_t i = 0; i < t.measured * 3; i++)
        assert_true(t.log.weight[i] >= 0 && t.log.weight[i] <= 1.5);
    assert_true(fabs(best[0]) < 1e-3 && fabs(best[1] - 0.6) < 1e-3 && fabs(best[2]) < 1e-3);
    lm_candidates_fini(&t.log);
}

static double broken(const double *w, int n)
{
    return w[0] > 0.3 ? NAN : w[0] + n;
}

static double never(const double *w, int n)
{
    (void)w;
    (void)n;
    return NAN;
}

static void test_not_finite(void **state)
{
    (void)state;
    for (int kind = 0; kind < 4; kind++) {
        trial t = { .f = broken }, u = { .f = never };
        double best[2], f;
        const lm_search_opts o = { .kind = (lm_search_kind)kind,
                                   .n = 2,
                                   .start = (double[]){ 0.2, 0.2 } };
        assert_int_equal(go(&t, &o, NULL, best, &f), 0);
        assert_true(best[0] <= 0.3 && isfinite(f));
        assert_int_equal(go(&u, &o, NULL, best, &f), LM_ENUMERIC);
        lm_candidates_fini(&t.log);
        lm_candidates_fini(&u.log);
    }
}

/* Interrupt a search after any number of points; the second run measures only the rest, and both
 * use the same points, bit for bit. */
static void test_resume(void **state)
{
    (void)state;
    for (int kind = 0; kind < 4; kind++) {
        const lm_search_opts o = {
            .kind = (lm_search_kind)kind, .n = 3, .max = kind ? 60 : 0, .seed = 3
        };
        trial whole = { .f = bowl };
        double best[3], f, again[3], g;
        assert_int_equal(go(&whole, &o, NULL, best, &f), 0);
        for (int64_t cut = 1; cut < whole.measured; cut += 7) {
            trial first = { .f = bowl, .stop_after = cut }, second = { .f = bowl };
            assert_int_equal(go(&first, &o, NULL, again, &g), LM_EIO);
            assert_int_equal(go(&second, &o, &first.log, again, &g), 0);
            assert_int_equal(second.measured, whole.measured - cut);
            assert_int_equal(second.log.count, whole.log.count);
            assert_memory_equal(second.log.weight, whole.log.weight,
                                (size_t)whole.log.count * 3 * sizeof(double));
            assert_memory_equal(again, best, sizeof best);
            assert_true(f == g && second.bests == whole.bests);
            lm_candidates_fini(&first.log);
            lm_candidates_fini(&second.log);
        }
        lm_candidates_fini(&whole.log);
    }
}

static void test_limit(void **state)
{
    (void)state;
    for (int kind = 1; kind < 4; kind++) {
        trial t = { .f = bowl };
        double best[3], f;
        const lm_search_opts o = { .kind = (lm_search_kind)kind, .n = 3, .max = 5 };
        assert_int_equal(go(&t, &o, NULL, best, &f), 0);
        assert_int_equal(t.measured, 5);
        lm_candidates_fini(&t.log);
    }
    trial one = { .f = bowl }; /* one weight: the simplex is a point, measured once */
    double best[1], f;
    const lm_search_opts o = { .kind = LM_SEARCH_SIMPLEX, .n = 1 };
    assert_int_equal(go(&one, &o, NULL, best, &f), 0);
    assert_int_equal(one.measured, 1);
    lm_candidates_fini(&one.log);
}

/* ---- lines ---- */

static void write_file(const char *path, const char *text)
{
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fputs(text, f);
    fclose(f);
}

/* A candidate's line is read back bit for bit, truncated lines are skipped. */
static void test_lines(void **state)
{
    char path[256];
    const char *tmp = getenv("TMPDIR");
    snprintf(path, sizeof path, "%s/search-%d.jsonl", tmp ? tmp : "/tmp", (int)getpid());
    static const char top[] =
        "{\"event\":\"search\",\"method\":\"dem\",\"merge\":\"12\",\"val\":[],"
        "\"dtype\":\"f32\",\"seq_len\":9,\"stride\":5";
    lm_err e = { 0 };
    lm_buf text = { 0 }, head = { 0 };
    lm_candidates got = { 0 };
    double w[] = { 0.1, 1.0 / 3 }, loss[] = { 2.0 / 3, NAN };
    (void)state;
    const lm_candidate c = { .index = 4,
                             .kind = "random",
                             .n = 2,
                             .sets = 2,
                             .weight = w,
                             .loss = loss,
                             .objective = NAN,
                             .seconds = 0.7 };
    assert_int_equal(lm_buf_addf(&head, &e, "%s,\"seed\":1}", top), 0);
    assert_int_equal(lm_buf_addf(&text, &e, "%s,\"seed\":1}\n", top), 0);
    assert_int_equal(lm_search_log_candidate(&c, &text, &e), 0);
    assert_int_equal(lm_buf_addf(&text, &e, "\n"), 0);
    assert_int_equal(lm_search_log_best(2, w, 1, 5, 0.5, &text, &e), 0);
    assert_int_equal(lm_buf_addf(&text, &e, "\n{\"event\":\"candidate\",\"weig"), 0);
    write_file(path, text.data);
    assert_int_equal(lm_search_log_read(path, &head, 2, 2, &got, &e), 0);
    assert_int_equal(got.count, 1);
    assert_memory_equal(got.weight, w, sizeof w);
    assert_true(got.loss[0] == loss[0] && isnan(got.loss[1]) && got.seconds[0] == 0.7);
    lm_candidates_fini(&got);

    /* another number of models, another search, no search at all */
    assert_int_equal(lm_search_log_read(path, &head, 3, 2, &got, &e), LM_EFORMAT);
    assert_string_equal(e.what, "a candidate needs 3 weights and 2 losses");
    memset(&e, 0, sizeof e);
    assert_int_equal(lm_search_log_read(path, &head, 1, 1, &got, &e), LM_EFORMAT);
    assert_string_equal(e.what, "a candidate needs 1 weight and 1 loss");
    memset(&e, 0, sizeof e);
    head.data[head.len - 2] = '2';
    assert_int_equal(lm_search_log_read(path, &head, 2, 2, &got, &e), LM_EUSAGE);
    assert_non_null(strstr(e.what, "\"seed\""));
    memset(&e, 0, sizeof e);
    head.data[strlen("{\"event\":\"search\",\"method\":\"d")] = 'X';
    assert_int_equal(lm_search_log_read(path, &head, 2, 2, &got, &e), LM_EUSAGE);
    assert_non_null(strstr(e.what, "\"method\""));
    memset(&e, 0, sizeof e);
    write_file(path, "[1]\n");
    assert_int_equal(lm_search_log_read(path, &head, 2, 2, &got, &e), LM_EUSAGE);
    memset(&e, 0, sizeof e);
    write_file(path, "");
    assert_int_equal(lm_search_log_read(path, &head, 2, 2, &got, &e), 0);
    assert_int_equal(got.count, 0);
    lm_buf_fini(&text);
    lm_buf_fini(&head);
    lm_candidates_fini(&got);
    remove(path);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_grid),
        cmocka_unit_test(test_grid_limits),
        cmocka_unit_test(test_simplex),
        cmocka_unit_test(test_coordinate),
        cmocka_unit_test(test_cmaes_converges),
        cmocka_unit_test(test_cmaes_bounds),
        cmocka_unit_test(test_not_finite),
        cmocka_unit_test(test_resume),
        cmocka_unit_test(test_limit),
        cmocka_unit_test(test_lines),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
