/* SPDX-License-Identifier: Apache-2.0 */
/* Views: parts of a value's memory as operands, and the pass that merges calls on adjacent
 * parts. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <string.h>

#include "base/rng.h"
#include "graph/exec.h"
#include "graph/passes.h"
#include "kernels/elementwise.h"
#include "kernels/linear.h"
#include "op/fuse.h"
#include "op/ops.h"

enum { BLOCK = 1000 };

static void must(lm_code rc, const lm_err *e)
{
    if (rc)
        fail_msg("%s: %s", e->where, e->what);
}

static lm_vid value(lm_graph *g, lm_role role, lm_tensor t)
{
    lm_err e = { 0 };
    lm_vid v;
    must(lm_graph_value(g, role, t, NULL, &v, &e), &e);
    return v;
}

static lm_vid piece(lm_graph *g, lm_vid of, int64_t at, int64_t rows, int64_t cols)
{
    lm_err e = { 0 };
    lm_vid v;
    must(lm_graph_view(g, of, at, lm_shape2(LM_DTYPE_F32, rows, cols), NULL, &v, &e), &e);
    return v;
}

static void put(lm_graph *g, const lm_op *op, const void *attr, lm_vid a, lm_vid b, lm_vid out)
{
    lm_err e = { 0 };
    lm_vid in[LM_MAX_IN] = { a, b, LM_NONE };
    must(lm_graph_append(g, op, attr, in, &out, &e), &e);
}

/* A graph over blocks x, y and z of BLOCK elements each, as values 0, 1 and 2. */
static lm_graph *blocks(void)
{
    lm_err e = { 0 };
    lm_graph *g;
    must(lm_graph_new(&g, &e), &e);
    for (int i = 0; i < 3; i++)
        value(g, i < 2 ? LM_ROLE_PARAM : LM_ROLE_GRAD, lm_shape1(LM_DTYPE_F32, BLOCK));
    return g;
}

static void test_views(void **state)
{
    lm_err e = { 0 };
    lm_vid v;
    lm_graph *g = blocks();
    lm_tensor rows = lm_shape2(LM_DTYPE_F32, 10, 7);
    (void)state;
    lm_vid a = piece(g, 0, 128, 20, 7), b = piece(g, a, 70, 10, 7), c = piece(g, 0, 0, 2, 64);
    assert_int_equal(g->value[b].of, 0);
    assert_int_equal(g->value[b].at, 198);
    assert_int_equal(g->value[b].role, LM_ROLE_PARAM);
    assert_true(lm_graph_share(g, a, b) && lm_graph_share(g, 0, b) && lm_graph_share(g, b, b));
    assert_false(lm_graph_share(g, a, c) || lm_graph_share(g, a, 1) ||
                 lm_graph_share(g, LM_NONE, LM_NONE));
    size_t n = g->n_values;
    assert_int_equal(lm_graph_view(g, a, 71, rows, "late", &v, &e), LM_EBUG);
    assert_string_equal(e.where, "late");
    e = (lm_err){ 0 };
    assert_int_equal(lm_graph_view(g, a, -1, rows, NULL, &v, &e), LM_EBUG);
    e = (lm_err){ 0 };
    lm_vid act = value(g, LM_ROLE_ACT, rows);
    assert_int_equal(lm_graph_view(g, act, 0, rows, NULL, &v, &e), LM_EBUG);
    assert_int_equal(g->n_values, n + 1);
    e = (lm_err){ 0 };
    assert_int_equal(lm_pass_precision(g, &(lm_precision){ LM_DTYPE_BF16, NULL }, &e), LM_EBUG);
    lm_graph_free(g);
}

/* Run g over blocks that begin as 0.001 i, -0.5 + 0.002 i and 7; z is copied to `out`. */
static void run(const lm_graph *g, float out[BLOCK])
{
    static float mem[3][BLOCK];
    lm_err e = { 0 };
    lm_backend *b;
    lm_exec *x;
    must(lm_backend_cpu(LM_CPU_REF, NULL, &b, &e), &e);
    must(lm_exec_new(g, b, NULL, 0, &x, &e), &e);
    for (int i = 0; i < BLOCK; i++) {
        mem[0][i] = (float)i * 0.001f;
        mem[1][i] = -0.5f + (float)i * 0.002f;
        mem[2][i] = 7;
    }
    for (int i = 0; i < 3; i++)
        lm_exec_bind(x, i, mem[i]);
    must(lm_exec_run(x, &(lm_step){ 0 }, &e), &e);
    memcpy(out, mem[2], sizeof mem[2]);
    lm_exec_free(x);
    lm_backend_close(b);
}

static void add_piece(lm_graph *g, int64_t at, int64_t rows, int64_t cols)
{
    put(g, &lm_op_add, NULL, piece(g, 0, at, rows, cols), piece(g, 1, at, rows, cols),
        piece(g, 2, at, rows, cols));
}

/* Of five tensors the second and the third are rows of one matrix, and there is a gap before the
 * fourth: two merged calls, with the results of five. */
static void test_merge(void **state)
{
    float apart[BLOCK], merged[BLOCK];
    lm_err e = { 0 };
    lm_graph *g = blocks();
    (void)state;
    add_piece(g, 64, 5, 7); /* to 99 */
    add_piece(g, 128, 3, 9);
    add_piece(g, 155, 4, 9); /* to 191 */
    add_piece(g, 320, 10, 10);
    add_piece(g, 448, 1, 500);
    run(g, apart);
    must(lm_pass_merge(g, &e), &e);
    assert_int_equal(g->n_nodes, 2);
    const lm_value *first = &g->value[g->node[0].out[0]], *second = &g->value[g->node[1].in[1]];
    assert_true(first->of == 2 && first->at == 64 && lm_tensor_count(&first->t) == 191 - 64);
    assert_true(second->of == 1 && second->at == 320 && lm_tensor_count(&second->t) == 948 - 320);
    run(g, merged);
    for (int i = 0; i < BLOCK; i++) {
        bool in = (i >= 64 && i < 99) || (i >= 128 && i < 191) || (i >= 320 && i < 420) ||
                  (i >= 448 && i < 948);
        assert_true(apart[i] == (in ? i * 0.001f + (-0.5f + i * 0.002f) : 7));
        assert_true(!in || apart[i] == merged[i]);
        if (i < 64 || (i >= 191 && i < 320) || i >= 948)
            assert_true(merged[i] == 7);
    }
    must(lm_pass_merge(g, &e), &e);
    assert_int_equal(g->n_nodes, 2);
    lm_graph_free(g);
}

/* Two nodes on [0,64) and [64,128) that must not be merged. */
static void test_kept_apart(void **state)
{
    lm_gelu_attr exact = { true }, tanh_form = { false };
    lm_dropout_attr drop = { .p = 0.5, .site = 1 };
    (void)state;
    for (int i = 0; i < 8; i++) {
        lm_err e = { 0 };
        lm_graph *g = blocks();
        lm_vid x[2] = { piece(g, 0, 0, 1, 64), piece(g, 0, 64, 1, 64) };
        lm_vid z[2] = { piece(g, 2, 0, 1, 64), piece(g, 2, 64, 1, 64) };
        for (int k = 0; k < 2; k++)
            switch (i) {
            case 0: /* mergeable */
                put(g, &lm_op_gelu, &exact, x[k], LM_NONE, z[k]);
                break;
            case 1: /* attributes */
                put(g, &lm_op_gelu, k ? &exact : &tanh_form, x[k], LM_NONE, z[k]);
                break;
            case 2: /* different numbers for each call */
                put(g, &lm_op_dropout, &drop, x[k], LM_NONE, z[k]);
                break;
            case 3: /* descending addresses */
                put(g, &lm_op_gelu, &exact, x[!k], LM_NONE, z[!k]);
                break;
            case 4: /* only one operand is adjacent */
                put(g, &lm_op_add, NULL, x[k], piece(g, 1, 256 * k, 1, 64), z[k]);
                break;
            case 5: /* the second reads a result of the first */
                put(g, &lm_op_gelu, &exact, z[k], LM_NONE, piece(g, 2, 64 + 64 * k, 1, 64));
                break;
            case 6: /* another in between */
                put(g, &lm_op_gelu, &exact, x[k], LM_NONE, z[k]);
                if (!k)
                    put(g, &lm_op_dropout, &drop, x[k], LM_NONE, piece(g, 2, 512, 1, 64));
                break;
            default: /* phases */
                g->phase = k ? LM_PHASE_BACKWARD_INPUT : LM_PHASE_FORWARD;
                put(g, &lm_op_gelu, &exact, x[k], LM_NONE, z[k]);
            }
        size_t n = g->n_nodes;
        must(lm_pass_merge(g, &e), &e);
        assert_int_equal(g->n_nodes, i ? n : 1);
        lm_graph_free(g);
    }
}

static bool joins_all(lm_backend *b, const char *op, lm_dtype act, const lm_call *c)
{
    (void)b, (void)op, (void)act, (void)c;
    return true;
}

/* Joining does not move a node past one that writes to a view of its operand. */
static void test_fuse_sees_views(void **state)
{
    lm_err e = { 0 };
    lm_graph *g = blocks();
    lm_backend *b;
    lm_linear_attr linear = { LM_ACC_FIRST };
    lm_gelu_attr gelu = { false };
    (void)state;
    lm_vid w = value(g, LM_ROLE_PARAM, lm_shape2(LM_DTYPE_F32, 8, 8));
    lm_vid x = value(g, LM_ROLE_INPUT, lm_shape2(LM_DTYPE_F32, 4, 8));
    lm_vid h = value(g, LM_ROLE_ACT, lm_shape2(LM_DTYPE_F32, 4, 8));
    lm_vid y = value(g, LM_ROLE_ACT, lm_shape2(LM_DTYPE_F32, 4, 8));
    put(g, &lm_op_linear, &linear, x, w, h);
    put(g, &lm_op_gelu, &gelu, piece(g, 0, 0, 1, 8), LM_NONE, piece(g, w, 8, 1, 8));
    put(g, &lm_op_gelu, &gelu, h, LM_NONE, y);
    must(lm_backend_cpu(LM_CPU_REF, NULL, &b, &e), &e);
    b->joins = joins_all;
    must(lm_fuse(g, b, &y, 1, &e), &e);
    assert_int_equal(g->n_nodes, 2);
    assert_true(g->node[0].op == &lm_op_linear_act && g->node[1].op == &lm_op_gelu);
    lm_backend_close(b);
    lm_graph_free(g);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_views),
        cmocka_unit_test(test_merge),
        cmocka_unit_test(test_kept_apart),
        cmocka_unit_test(test_fuse_sees_views),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
