/* SPDX-License-Identifier: Apache-2.0 */
/* Formulas: their meaning, against the same expressions in C; results in the memory of operands,
 * gates and numbers; texts that are refused; and merged calls on adjacent tensors. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <math.h>
#include <string.h>

#include "graph/exec.h"
#include "graph/passes.h"
#include "op/formula.h"
#include "op/ops.h"

enum { ROWS = 5, COLS = 301, N = ROWS * COLS };

static void must(lm_code rc, const lm_err *e)
{
    if (rc)
        fail_msg("%s: %s", e->where, e->what);
}

static float a[N], b[N], row[COLS], col[ROWS], y[N], z[N];
static double one[1], gate[1], numbers[2];

static void reset(void)
{
    for (int i = 0; i < N; i++) {
        a[i] = sinf((float)i);
        b[i] = cosf((float)i * 0.7f) * 2;
        y[i] = z[i] = 7;
    }
    for (int i = 0; i < COLS; i++)
        row[i] = (float)(i % 7) - 3;
    for (int i = 0; i < ROWS; i++)
        col[i] = (float)i + 0.5f;
    one[0] = 3;
    gate[0] = 1;
    numbers[0] = 0.25;
    numbers[1] = -2;
}

typedef struct {
    lm_graph *g;
    lm_vid v[8];
} setting;

static const char *const names[] = { "a", "b", "row", "col", "one", "gate", "numbers", "y" };
static void *const memory[] = { a, b, row, col, one, gate, numbers, y };

static setting open_setting(void)
{
    lm_err e = { 0 };
    setting s;
    lm_tensor whole = lm_shape2(LM_DTYPE_F32, ROWS, COLS);
    lm_tensor shape[] = { whole,
                          whole,
                          lm_shape2(LM_DTYPE_F32, 1, COLS),
                          lm_shape2(LM_DTYPE_F32, ROWS, 1),
                          lm_shape1(LM_DTYPE_F64, 1),
                          lm_shape1(LM_DTYPE_F64, 1),
                          lm_shape1(LM_DTYPE_F64, 2),
                          whole };
    must(lm_graph_new(&s.g, &e), &e);
    for (int i = 0; i < 8; i++)
        must(lm_graph_value(s.g, LM_ROLE_STATE, shape[i], names[i], &s.v[i], &e), &e);
    return s;
}

static lm_code append(setting *s, const char *text, lm_err *e)
{
    const lm_formula_name name[] = { LM_IS("a", s->v[0]),     LM_IS("b", s->v[1]),
                                     LM_IS("row", s->v[2]),   LM_IS("col", s->v[3]),
                                     LM_IS("one", s->v[4]),   LM_IS("y", s->v[7]),
                                     LM_CONSTANT("half", 0.5) };
    lm_formula_scope scope = { .name = name,
                               .n_names = sizeof name / sizeof *name,
                               .number = (const char *const[]){ "lr", "low" },
                               .n_numbers = 2,
                               .numbers = s->v[6],
                               .gate = s->v[5] };
    return lm_formula_append(s->g, text, &scope, e);
}

static void run(const setting *s, lm_cpu_level level)
{
    lm_err e = { 0 };
    lm_backend *back;
    lm_exec *x;
    must(lm_backend_cpu(level, NULL, &back, &e), &e);
    must(lm_exec_new(s->g, back, NULL, 0, &x, &e), &e);
    for (int i = 0; i < 8; i++)
        lm_exec_bind(x, s->v[i], memory[i]);
    must(lm_exec_run(x, &(lm_step){ 0 }, &e), &e);
    lm_exec_free(x);
    lm_backend_close(back);
}

static double expected(int which, int i)
{
    double A = sinf((float)i), B = cosf((float)i * 0.7f) * 2, R = (i % COLS) % 7 - 3;
    double C = i / COLS + 0.5;
    switch (which) {
    case 0:
        return A - B - C;
    case 1:
        return A / B / 2 * R;
    case 2:
        return -A * -(2 + B) + 1e-3;
    case 3:
        return (R > 0) - (R < 0) + 10 * rint(B);
    case 4:
        return fmin(C, fmax(-0.5, A)) + (A < B ? fabs(R) : sqrt(C));
    case 5:
        return A - 0.25 * (3 - 0.5) * B - 2;
    case 6:
        return A * 2 + B;
    default:
        return 0.25 * 4;
    }
}

/* Each text on its own, at each level. */
static void test_meaning(void **state)
{
    static const char *const text[] = {
        "y = a - b - col",
        "y = a / b / 2 * row",
        "y = -a * -(2 + b) + 1e-3",
        "y = sign(row) + 10*round(b)",
        "y = min(col, max(-half, a)) + where(a < b, abs(row), sqrt(col));",
        "k = lr * (one - half) ;\n y = a - k*b + low",
        "t = a; a = a*2; y = t + a - t + b",
        "y = lr * 4",
    };
    (void)state;
    for (int level = 0; level <= (int)lm_cpu_detect(); level++)
        for (int k = 0; k < 8; k++) {
            lm_err e = { 0 };
            setting s = open_setting();
            reset();
            must(append(&s, text[k], &e), &e);
            assert_int_equal(s.g->n_nodes, 1);
            run(&s, (lm_cpu_level)level);
            for (int i = 0; i < N; i++)
                assert_true(fabs(y[i] - expected(k, i)) <= 1e-5 * (1 + fabs(expected(k, i))));
            lm_graph_free(s.g);
        }
}

/* A formula may read an operand that it overwrites, before and after the assignment. */
static void test_written_over(void **state)
{
    (void)state;
    for (int level = 0; level <= (int)lm_cpu_detect(); level++) {
        lm_err e = { 0 };
        setting s = open_setting();
        reset();
        must(append(&s, "old = a; a = b; b = old; y = a - b", &e), &e);
        run(&s, (lm_cpu_level)level);
        for (int i = 0; i < N; i++) {
            assert_true(b[i] == sinf((float)i) && a[i] == cosf((float)i * 0.7f) * 2);
            assert_true(y[i] == a[i] - b[i]);
        }
        lm_graph_free(s.g);
    }
}

static void test_gate(void **state)
{
    (void)state;
    for (int level = 0; level <= (int)lm_cpu_detect(); level++) {
        lm_err e = { 0 };
        setting s = open_setting();
        reset();
        gate[0] = NAN;
        must(append(&s, "y = a", &e), &e);
        run(&s, (lm_cpu_level)level);
        for (int i = 0; i < N; i++)
            assert_true(y[i] == 7);
        lm_graph_free(s.g);
    }
}

static void test_refused(void **state)
{
    static const char *const text[] = { "y = ",         "y = (a",  "y = unknown",
                                        "y = gamma(a)", "y = a b", "y",
                                        "y = min(a)",   "= a",     "y = a ! b" };
    (void)state;
    for (size_t i = 0; i < sizeof text / sizeof *text; i++) {
        lm_err e = { 0 };
        setting s = open_setting();
        assert_int_equal(append(&s, text[i], &e), LM_EBUG);
        lm_graph_free(s.g);
    }
}

/* The same formula on neighbouring pieces becomes one call; with a vector of rows of its own it
 * does not. */
static void test_merged(void **state)
{
    lm_err e = { 0 };
    (void)state;
    for (int spread = 0; spread < 2; spread++) {
        setting s = open_setting();
        for (int k = 0; k < ROWS; k++) {
            lm_vid p, q;
            lm_tensor one_row = lm_shape2(LM_DTYPE_F32, 1, COLS),
                      cell = lm_shape2(LM_DTYPE_F32, 1, 1);
            must(lm_graph_view(s.g, s.v[0], k * COLS, one_row, NULL, &p, &e), &e);
            must(lm_graph_view(s.g, s.v[3], spread ? k : 0, cell, NULL, &q, &e), &e);
            const lm_formula_name name[] = { LM_IS("p", p), LM_IS("q", spread ? q : s.v[4]) };
            lm_formula_scope scope = {
                .name = name, .n_names = 2, .numbers = s.v[6], .gate = s.v[5]
            };
            must(lm_formula_append(s.g, "p = p * q", &scope, &e), &e);
        }
        must(lm_pass_merge(s.g, &e), &e);
        assert_int_equal(s.g->n_nodes, spread ? ROWS : 1);
        reset();
        run(&s, lm_cpu_detect());
        for (int i = 0; i < N; i++)
            assert_true(a[i] == sinf((float)i) * (float)(spread ? col[i / COLS] : one[0]));
        lm_graph_free(s.g);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_meaning), cmocka_unit_test(test_written_over),
        cmocka_unit_test(test_gate),    cmocka_unit_test(test_refused),
        cmocka_unit_test(test_merged),
    };
    return cmocka_run_group_tests_name("op_formula", tests, NULL, NULL);
}
