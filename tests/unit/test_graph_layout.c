/* SPDX-License-Identifier: Apache-2.0 */
/* Layouts: which part of a value each rank of a mesh holds. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <string.h>

#include "graph/passes.h"
#include "kernels/elementwise.h"
#include "kernels/linear.h"
#include "numeric/code_rows.h"
#include "op/ops.h"

static void must(lm_code rc, const lm_err *e)
{
    if (rc)
        fail_msg("%s: %s", e->where, e->what);
}

static lm_layout read(const char *text)
{
    lm_err e = { 0 };
    lm_layout l;
    must(lm_layout_read(text, &l, &e), &e);
    return l;
}

static void test_text(void **state)
{
    static const char *const good[] = { "replicated", "tp=split0", "dp=partial,pp=on12,ep=split4",
                                        "dp=split1:2*5,tp=split0:4096/128+2*1024/128",
                                        "cp=split0:8*256z" };
    static const char *const bad[] = { "",
                                       "tp",
                                       "tp=",
                                       "xp=split0",
                                       "tp=split",
                                       "tp=split5",
                                       "tp=split-1",
                                       "tp=split0,tp=on1",
                                       "tp=replicated,tp=on1",
                                       "tp=on",
                                       "tp=on1k",
                                       "tp=partial1",
                                       "tp=split0,",
                                       "tp =split0",
                                       "tp=split0:",
                                       "tp=split0:4/3",
                                       "tp=split0:4+",
                                       "tp=split0:4*",
                                       "tp=split0:0*4",
                                       "tp=split0:1+1+1+1+1",
                                       "tp=on0:4",
                                       "tp=split0:4 ",
                                       "pp=on1000000000000000000000000" };
    (void)state;
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        lm_err e = { 0 };
        lm_buf text = { 0 };
        lm_layout l = read(good[i]), zero = { 0 };
        must(lm_layout_print(&l, &text, &e), &e);
        assert_string_equal(text.data, good[i]);
        assert_int_equal(lm_layout_same(&l, &zero), i == 0);
        lm_buf_fini(&text);
    }
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        lm_err e = { 0 };
        lm_layout l;
        assert_int_equal(lm_layout_read(bad[i], &l, &e), LM_EUSAGE);
    }
    lm_layout l = read("tp=replicated,dp=split1");
    assert_int_equal(l.axis[LM_AXIS_DP].share, LM_SPLIT);
    assert_int_equal(l.axis[LM_AXIS_DP].at, 1);
}

/* The parts of all ranks of a mesh of n x m x p ranks along dp, cp and tp cover each element exactly once. */
static void covers(const char *text, int n, int m, int p)
{
    static int seen[7][10][3];
    lm_tensor whole = { .dtype = LM_DTYPE_F32, .ndim = 3, .dim = { 7, 10, 3 } }, part;
    lm_layout l = read(text);
    memset(seen, 0, sizeof seen);
    for (int r = 0; r < n * m * p; r++) {
        lm_mesh mesh = { .size = { n, 1, m, p, 1 }, .rank = { r / p / m, 0, r / p % m, r % p, 0 } };
        int64_t first[LM_MAX_DIMS];
        lm_layout_part(&l, &mesh, &whole, &part, first);
        for (int64_t i = 0; i < part.dim[0]; i++)
            for (int64_t j = 0; j < part.dim[1]; j++)
                for (int64_t k = 0; k < part.dim[2]; k++)
                    seen[first[0] + i][first[1] + j][first[2] + k]++;
    }
    for (int i = 0; i < 7 * 10 * 3; i++)
        assert_int_equal((&seen[0][0][0])[i], 1);
}

static void test_part(void **state)
{
    lm_layout l = read("dp=split0,tp=split0");
    lm_tensor t = { .dtype = LM_DTYPE_BF16, .ndim = 2, .dim = { 7, 4 } }, part;
    lm_mesh mesh = { .size = { 2, 1, 1, 2, 1 }, .rank = { 1, 0, 0, 1, 0 } };
    int64_t first[LM_MAX_DIMS];
    (void)state;
    lm_layout_part(&l, &mesh, &t, &part, first); /* 7: rows 3..6 of dp, of which 5..6 */
    assert_int_equal(part.dim[0], 2);
    assert_int_equal(first[0], 5);
    assert_int_equal(part.dim[1], 4);
    covers("dp=split0,cp=split1,tp=split0", 2, 3, 2);
    covers("dp=split2,cp=split1,tp=split0", 4, 3, 2); /* more ranks than elements */
    covers("dp=on1,cp=on0,tp=split1", 3, 2, 4);
    l = read("dp=partial,pp=on0");
    lm_layout_part(&l, &mesh, &t, &part, NULL);
    assert_int_equal(lm_tensor_count(&part), 28);
    lm_layout_part(&l, &lm_mesh_alone, &t, &t, NULL);
    assert_int_equal(lm_tensor_count(&t), 28);
    t.dim[0] = INT64_MAX / 8; /* no product overflows */
    mesh.size[LM_AXIS_DP] = 1 << 20, mesh.rank[LM_AXIS_DP] = (1 << 20) - 1;
    l = read("dp=split0");
    lm_layout_part(&l, &mesh, &t, &part, first);
    assert_int_equal(first[0] + part.dim[0], t.dim[0]);
}

/* Rows in two formats, split over ranks: each rank holds the codes of its own rows. */
static void test_codes(void **state)
{
    lm_err e = { 0 };
    const lm_format *q8, *q4;
    must(lm_format_find("q8_0", NULL, &q8, &e), &e);
    must(lm_format_find("q4_0", NULL, &q4, &e), &e);
    struct lm_code_run run[] = { { .rows = 6, .format = q8 },
                                 { .row = 6, .rows = 4, .format = q4 } };
    lm_code_rows c = { .n = 2, .run = run };
    lm_value v = { .t = { .dtype = LM_DTYPE_BF16, .ndim = 2, .dim = { 10, 256 }, .codes = &c } };
    lm_mesh mesh = { .size = { 1, 1, 1, 2, 1 } };
    size_t q8_row = 256 / 32 * 34, q4_row = 256 / 32 * 18;
    (void)state;
    assert_int_equal(lm_value_bytes(&v, &lm_mesh_alone), 6 * q8_row + 4 * q4_row);
    v.layout = read("tp=split0");
    for (mesh.rank[LM_AXIS_TP] = 0; mesh.rank[LM_AXIS_TP] < 2; mesh.rank[LM_AXIS_TP]++) {
        size_t least = mesh.rank[LM_AXIS_TP] ? q8_row + 4 * q4_row : 5 * q8_row;
        assert_int_equal(lm_value_bytes(&v, &mesh), least);
    }
}

static void test_mesh(void **state)
{
    static const char *const bad[] = { "",      "dp",        "dp=",        "dp=0",    "dp=-1",
                                       "dp=2 ", "dp=2,",     "dp=2,dp=2",  "xp=2",    "dp=1000000",
                                       "=2",    "dp=split0", "dp=2,,tp=2", "dp=2tp=2" };
    lm_err e = { 0 };
    lm_mesh mesh;
    (void)state;
    must(lm_mesh_read("dp=2,tp=4", &mesh, &e), &e);
    const lm_mesh want = { .size = { 2, 1, 1, 4, 1 } };
    assert_memory_equal(&mesh, &want, sizeof mesh);
    assert_int_equal(lm_mesh_ranks(&mesh), 8);
    assert_int_equal(lm_mesh_ranks(&lm_mesh_alone), 1);
    must(lm_mesh_read("ep=999999", &mesh, &e), &e);
    assert_int_equal(lm_mesh_ranks(&mesh), 999999);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        e = (lm_err){ 0 };
        assert_int_equal(lm_mesh_read(bad[i], &mesh, &e), LM_EUSAGE);
    }
}

/* x [6,8] -> linear -> gelu; the weight split over tp. */
static void test_graph(void **state)
{
    lm_err e = { 0 };
    lm_graph *g;
    lm_vid x, w, cut, in[LM_MAX_IN] = { 0 }, out[LM_MAX_OUT] = { LM_NONE };
    lm_layout rows = read("tp=split0"), deep = read("tp=split2"), none = read("replicated");
    lm_linear_attr linear = { LM_ACC_FIRST };
    lm_mesh half = { .size = { 1, 1, 1, 2, 1 }, .rank = { 0, 0, 0, 1, 0 } };
    lm_buf text = { 0 };
    (void)state;
    must(lm_graph_new(&g, &e), &e);
    must(lm_graph_value(g, LM_ROLE_INPUT, lm_shape2(LM_DTYPE_F32, 6, 8), "x", &x, &e), &e);
    must(lm_graph_value(g, LM_ROLE_PARAM, lm_shape2(LM_DTYPE_F32, 5, 8), "w", &w, &e), &e);
    assert_int_equal(lm_graph_lay(g, w, &deep, &e), LM_EUSAGE);
    e = (lm_err){ 0 };
    must(lm_graph_lay(g, w, &rows, &e), &e);
    assert_int_equal(lm_value_bytes(&g->value[w], &lm_mesh_alone), 5 * 8 * 4);
    assert_int_equal(lm_value_bytes(&g->value[w], &half), 3 * 8 * 4);
    in[0] = x, in[1] = w, in[2] = LM_NONE, in[3] = LM_NONE;
    must(lm_graph_append(g, &lm_op_linear, &linear, in, out, &e), &e);
    must(lm_graph_dump(g, &text, &e), &e);
    assert_non_null(strstr(text.data, "w %1 w {tp=split0}"));
    assert_null(strstr(text.data, "x %0 x {"));
    lm_buf_fini(&text);

    lm_vid seed;
    must(lm_graph_value(g, LM_ROLE_INPUT, lm_shape2(LM_DTYPE_F32, 6, 5), "seed", &seed, &e), &e);
    must(lm_pass_backward(g, &(lm_backward){ .root = out[0], .seed = seed }, &e), &e);
    int grads = 0;
    for (size_t v = 0; v < g->n_values; v++)
        if (g->value[v].grad_of == w && ++grads)
            assert_true(lm_layout_same(&g->value[v].layout, &rows));
    assert_int_equal(grads, 1);
    assert_int_equal(lm_graph_view(g, w, 0, lm_shape1(LM_DTYPE_F32, 8), NULL, &cut, &e), LM_EBUG);
    e = (lm_err){ 0 };
    must(lm_graph_lay(g, w, &none, &e), &e);
    must(lm_graph_view(g, w, 0, lm_shape1(LM_DTYPE_F32, 8), NULL, &cut, &e), &e);
    assert_int_equal(lm_graph_lay(g, w, &rows, &e), LM_EBUG);
    assert_int_equal(lm_graph_lay(g, cut, &rows, &e), LM_EBUG);
    lm_graph_free(g);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_text), cmocka_unit_test(test_part),  cmocka_unit_test(test_codes),
        cmocka_unit_test(test_mesh), cmocka_unit_test(test_graph),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
