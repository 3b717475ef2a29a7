/* SPDX-License-Identifier: Apache-2.0 */
/* The graph: precision pass, backward pass, memory plan, executor, dump. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/rng.h"
#include "kernels/elementwise.h"
#include "kernels/embed.h"
#include "kernels/grouped.h"
#include "kernels/head.h"
#include "kernels/linear.h"
#include "kernels/norm.h"
#include "kernels/rope.h"
#include "model_run.h"
#include "op/ops.h"

/* ---- graphs to test with ---- */

static lm_vid value(lm_graph *g, lm_role role, lm_tensor t, const char *name)
{
    lm_err e = { 0 };
    lm_vid v;
    must(lm_graph_value(g, role, t, name, &v, &e), &e);
    return v;
}

/* Append op(attr; a, b, c, d); returns the first output, and the third in *s if s is not NULL. */
static lm_vid put(lm_graph *g, const lm_op *op, const void *attr, lm_vid a, lm_vid b, lm_vid c,
                  lm_vid d, lm_vid *s)
{
    lm_err e = { 0 };
    lm_vid in[LM_MAX_IN] = { a, b, c, d }, out[LM_MAX_OUT] = { LM_NONE, LM_NONE, LM_NONE, LM_NONE };
    if (op == &lm_op_head_stats)
        out[2] = out[3] = out[4] = LM_SKIP;
    must(lm_graph_append(g, op, attr, in, out, &e), &e);
    if (s)
        *s = out[2];
    return out[0];
}

enum { N = 6, C = 8, V = 11 };

typedef struct {
    lm_graph *g;
    lm_vid tokens, wte, gain, w1, b1, w2, targets, loss;
} tiny;

/* tokens -> embed -> norm -> linear -> gelu -> linear (+ the embedding) -> head. */
static void make_tiny(tiny *t, lm_dtype act)
{
    lm_err e = { 0 };
    lm_dtype wide = lm_wide(act);
    lm_norm_attr norm = { LM_NORM_RMS, 1e-5, LM_ACC_FIRST, false };
    lm_linear_attr linear = { LM_ACC_FIRST };
    lm_embed_attr embed = { LM_ACC_FIRST, LM_ACC_FIRST, 0 };
    lm_gelu_attr gelu = { false };
    lm_head_attr head = { V, 0, LM_ACC_FIRST, 0 };
    must(lm_graph_new(&t->g, &e), &e);
    t->tokens = value(t->g, LM_ROLE_INPUT, lm_shape1(LM_DTYPE_I32, N), "tokens");
    t->wte = value(t->g, LM_ROLE_PARAM, lm_shape2(act, V, C), "wte");
    t->gain = value(t->g, LM_ROLE_PARAM, lm_shape1(wide, C), "gain");
    t->w1 = value(t->g, LM_ROLE_PARAM, lm_shape2(act, 4 * C, C), "w1");
    t->b1 = value(t->g, LM_ROLE_PARAM, lm_shape1(wide, 4 * C), "b1");
    t->w2 = value(t->g, LM_ROLE_PARAM, lm_shape2(act, C, 4 * C), "w2");
    t->targets = value(t->g, LM_ROLE_INPUT, lm_shape1(LM_DTYPE_I32, N), "targets");
    lm_vid x = put(t->g, &lm_op_embed, &embed, t->tokens, t->wte, LM_NONE, LM_NONE, NULL);
    lm_vid h = put(t->g, &lm_op_norm, &norm, x, t->gain, LM_NONE, LM_NONE, NULL);
    h = put(t->g, &lm_op_linear, &linear, h, t->w1, t->b1, LM_NONE, NULL);
    h = put(t->g, &lm_op_gelu, &gelu, h, LM_NONE, LM_NONE, LM_NONE, NULL);
    h = put(t->g, &lm_op_linear, &linear, h, t->w2, LM_NONE, LM_NONE, NULL);
    h = put(t->g, &lm_op_add, NULL, h, x, LM_NONE, LM_NONE, NULL);
    t->loss = put(t->g, &lm_op_head_stats, &head, h, t->wte, t->targets, LM_NONE, NULL);
}

static char *dump(const lm_graph *g)
{
    lm_err e = { 0 };
    lm_buf b = { 0 };
    must(lm_graph_dump(g, &b, &e), &e);
    must(lm_buf_addf(&b, &e, "%c", 0), &e);
    return (char *)b.data;
}

/* ---- dump and errors ---- */

static void test_dump(void **state)
{
    tiny t;
    (void)state;
    make_tiny(&t, LM_DTYPE_F32);
    t.g->layer = 3;
    char *text = dump(t.g);
    assert_non_null(
        strstr(text, "   0 forward L-1 embed (tok %0 tokens, wte %1 wte) -> x %7 f32[6,8]\n"));
    assert_non_null(strstr(text, "norm (x %7, w %2 gain) kind=rms eps=1e-05 -> y %8 f32[6,8], "
                                 "stat %9 f32[6,2]\n"));
    assert_non_null(strstr(text, " gelu (x %10) exact=false -> y %11 f32[6,32]\n"));
    assert_non_null(
        strstr(text, "head_stats (x %13, w %1 wte, target %6 targets) vocab=11 chunk_rows=0 -> "
                     "loss %14 f32[6], lse %15 f32[6]\n"));
    int lines = 0;
    for (const char *p = text; *p; p++)
        lines += *p == '\n';
    assert_int_equal(lines, t.g->n_nodes);
    lm_free(text);
    lm_graph_free(t.g);
}

/* The error of appending op(attr; a, b, c); "" if there is none. */
static const char *complaint(lm_graph *g, const lm_op *op, const void *attr, lm_vid a, lm_vid b,
                             lm_vid c)
{
    static lm_err e;
    lm_vid in[LM_MAX_IN] = { a, b, c }, out[LM_MAX_OUT] = { LM_NONE, LM_NONE, LM_NONE };
    e = (lm_err){ 0 };
    lm_graph_append(g, op, attr, in, out, &e);
    return e.code ? e.what : "";
}

/* Operands against the dimension letters of their tables: bound by other operands, by attributes,
 * or solved for. */
static void test_operands(void **state)
{
    lm_err e = { 0 };
    lm_graph *g;
    (void)state;
    must(lm_graph_new(&g, &e), &e);
    lm_vid x = value(g, LM_ROLE_INPUT, lm_shape2(LM_DTYPE_F32, 6, 24), "x");
    lm_vid odd = value(g, LM_ROLE_INPUT, lm_shape2(LM_DTYPE_F32, 6, 7), "odd");
    lm_vid low = value(g, LM_ROLE_PARAM, lm_shape2(LM_DTYPE_BF16, 3, 24), "low");
    lm_vid w3 = value(g, LM_ROLE_PARAM, lm_shape2(LM_DTYPE_F32, 8, 24), "w3");
    lm_vid ids5 = value(g, LM_ROLE_INPUT, lm_shape1(LM_DTYPE_I32, 5), "ids5");
    lm_vid ids6 = value(g, LM_ROLE_INPUT, lm_shape1(LM_DTYPE_I32, 6), "ids6");
    lm_vid table = value(g, LM_ROLE_CONST, lm_shape2(LM_DTYPE_F32, 9, 4), "table");
    lm_grouped_attr grouped = { 4, 2, LM_ACC_FIRST };
    lm_linear_attr linear = { LM_ACC_FIRST };
    lm_rope_attr rope = { 4, 1, 4, 4, false };

    assert_string_equal(complaint(g, &lm_op_swiglu, NULL, odd, LM_NONE, LM_NONE),
                        "gu is f32[6,7], not [N,2I]");
    assert_string_equal(complaint(g, &lm_op_grouped_linear, &grouped, x, w3, ids5), "");
    assert_string_equal(complaint(g, &lm_op_grouped_linear, &grouped, x, w3, ids6),
                        "offsets is i32[6], not [G+1]: G+1 is 5");
    assert_string_equal(complaint(g, &lm_op_rows, NULL, x, table, LM_NONE),
                        "idx is f32[9,4], not [M]");
    assert_string_equal(complaint(g, &lm_op_linear, &linear, x, low, LM_NONE),
                        "w is of bf16, not of f32");
    assert_string_equal(complaint(g, &lm_op_rope, &rope, x, ids6, table), "");
    rope.heads = 5;
    assert_string_equal(complaint(g, &lm_op_rope, &rope, x, ids6, table),
                        "qkv is f32[6,24], not [N,(H+2K)D]: (H+2K)D is 28");
    rope.heads = INT64_MAX;
    assert_string_equal(complaint(g, &lm_op_rope, &rope, x, ids6, table),
                        "(H+2K)D of qkv is negative or too large");
    rope = (lm_rope_attr){ 4, 1, 4, 2, false };
    assert_string_equal(complaint(g, &lm_op_rope, &rope, x, ids6, table),
                        "table is f32[9,4], not [P,R]: R is 2");
    lm_graph_free(g);
}

/* Each operand name occurs once in its operator; each letter of an output is bound. */
static void test_tables(void **state)
{
    const lm_op *op;
    (void)state;
    for (int j = 0; (op = lm_op_at(j)); j++) {
        const lm_operand *all[LM_MAX_IN + LM_MAX_OUT];
        int n = 0;
        for (int i = 0; i < lm_op_ins(op); i++)
            all[n++] = &op->in[i];
        for (int i = 0; i < lm_op_outs(op); i++)
            all[n++] = &op->out[i];
        for (int i = 0; i < n; i++) {
            assert_int_equal(strspn(all[i]->dims, "*~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ()+,"),
                             strlen(all[i]->dims));
            for (int k = 0; k < i; k++)
                assert_string_not_equal(all[i]->name, all[k]->name);
        }
    }
}

static void test_errors(void **state)
{
    tiny t;
    lm_err e = { 0 };
    lm_vid v, out[3] = { LM_NONE, LM_NONE, LM_NONE };
    lm_linear_attr linear = { LM_ACC_FIRST };
    (void)state;
    make_tiny(&t, LM_DTYPE_F32);
    lm_vid missing[3] = { LM_NONE, t.w1, LM_NONE };
    assert_int_equal(lm_graph_append(t.g, &lm_op_linear, &linear, missing, out, &e), LM_EBUG);
    assert_string_equal(e.what, "x is missing");
    e = (lm_err){ 0 };
    lm_vid wrong[3] = { t.w1, t.w2, LM_NONE };
    assert_int_equal(lm_graph_append(t.g, &lm_op_linear, &linear, wrong, out, &e), LM_EBUG);
    assert_string_equal(e.what, "w is f32[8,32], not [M,K]: K is 8");
    e = (lm_err){ 0 };
    lm_vid vector[3] = { t.w1, t.gain, LM_NONE };
    assert_int_equal(lm_graph_append(t.g, &lm_op_linear, &linear, vector, out, &e), LM_EBUG);
    assert_string_equal(e.what, "w is f32[8], not [M,K]");
    e = (lm_err){ 0 };
    lm_vid fits[3] = { t.w2, t.w2, LM_NONE };
    out[0] = t.gain; /* [C] is not [C,C] */
    assert_int_equal(lm_graph_append(t.g, &lm_op_linear, &linear, fits, out, &e), LM_EBUG);
    assert_non_null(strstr(e.what, "y has another shape"));
    e = (lm_err){ 0 };
    lm_vid ids[2] = { t.wte, t.tokens };
    out[0] = LM_NONE;
    assert_int_equal(lm_graph_append(t.g, &lm_op_add, NULL, ids, out, &e), LM_EBUG);
    assert_string_equal(e.what, "b is i32[6], but a is f32[11,8]");
    e = (lm_err){ 0 };
    assert_int_equal(lm_graph_value(t.g, LM_ROLE_ACT, lm_shape2(LM_DTYPE_F32, 0, 3), "z", &v, &e),
                     LM_EUSAGE);
    e = (lm_err){ 0 };
    assert_int_equal(lm_graph_value(t.g, LM_ROLE_ACT,
                                    lm_shape2(LM_DTYPE_F32, INT64_C(1) << 40, INT64_C(1) << 40),
                                    "z", &v, &e),
                     LM_EUSAGE);
    lm_graph_free(t.g);

    /* The error names the unbound input. */
    lm_backend *b;
    lm_exec *x;
    e = (lm_err){ 0 };
    make_tiny(&t, LM_DTYPE_F32);
    must(lm_backend_cpu(LM_CPU_REF, NULL, &b, &e), &e);
    must(lm_exec_new(t.g, b, &t.loss, 1, &x, &e), &e);
    assert_int_equal(lm_exec_run(x, &(lm_step){ 0 }, &e), LM_EBUG);
    assert_string_equal(e.where, "tokens");
    lm_exec_free(x);
    lm_backend_close(b);
    lm_graph_free(t.g);
}

/* ---- precision ---- */

static int count_ops(const lm_graph *g, const lm_op *op)
{
    int n = 0;
    for (size_t k = 0; k < g->n_nodes; k++)
        n += g->node[k].op == op;
    return n;
}

static lm_dtype type(const lm_graph *g, lm_vid v)
{
    return g->value[v].t.dtype;
}

static void test_precision(void **state)
{
    static const char *const keep_gelu[] = { "gelu", NULL }, *const keep_norm[] = { "norm", NULL };
    static const struct {
        lm_dtype low;
        const char *const *keep;
        int casts;
    } runs[] = { { LM_DTYPE_F32, NULL, 0 },
                 { LM_DTYPE_BF16, NULL, 0 },
                 { LM_DTYPE_BF16, keep_gelu, 2 },
                 { LM_DTYPE_BF16, keep_norm, 2 },
                 { LM_DTYPE_F64, keep_norm, 0 } };
    (void)state;
    for (size_t i = 0; i < sizeof runs / sizeof *runs; i++) {
        tiny t;
        lm_err e = { 0 };
        lm_precision p = { runs[i].low, runs[i].keep };
        make_tiny(&t, LM_DTYPE_F32);
        must(lm_pass_precision(t.g, &p, &e), &e);
        assert_int_equal(count_ops(t.g, &lm_op_cast), runs[i].casts);
        lm_vid weights[3] = { t.wte, t.w1, t.w2 }, wide[3] = { t.gain, t.b1, t.loss };
        for (int k = 0; k < 3; k++)
            assert_int_equal(type(t.g, weights[k]), runs[i].low);
        for (int k = 0; k < 3; k++)
            assert_int_equal(type(t.g, wide[k]), lm_wide(runs[i].low));
        for (size_t k = 0; k < t.g->n_nodes; k++) {
            const lm_node *n = &t.g->node[k];
            bool kept = runs[i].low == LM_DTYPE_BF16 && runs[i].keep &&
                        !strcmp(n->op->name, runs[i].keep[0]);
            for (int o = 0; n->op != &lm_op_cast && o < n->n_in; o++)
                if ((n->op->in[o].is & LM_ACT_TYPE) && n->in[o] >= 0)
                    assert_int_equal(type(t.g, n->in[o]), kept ? LM_DTYPE_F32 : runs[i].low);
        }
        lm_graph_free(t.g);
    }
}

/* A graph built in double equals one built in F32 and converted to double. */
static void test_precision_double(void **state)
{
    tiny a, b;
    lm_err e = { 0 };
    (void)state;
    make_tiny(&a, LM_DTYPE_F64);
    make_tiny(&b, LM_DTYPE_F32);
    must(lm_pass_precision(b.g, &(lm_precision){ LM_DTYPE_F64, NULL }, &e), &e);
    char *x = dump(a.g), *y = dump(b.g);
    assert_string_equal(x, y);
    lm_free(x);
    lm_free(y);
    lm_graph_free(a.g);
    lm_graph_free(b.g);
}

/* An input, and a parameter, that operators of two types read. */
static void test_precision_two_types(void **state)
{
    static const char *const keep[] = { "norm", "embed", NULL };
    lm_norm_attr norm = { LM_NORM_RMS, 1e-5, LM_ACC_FIRST, false };
    lm_linear_attr linear = { LM_ACC_FIRST };
    lm_err e = { 0 };
    lm_graph *g;
    tiny t;
    (void)state;
    must(lm_graph_new(&g, &e), &e);
    lm_vid x = value(g, LM_ROLE_INPUT, lm_shape2(LM_DTYPE_F32, N, C), "x");
    lm_vid w = value(g, LM_ROLE_PARAM, lm_shape2(LM_DTYPE_F32, C, C), "w");
    lm_vid gain = value(g, LM_ROLE_PARAM, lm_shape1(LM_DTYPE_F32, C), "gain");
    put(g, &lm_op_linear, &linear, x, w, LM_NONE, LM_NONE, NULL);
    put(g, &lm_op_norm, &norm, x, gain, LM_NONE, LM_NONE, NULL);
    put(g, &lm_op_linear, &linear, x, w, LM_NONE, LM_NONE, NULL);
    must(lm_pass_precision(g, &(lm_precision){ LM_DTYPE_BF16, keep }, &e), &e);
    for (size_t k = 0; k < g->n_nodes; k++)
        for (int o = 0; o < g->node[k].n_in; o++)
            if (g->node[k].op != &lm_op_cast && (g->node[k].op->in[o].is & LM_ACT_TYPE) &&
                g->node[k].in[o] >= 0)
                assert_int_equal(type(g, g->node[k].in[o]),
                                 g->node[k].op == &lm_op_norm ? LM_DTYPE_F32 : LM_DTYPE_BF16);
    assert_int_equal(count_ops(g, &lm_op_cast), 1);
    lm_graph_free(g);

    /* A value of a third type gets a separate copy for each reader type. */
    e = (lm_err){ 0 };
    must(lm_graph_new(&g, &e), &e);
    x = value(g, LM_ROLE_INPUT, lm_shape2(LM_DTYPE_F32, N, C), "x");
    w = value(g, LM_ROLE_PARAM, lm_shape2(LM_DTYPE_F32, C, C), "w");
    gain = value(g, LM_ROLE_PARAM, lm_shape1(LM_DTYPE_F32, C), "gain");
    lm_vid half = value(g, LM_ROLE_ACT, lm_shape2(LM_DTYPE_F32, N, C), "half");
    must(lm_graph_append(g, &lm_op_cast, NULL, &x, &half, &e), &e);
    for (int k = 0; k < 2; k++) {
        put(g, &lm_op_linear, &linear, half, w, LM_NONE, LM_NONE, NULL);
        put(g, &lm_op_norm, &norm, half, gain, LM_NONE, LM_NONE, NULL);
    }
    g->value[half].t.dtype = LM_DTYPE_F16; /* the result type of the cast */
    must(lm_pass_precision(g, &(lm_precision){ LM_DTYPE_BF16, keep }, &e), &e);
    assert_int_equal(count_ops(g, &lm_op_cast), 3);
    for (size_t k = 0; k < g->n_nodes; k++)
        if (g->node[k].op != &lm_op_cast)
            assert_int_equal(type(g, g->node[k].in[0]),
                             g->node[k].op == &lm_op_norm ? LM_DTYPE_F32 : LM_DTYPE_BF16);
    lm_graph_free(g);

    make_tiny(&t, LM_DTYPE_F32); /* wte: F32 to embed, BF16 to the head */
    assert_int_equal(lm_pass_precision(t.g, &(lm_precision){ LM_DTYPE_BF16, keep }, &e), LM_EUSAGE);
    assert_string_equal(e.where, "wte");
    lm_graph_free(t.g);
}

/* ---- random graphs ---- */

typedef struct {
    lm_graph *g;
    lm_vid root, *grads;
    size_t n_built; /* values before the backward */
} wild;

static void make_wild(wild *w, uint64_t seed, lm_dtype act)
{
    enum { MOST = 40 };
    lm_rng r = lm_rng_make(seed, "wild", 0);
    lm_err e = { 0 };
    lm_norm_attr norm = { LM_NORM_LAYER, 1e-5, LM_ACC_FIRST, false };
    lm_linear_attr linear = { LM_ACC_FIRST };
    lm_gelu_attr gelu = { false };
    lm_vid have[2 * MOST + 2];
    int n = 2, nodes = 4 + (int)lm_rng_below(r, 0, MOST - 4);
    must(lm_graph_new(&w->g, &e), &e);
    lm_vid gain = value(w->g, LM_ROLE_PARAM, lm_shape1(lm_wide(act), C), "gain");
    lm_vid sq = value(w->g, LM_ROLE_PARAM, lm_shape2(act, C, C), "square");
    have[0] = value(w->g, LM_ROLE_INPUT, lm_shape2(act, N, C), "a");
    have[1] = value(w->g, LM_ROLE_INPUT, lm_shape2(act, N, C), "b");
    for (int k = 1; k <= nodes; k++) {
        uint64_t at = (uint64_t)k * 8;
        int recent = n < 4 ? n : 4; /* mostly the latest, so that the graph is deep */
        lm_vid a = have[n - 1 - (int)lm_rng_below(r, at, (uint64_t)recent)];
        lm_vid b = have[lm_rng_below(r, at + 1, (uint64_t)n)], s = LM_NONE;
        lm_dropout_attr drop = { .p = 0.3, .site = k };
        switch (lm_rng_below(r, at + 2, 6)) {
        case 0:
            have[n++] = put(w->g, &lm_op_gelu, &gelu, a, LM_NONE, LM_NONE, LM_NONE, NULL);
            break;
        case 1:
            have[n++] = put(w->g, &lm_op_dropout, &drop, a, LM_NONE, LM_NONE, LM_NONE, NULL);
            break;
        case 2:
            have[n++] = put(w->g, &lm_op_linear, &linear, a, sq, LM_NONE, LM_NONE, NULL);
            break;
        case 3:
            have[n++] = put(w->g, &lm_op_norm, &norm, a, gain, LM_NONE, b, &s);
            have[n++] = s;
            break;
        default:
            have[n++] = put(w->g, &lm_op_add, NULL, a, b, LM_NONE, LM_NONE, NULL);
        }
    }
    w->root = put(w->g, &lm_op_add, NULL, have[n - 1], have[n - 2], LM_NONE, LM_NONE, NULL);
    lm_vid seed_v = value(w->g, LM_ROLE_INPUT, lm_shape2(act, N, C), "seed");
    lm_backward b = { .root = w->root, .seed = seed_v, .wrt = have, .n_wrt = 2 };
    w->n_built = w->g->n_values;
    b.grads = w->grads = room(w->n_built, sizeof *w->grads);
    must(lm_pass_backward(w->g, &b, &e), &e);
}

/* Separate memory for all values, filled with random numbers that depend on the value's index;
 * activations are NaN. */
static void **make_memory(const lm_graph *g)
{
    void **mem = room(g->n_values, sizeof *mem);
    for (size_t v = 0; v < g->n_values; v++) {
        const lm_value *x = &g->value[v];
        int64_t n = lm_tensor_count(&x->t);
        lm_rng r = lm_rng_make(1, "memory", v);
        mem[v] = room((size_t)n, lm_dtype_size(x->t.dtype));
        for (int64_t i = 0; i < n; i++)
            lm_set(x->t.dtype, mem[v], i,
                   !lm_dtype_is_float(x->t.dtype) ? (double)lm_rng_below(r, (uint64_t)i, 5)
                   : x->role == LM_ROLE_ACT       ? (double)NAN
                                                  : 0.5 * lm_rng_normal(r, (uint64_t)i));
    }
    return mem;
}

static void free_memory(const lm_graph *g, void **mem)
{
    for (size_t v = 0; v < g->n_values; v++)
        lm_free(mem[v]);
    lm_free(mem);
}

static void run_apart(const lm_graph *g, lm_backend *b, void **mem, const lm_step *step)
{
    lm_tensor in[LM_MAX_IN], out[LM_MAX_OUT];
    for (size_t k = 0; k < g->n_nodes; k++) {
        const lm_node *n = &g->node[k];
        const lm_kernel *kernel = b->kernel(b, n->op->name, lm_node_act(g, n));
        lm_call c = lm_node_call(g, n, in, out);
        for (int i = 0; i < n->n_in; i++)
            in[i].data = n->in[i] >= 0 ? mem[n->in[i]] : NULL;
        for (int i = 0; i < n->n_out; i++)
            out[i].data = n->out[i] >= 0 ? mem[n->out[i]] : NULL;
        c.par = b->par;
        c.step = step;
        c.work = kernel->work ? room(kernel->work(&c, b->threads) + 64, 1) : NULL;
        kernel->run(&c);
        lm_free(c.work);
    }
}

/* ---- plans ---- */

typedef struct {
    int64_t first, last;
    size_t from, to;
} life;

static bool overlap(const life *a, const life *b)
{
    return a->from < b->to && b->from < a->to;
}

/* True if b may share the memory of a, whose last reader is the node that writes b. */
static bool may_take(const lm_graph *g, lm_vid a, lm_vid b, int64_t node)
{
    const lm_node *n = &g->node[node];
    for (int o = 0; o < n->n_out; o++)
        for (int i = 0; n->out[o] == b && i < n->n_in; i++)
            if (n->in[i] == a && (n->op->in[i].is & n->op->out[o].is & LM_OVER))
                return true;
    return false;
}

static life *find_lives(const lm_graph *g, const lm_plan *p, const lm_vid *keep, int n_keep)
{
    life *l = room(g->n_values, sizeof *l);
    for (size_t v = 0; v < g->n_values; v++) {
        l[v] = (life){ -1, -1, p->offset[v], p->offset[v] };
        if (p->offset[v] != SIZE_MAX)
            l[v].to += (size_t)lm_tensor_count(&g->value[v].t) * lm_dtype_size(type(g, (lm_vid)v));
        for (size_t k = 0; k < g->n_nodes; k++) {
            const lm_node *n = &g->node[k];
            for (int i = 0; i < n->n_out; i++)
                if (n->out[i] == (lm_vid)v) {
                    l[v].first = l[v].first < 0 ? (int64_t)k : l[v].first;
                    l[v].last = (int64_t)k;
                }
            for (int i = 0; i < n->n_in; i++)
                if (n->in[i] == (lm_vid)v)
                    l[v].last = (int64_t)k;
        }
        for (int i = 0; i < n_keep; i++)
            if (keep[i] == (lm_vid)v)
                l[v].last = (int64_t)g->n_nodes;
    }
    return l;
}

static void check_plan(const lm_graph *g, lm_backend *b, const lm_vid *keep, int n_keep)
{
    lm_err e = { 0 };
    lm_plan p;
    must(lm_plan_make(g, b, keep, n_keep, &p, &e), &e);
    life *l = find_lives(g, &p, keep, n_keep);
    for (size_t v = 0; v < g->n_values; v++) {
        bool act = g->value[v].role == LM_ROLE_ACT && l[v].first >= 0;
        assert_int_equal(act, p.offset[v] != SIZE_MAX);
        if (!act)
            continue;
        assert_true(l[v].to <= p.bytes && p.offset[v] % 64 == 0);
        for (size_t u = 0; u < g->n_values; u++) {
            if (u == v || p.offset[u] == SIZE_MAX || !overlap(&l[u], &l[v]) ||
                l[u].last < l[v].first || l[v].last < l[u].first)
                continue;
            bool taken =
                (l[u].last == l[v].first && may_take(g, (lm_vid)u, (lm_vid)v, l[v].first)) ||
                (l[v].last == l[u].first && may_take(g, (lm_vid)v, (lm_vid)u, l[u].first));
            if (!taken)
                fail_msg("%%%zu and %%%zu live at the same time in the same place", u, v);
        }
    }
    lm_tensor in[LM_MAX_IN], out[LM_MAX_OUT];
    for (size_t k = 0; k < g->n_nodes; k++) {
        const lm_node *n = &g->node[k];
        const lm_kernel *kernel = b->kernel(b, n->op->name, lm_node_act(g, n));
        lm_call c = lm_node_call(g, n, in, out);
        size_t work = kernel->work ? kernel->work(&c, b->threads) : 0, live = work;
        life w = { (int64_t)k, (int64_t)k, p.work_offset[k], p.work_offset[k] + work };
        assert_int_equal(work > 0, p.work_offset[k] != SIZE_MAX);
        for (size_t v = 0; v < g->n_values; v++)
            if (p.offset[v] != SIZE_MAX && l[v].first <= w.first && l[v].last >= w.first) {
                bool shared = false; /* it shares the memory of an input */
                for (size_t u = 0; u < v; u++)
                    shared |=
                        p.offset[u] == p.offset[v] && l[u].first <= w.first && l[u].last >= w.first;
                live += shared ? 0 : l[v].to - l[v].from;
                assert_true(work == 0 || !overlap(&l[v], &w));
            }
        assert_true(p.lower_bound >= live);
        assert_true(work == 0 || w.to <= p.bytes);
    }
    assert_true(p.bytes >= p.lower_bound);
    assert_true(p.bytes <= p.lower_bound + p.lower_bound / 4 + 4096); /* placement wastes little */
    lm_free(l);
    lm_plan_fini(&p);
}

/* Two planned runs, and a run without shared memory, give the same bits in the kept values.
 */
static void check_run(const lm_graph *g, lm_backend *b, const lm_vid *keep, int n_keep)
{
    lm_err e = { 0 };
    lm_exec *x;
    lm_step step = { .seed = 3, .step = 1 };
    void **apart = make_memory(g), **bound = make_memory(g);
    must(lm_exec_new(g, b, keep, n_keep, &x, &e), &e);
    for (size_t v = 0; v < g->n_values; v++)
        if (g->value[v].role != LM_ROLE_ACT)
            lm_exec_bind(x, (lm_vid)v, bound[v]);
    run_apart(g, b, apart, &step);
    for (int again = 0; again < 2; again++) {
        must(lm_exec_run(x, &step, &e), &e);
        for (size_t v = 0; v < g->n_values; v++) {
            bool kept = g->value[v].role == LM_ROLE_GRAD;
            for (int i = 0; i < n_keep; i++)
                kept |= keep[i] == (lm_vid)v;
            if (kept)
                assert_memory_equal(lm_exec_data(x, (lm_vid)v), apart[v],
                                    (size_t)lm_tensor_count(&g->value[v].t) *
                                        lm_dtype_size(type(g, (lm_vid)v)));
        }
    }
    lm_exec_free(x);
    free_memory(g, apart);
    free_memory(g, bound);
}

static void test_plans(void **state)
{
    lm_err e = { 0 };
    lm_par *par;
    lm_backend *b;
    (void)state;
    must(lm_par_new(&par, 2, &e), &e);
    must(lm_backend_cpu(lm_cpu_detect(), par, &b, &e), &e);
    for (uint64_t seed = 0; seed < 300; seed++) {
        wild w;
        make_wild(&w, seed, seed % 2 ? LM_DTYPE_F32 : LM_DTYPE_BF16);
        lm_vid keep[3] = { w.root };
        int n = 1; /* and the gradients of the inputs */
        for (int i = 2; i < 4; i++)
            if (w.grads[i] != LM_NONE && w.g->value[w.grads[i]].role == LM_ROLE_ACT)
                keep[n++] = w.grads[i];
        check_plan(w.g, b, keep, n);
        check_run(w.g, b, keep, n);
        lm_free(w.grads);
        lm_graph_free(w.g);
    }
    lm_backend_close(b);
    lm_par_free(par);
}

static const char *const configs[2] = {
    "{\"model_type\":\"gpt2\",\"vocab_size\":61,\"n_embd\":32,\"n_layer\":3,\"n_head\":2}",
    "{\"model_type\":\"qwen3\",\"vocab_size\":61,\"hidden_size\":32,\"intermediate_size\":48,"
    "\"num_hidden_layers\":3,\"num_attention_heads\":4,\"num_key_value_heads\":2,\"head_dim\":16}",
};

static bool join_all(lm_backend *b, const char *op, lm_dtype act, const lm_call *c)
{
    (void)b, (void)op, (void)act, (void)c;
    return true;
}

static void test_model_plans(void **state)
{
    (void)state;
    for (int i = 0; i < 8; i++) {
        lm_err e = { 0 };
        json_t *o;
        lm_config c;
        lm_model *m;
        lm_par *par;
        lm_backend *b;
        lm_build build = { .mode = i & 2 ? LM_MODE_EVAL : LM_MODE_TRAIN,
                           .batch = 2,
                           .seq = 40,
                           .dropout = true,
                           .precision = { i & 4 ? LM_DTYPE_BF16 : LM_DTYPE_F32, NULL } };
        must(lm_json_parse(configs[i & 1], strlen(configs[i & 1]), "config", &o, &e), &e);
        must(lm_config_read(o, "config", &c, &e), &e);
        must(lm_par_new(&par, 2, &e), &e);
        for (int level = -1; level <= (int)lm_cpu_detect(); level++) { /* -1: with all joins */
            must(lm_backend_cpu((lm_cpu_level)(level < 0 ? 0 : level), par, &b, &e), &e);
            b->joins = level < 0 ? join_all : b->joins;
            build.backend = b;
            must(lm_model_build(&c, &build, &m, &e), &e);
            check_plan(m->graph, b, &m->loss, 1);
            check_run(m->graph, b, &m->loss, 1);
            lm_model_free(m);
            lm_backend_close(b);
        }
        lm_par_free(par);
        lm_config_fini(&c);
        json_decref(o);
    }
}

static const lm_kernel *(*find_kernel)(lm_backend *b, const char *op, lm_dtype act);
static size_t searches;

static const lm_kernel *count_searches(lm_backend *b, const char *op, lm_dtype act)
{
    searches++;
    return find_kernel(b, op, act);
}

/* The plan stores the kernels whose scratch it asked for: one search per node, none in a run. */
static void test_plan_keeps_kernels(void **state)
{
    lm_err e = { 0 };
    lm_backend *b;
    lm_plan plan;
    lm_exec *x;
    tiny t;
    (void)state;
    make_tiny(&t, LM_DTYPE_F32);
    must(lm_backend_cpu(LM_CPU_REF, NULL, &b, &e), &e);
    find_kernel = b->kernel;
    b->kernel = count_searches;
    must(lm_plan_make(t.g, b, &t.loss, 1, &plan, &e), &e);
    must(lm_exec_new_planned(t.g, b, &plan, NULL, &x, &e), &e);
    assert_int_equal(searches, t.g->n_nodes);
    for (size_t k = 0; k < t.g->n_nodes; k++)
        assert_string_equal(plan.kernel[k]->op, t.g->node[k].op->name);
    lm_exec_free(x);
    lm_plan_fini(&plan);
    lm_backend_close(b);
    lm_graph_free(t.g);
}

/* ---- backward ---- */

static double objective(const wild *w, lm_backend *b, void **mem)
{
    lm_graph forward = *w->g;
    forward.n_nodes = 0;
    while (w->g->node[forward.n_nodes].phase == LM_PHASE_FORWARD && forward.n_nodes < w->g->n_nodes)
        forward.n_nodes++;
    run_apart(&forward, b, mem, &(lm_step){ .seed = 3, .step = 1 });
    const double *y = mem[w->root], *seed = mem[w->n_built - 1];
    double sum = 0;
    for (int i = 0; i < N * C; i++)
        sum += y[i] * seed[i];
    return sum;
}

/* Values with two or three readers, also as both operands of a sum: gradients against
 * differences. */
static void test_backward(void **state)
{
    lm_err e = { 0 };
    lm_backend *b;
    int checked = 0;
    (void)state;
    must(lm_backend_cpu(LM_CPU_REF, NULL, &b, &e), &e);
    for (uint64_t seed = 0; seed < 60; seed++) {
        wild w;
        make_wild(&w, seed, LM_DTYPE_F64);
        void **mem = make_memory(w.g);
        run_apart(w.g, b, mem, &(lm_step){ .seed = 3, .step = 1 });
        for (lm_vid v = 0; v < 4; v++) { /* gain, square, a, b */
            int64_t n = lm_tensor_count(&w.g->value[v].t);
            double *x = mem[v], got = 0, norm = 0, h = 1e-5, side[4];
            static const double at[4] = { 1, -1, 2, -2 };
            double kept[C * C > N * C ? C * C : N * C], d[C * C > N * C ? C * C : N * C];
            if (w.grads[v] == LM_NONE)
                continue;
            const double *grad = mem[w.grads[v]];
            for (int64_t i = 0; i < n; i++) {
                kept[i] = x[i];
                d[i] = lm_rng_normal(lm_rng_make(seed, "d", (uint64_t)v), (uint64_t)i);
                got += grad[i] * d[i];
                norm += grad[i] * grad[i];
            }
            for (int s = 0; s < 4; s++) {
                for (int64_t i = 0; i < n; i++)
                    x[i] = kept[i] + at[s] * h * d[i];
                side[s] = objective(&w, b, mem);
            }
            memcpy(x, kept, (size_t)n * sizeof *x);
            objective(&w, b, mem);
            double want = (8 * (side[0] - side[1]) - (side[2] - side[3])) / (12 * h);
            if (!(fabs(got - want) <= 1e-6 * (fabs(want) + sqrt(norm)) + 1e-7))
                fail_msg("graph %d, value %d: gradient %.12g, finite differences %.12g", (int)seed,
                         (int)v, got, want);
            checked++;
        }
        free_memory(w.g, mem);
        lm_free(w.grads);
        lm_graph_free(w.g);
    }
    assert_true(checked > 100);
    lm_backend_close(b);
}

/* ---- times ---- */

static void test_times(void **state)
{
    tiny t;
    lm_err e = { 0 };
    lm_backend *b;
    lm_exec *x;
    const lm_exec_time *lines;
    lm_graph_cost_sum cost;
    double flops = 0;
    int64_t calls = 0;
    (void)state;
    make_tiny(&t, LM_DTYPE_F32);
    lm_vid seed = value(t.g, LM_ROLE_INPUT, lm_shape1(type(t.g, t.loss), N), "seed");
    must(lm_pass_backward(t.g, &(lm_backward){ .root = t.loss, .seed = seed }, &e), &e);
    must(lm_backend_cpu(LM_CPU_REF, NULL, &b, &e), &e);
    must(lm_exec_new(t.g, b, &t.loss, 1, &x, &e), &e);
    void **mem = make_memory(t.g);
    for (size_t v = 0; v < t.g->n_values; v++)
        if (t.g->value[v].role != LM_ROLE_ACT)
            lm_exec_bind(x, (lm_vid)v, mem[v]);
    for (int i = 0; i < 3; i++)
        must(lm_exec_run(x, &(lm_step){ 0 }, &e), &e);
    lm_graph_cost(t.g, &cost);
    size_t n = lm_exec_times(x, &lines);
    for (size_t i = 0; i < n; i++) {
        flops += lines[i].flops;
        calls += lines[i].calls;
        assert_true(i == 0 || lines[i].seconds <= lines[i - 1].seconds);
    }
    assert_int_equal(calls, 3 * (int64_t)t.g->n_nodes);
    assert_true(fabs(flops / (3 * cost.all.flops) - 1) < 1e-12);
    lm_exec_times_reset(x);
    n = lm_exec_times(x, &lines);
    for (size_t i = 0; i < n; i++)
        assert_true(lines[i].calls == 0 && lines[i].seconds == 0);
    free_memory(t.g, mem);
    lm_exec_free(x);
    lm_backend_close(b);
    lm_graph_free(t.g);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_dump),
        cmocka_unit_test(test_operands),
        cmocka_unit_test(test_tables),
        cmocka_unit_test(test_errors),
        cmocka_unit_test(test_precision),
        cmocka_unit_test(test_precision_double),
        cmocka_unit_test(test_precision_two_types),
        cmocka_unit_test(test_plans),
        cmocka_unit_test(test_model_plans),
        cmocka_unit_test(test_plan_keeps_kernels),
        cmocka_unit_test(test_backward),
        cmocka_unit_test(test_times),
    };
    return cmocka_run_group_tests_name("graph", tests, NULL, NULL);
}
