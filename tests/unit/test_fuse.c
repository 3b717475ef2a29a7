/* SPDX-License-Identifier: Apache-2.0 */
/* Each rule that joins operators, on graphs made by hand: the graphs that it changes, and those
 * that it must not. */
#include "fuse_case.h"

#include "kernels/attention.h"
#include "kernels/elementwise.h"
#include "kernels/head.h"
#include "kernels/norm.h"
#include "kernels/rope.h"
#include "op/fuse.h"

enum { N = 4, C = 8 };

typedef struct {
    lm_graph *g;
    lm_backend *b;
    lm_vid x, x2, w, w2, stat, table, pos, used, fresh, q, kc, vc;
} hand;

static lm_vid value(lm_graph *g, lm_role role, lm_tensor t)
{
    lm_err e = { 0 };
    lm_vid v;
    must(lm_graph_value(g, role, t, NULL, &v, &e), &e);
    return v;
}

static hand hand_new(void)
{
    lm_err e = { 0 };
    hand h;
    lm_tensor cache = { .dtype = LM_DTYPE_F32, .ndim = 4, .dim = { N, 1, 9, 4 } };
    lm_tensor ids = lm_shape1(LM_DTYPE_I32, N), wide = lm_shape2(LM_DTYPE_F32, N, 12);
    must(lm_graph_new(&h.g, &e), &e);
    must(lm_backend_cpu(LM_CPU_REF, NULL, &h.b, &e), &e);
    h.b->joins = all;
    h.x = value(h.g, LM_ROLE_INPUT, lm_shape2(LM_DTYPE_F32, N, C));
    h.x2 = value(h.g, LM_ROLE_INPUT, lm_shape2(LM_DTYPE_F32, N, C));
    h.w = value(h.g, LM_ROLE_PARAM, lm_shape2(LM_DTYPE_F32, C, C));
    h.w2 = value(h.g, LM_ROLE_PARAM, lm_shape1(LM_DTYPE_F32, C));
    h.stat = value(h.g, LM_ROLE_INPUT, lm_shape2(LM_DTYPE_F32, N, 2));
    h.table = value(h.g, LM_ROLE_CONST, lm_shape2(LM_DTYPE_F32, 9, 4));
    h.pos = value(h.g, LM_ROLE_INPUT, ids);
    h.used = value(h.g, LM_ROLE_INPUT, ids);
    h.fresh = value(h.g, LM_ROLE_INPUT, ids);
    h.q = value(h.g, LM_ROLE_STATE, wide);
    h.kc = value(h.g, LM_ROLE_STATE, cache);
    h.vc = value(h.g, LM_ROLE_STATE, cache);
    return h;
}

/* op(a, b, c, d, e) -> first output; others in more[1..2] (in: what to write to). */
static lm_vid put(hand *h, const lm_op *op, const void *attr, const lm_vid *in, lm_vid *more)
{
    lm_err e = { 0 };
    lm_vid none_given[LM_MAX_OUT] = { LM_NONE, LM_NONE, LM_NONE, LM_NONE };
    lm_vid *out = more ? more : none_given;
    must(lm_graph_append(h->g, op, attr, in, out, &e), &e);
    return out[0];
}

static const lm_linear_attr first = { LM_ACC_FIRST };
static const lm_gelu_attr tanh_form = { false };
static const lm_norm_attr rms = { LM_NORM_RMS, 1e-5, LM_ACC_FIRST, false };

#define IN(...) ((const lm_vid[LM_MAX_IN]){ __VA_ARGS__ })

static lm_vid put_linear(hand *h, lm_vid x)
{
    return put(h, &lm_op_linear, &first, IN(x, h->w, LM_NONE), NULL);
}

static lm_vid put_gelu(hand *h, lm_vid x)
{
    return put(h, &lm_op_gelu, &tanh_form, IN(x), NULL);
}

static lm_vid put_cast(hand *h, lm_vid x, lm_dtype to)
{
    lm_tensor t = h->g->value[x].t;
    t.dtype = to;
    lm_vid out[LM_MAX_OUT] = { value(h->g, LM_ROLE_ACT, t) };
    return put(h, &lm_op_cast, NULL, IN(x), out);
}

/* Run the pass; then the operators must be `want`, or with NULL the list must be unchanged. */
static void expect(hand *h, const lm_vid *keep, int n_keep, const char *want)
{
    lm_err e = { 0 };
    char *was = dump(h->g);
    must(lm_fuse(h->g, h->b, keep, n_keep, &e), &e);
    char *is = want ? operators(h->g) : dump(h->g);
    assert_string_equal(is, want ? want : was);
    lm_free(was);
    lm_free(is);
    check_rules(h->g);
    lm_backend_close(h->b);
    lm_graph_free(h->g);
}

static void linear_and_gelu(void **state)
{
    (void)state;
    hand h = hand_new();
    lm_vid z = put_linear(&h, h.x), y = put_gelu(&h, z);
    put(&h, &lm_op_add, NULL, IN(z, y), NULL); /* z is read once more, and stays */
    const lm_node *n = h.g->node;
    lm_err e = { 0 };
    must(lm_fuse(h.g, h.b, NULL, 0, &e), &e);
    assert_int_equal(h.g->n_nodes, 2);
    assert_ptr_equal(n[0].op, &lm_op_linear_act);
    assert_true(n[0].out[0] == y && n[0].out[1] == z);
    expect(&h, NULL, 0, NULL); /* the pass again: nothing more to do */

    h = hand_new();
    h.g->layer = 3;
    z = put_linear(&h, h.x), y = put_gelu(&h, z);
    n = h.g->node;
    must(lm_fuse(h.g, h.b, &y, 1, &e), &e);
    assert_true(h.g->n_nodes == 1 && n->out[0] == y && n->out[1] == LM_NONE && n->layer == 3);
    assert_int_equal(((const lm_linear_act_attr *)n->attr)->act, LM_ACT_GELU);
    expect(&h, NULL, 0, NULL);

    h = hand_new();
    z = put_linear(&h, h.x), y = put_gelu(&h, z);
    n = h.g->node;
    must(lm_fuse(h.g, h.b, &z, 1, &e), &e); /* kept */
    assert_true(h.g->n_nodes == 1 && n->out[0] == y && n->out[1] == z);
    expect(&h, NULL, 0, NULL);

    h = hand_new(); /* the sums are wanted before GELU's place in the list */
    z = put_linear(&h, h.x);
    put(&h, &lm_op_add, NULL, IN(z, h.x2), NULL);
    put_gelu(&h, z);
    expect(&h, NULL, 0, "linear_act add");

    h = hand_new(); /* a product that is no activation of this run */
    lm_vid state_out[LM_MAX_OUT] = { value(h.g, LM_ROLE_STATE, h.g->value[h.x].t) };
    put(&h, &lm_op_linear, &first, IN(h.x, h.w, LM_NONE), state_out);
    put_gelu(&h, state_out[0]);
    must(lm_fuse(h.g, h.b, NULL, 0, &e), &e);
    assert_int_equal(h.g->node->out[1], state_out[0]);
    expect(&h, NULL, 0, "linear_act");

    h = hand_new(); /* what gelu_dx reads is read elsewhere, too; or by its other operand */
    lm_vid dx = put(&h, &lm_op_linear_dx, &first, IN(h.x, h.w), NULL);
    put(&h, &lm_op_gelu_dx, &tanh_form, IN(dx, h.x2), NULL);
    put(&h, &lm_op_add, NULL, IN(dx, h.x), NULL);
    expect(&h, NULL, 0, NULL);
    h = hand_new();
    dx = put(&h, &lm_op_linear_dx, &first, IN(h.x, h.w), NULL);
    put(&h, &lm_op_gelu_dx, &tanh_form, IN(h.x2, dx), NULL);
    expect(&h, NULL, 0, NULL);
    h = hand_new();
    dx = put(&h, &lm_op_linear_dx, &first, IN(h.x, h.w), NULL);
    put(&h, &lm_op_gelu_dx, &tanh_form, IN(dx, h.x2), NULL);
    expect(&h, &dx, 1, NULL);
    h = hand_new();
    dx = put(&h, &lm_op_linear_dx, &first, IN(h.x, h.w), NULL);
    put(&h, &lm_op_gelu_dx, &tanh_form, IN(dx, dx), NULL);
    expect(&h, NULL, 0, NULL);
}

static void linear_and_cast(void **state)
{
    (void)state;
    for (int k = 0; k < 5; k++) {
        hand h = hand_new();
        h.b->joins = none;
        lm_vid z = put_linear(&h, h.x);
        lm_vid y = put_cast(&h, z, k == 1 ? LM_DTYPE_BF16 : LM_DTYPE_F32);
        if (k == 2)
            put(&h, &lm_op_add, NULL, IN(z, z), NULL);
        if (k == 3)
            put_cast(&h, z, LM_DTYPE_F32);
        expect(&h, k == 4 ? &z : &y, 1, k ? NULL : "linear");
    }
}

static void norm_and_linear(void **state)
{
    (void)state;
    for (int k = 0; k < 8; k++) {
        hand h = hand_new();
        lm_vid out[LM_MAX_OUT] = { LM_NONE, LM_NONE, LM_NONE };
        put(&h, &lm_op_norm, &rms, IN(h.x, h.w2, LM_NONE, h.x2), out);
        lm_vid y = put_linear(&h, out[k == 7 ? 2 : 0]), z = LM_NONE; /* 7: of the sum */
        if (k == 1)
            put_linear(&h, out[0]);
        if (k == 2)
            z = out[0];
        if (k == 3)
            z = out[1];
        if (k == 4) /* its backward */
            put(&h, &lm_op_norm_dw, &rms, IN(h.x, out[2], out[1]), NULL);
        if (k == 5) /* the sum may have other readers */
            put(&h, &lm_op_add, NULL, IN(out[2], y), NULL);
        if (k == 6) {
            put_gelu(&h, y);
            put(&h, &lm_op_add, NULL, IN(y, y), NULL); /* the sums: not of norm_linear with GELU */
        }
        static const char *const want[] = {
            "norm_linear", NULL, NULL, NULL, NULL, "norm_linear add", "norm_linear gelu add", NULL
        };
        expect(&h, &z, z >= 0, want[k]);
    }
}

static void norm_dx_and_dw(void **state)
{
    (void)state;
    for (int k = 0; k < 6; k++) {
        hand h = hand_new();
        lm_norm_attr add = { LM_NORM_RMS, 1e-5, LM_ACC_ADD, false };
        lm_err e = { 0 };
        lm_vid stat = value(h.g, LM_ROLE_INPUT, h.g->value[h.stat].t);
        bool other = k == 1 || k > 3; /* dw is of another gradient, row or statistic */
        lm_vid dw[LM_MAX_OUT] = { value(h.g, LM_ROLE_GRAD, lm_shape1(LM_DTYPE_F32, C)), LM_SKIP };
        lm_vid again[LM_MAX_OUT] = { dw[0], LM_SKIP };
        lm_vid dx_in[LM_MAX_IN] = { h.x, h.x2, h.w2, h.stat, LM_NONE };
        h.g->phase = LM_PHASE_BACKWARD_WEIGHT;
        put(&h, &lm_op_norm_dw, &rms,
            IN(k == 1 ? h.x2 : h.x, k == 4 ? h.x : h.x2, k == 5 ? stat : h.stat), dw);
        if (k == 2) /* the second addition to dw must stay the second */
            put(&h, &lm_op_norm_dw, &add, IN(h.x2, h.x, h.stat), again);
        if (k == 3) /* a residual that is not there before: only the later place will do */
            dx_in[4] = put_gelu(&h, h.x);
        h.g->phase = LM_PHASE_BACKWARD_INPUT;
        put(&h, &lm_op_norm_dx, &add, dx_in, NULL); /* which adds nothing up */
        if (other) {
            expect(&h, NULL, 0, NULL);
            continue;
        }
        must(lm_fuse(h.g, h.b, NULL, 0, &e), &e);
        const lm_node *n = &h.g->node[k == 3];
        assert_true(n->op == &lm_op_norm_dx_dw);
        assert_int_equal(((const lm_norm_attr *)n->attr)->acc, LM_ACC_FIRST);
        expect(&h, NULL, 0,
               k == 0   ? "norm_dx_dw"
               : k == 2 ? "norm_dx_dw norm_dw"
                        : "gelu norm_dx_dw");
    }
}

static void attention_of_one_row(void **state)
{
    lm_head_norm_attr norm = { 1, 1, 4, 1e-6, LM_ACC_FIRST, false };
    lm_rope_attr rope = { 1, 1, 4, 2, false };
    (void)state;
    for (int k = 0; k < 7; k++) {
        hand h = hand_new();
        lm_err e = { 0 };
        h.g->value[h.table].t.dim[1] = 2; /* half of each head is turned */
        lm_attention_attr a = { .batch = N,
                                .seq = 1,
                                .heads = 1,
                                .kv_heads = 1,
                                .head_dim = 4,
                                .causal = true,
                                .scale = 1 };
        lm_vid wd = value(h.g, LM_ROLE_PARAM, lm_shape1(LM_DTYPE_F32, 4)), kept = LM_NONE;
        lm_vid normed[LM_MAX_OUT] = { LM_NONE, LM_NONE };
        lm_vid out[LM_MAX_OUT] = { LM_NONE, h.kc, h.vc, LM_SKIP },
               other[LM_MAX_OUT] = { LM_NONE, h.kc, h.vc, LM_SKIP };
        lm_vid to_q[LM_MAX_OUT] = { h.q };
        put(&h, &lm_op_head_norm, &norm, IN(h.q, wd, wd), normed);
        rope.inverse = k == 3;
        lm_vid qkv =
            put(&h, &lm_op_rope, &rope, IN(k == 5 ? h.q : normed[0], h.pos, h.table), NULL);
        if (k == 1) /* statistics for a backward */
            kept = normed[1];
        if (k == 2)
            kept = qkv;
        if (k == 4) /* two sequences of two rows */
            a.batch = 2, a.seq = 2;
        if (k == 4)
            h.g->value[h.kc].t.dim[0] = h.g->value[h.vc].t.dim[0] = 2,
            h.g->value[h.used].t.dim[0] = h.g->value[h.fresh].t.dim[0] = 2;
        if (k == 5) { /* neither can the caches be written before, nor q be read behind */
            put(&h, &lm_op_attention_cached, &a,
                IN(h.q, h.used, h.fresh, LM_NONE, LM_NONE, LM_NONE, LM_NONE, LM_NONE), other);
            put(&h, &lm_op_rope, &rope, IN(normed[0], h.pos, h.table), to_q);
        }
        if (k == 6) /* what is normed is read elsewhere, too */
            put(&h, &lm_op_add, NULL, IN(normed[0], normed[0]), NULL);
        put(&h, &lm_op_attention_cached, &a,
            IN(qkv, h.used, h.fresh, LM_NONE, LM_NONE, LM_NONE, LM_NONE, LM_NONE), out);
        static const char *const want[] = {
            "attention_step", "head_norm attention_step", [6] = "head_norm add attention_step"
        };
        if (k == 0) {
            must(lm_fuse(h.g, h.b, NULL, 0, &e), &e);
            const lm_attention_step_attr *made = h.g->node->attr;
            assert_true(made->rotary_dim == 2 && made->eps == 1e-6);
        }
        expect(&h, &kept, kept >= 0, k < 2 || k == 6 ? want[k] : NULL);
    }
}

/* The two halves of the head are joined if only the gradient reads the log-sum-exp. */
static void head_of_two_halves(void **state)
{
    static const lm_head_attr head = { C, 0, LM_ACC_FIRST, 0 };
    (void)state;
    for (int k = 0; k < 6; k++) {
        hand h = hand_new();
        lm_vid scale = value(h.g, LM_ROLE_INPUT, lm_shape1(LM_DTYPE_F32, N)), kept = LM_NONE;
        lm_vid out[LM_MAX_OUT] = { LM_NONE, LM_NONE, k == 3 ? LM_NONE : LM_SKIP, LM_SKIP, LM_SKIP };
        lm_vid dx[LM_MAX_OUT] = { LM_NONE, LM_SKIP, LM_SKIP };
        h.b->joins = none;
        put(&h, &lm_op_head_stats, &head, IN(h.x, h.w, h.pos, LM_NONE), out);
        lm_vid from = k == 4 ? put(&h, &lm_op_add, NULL, IN(out[1], out[1]), NULL) : out[1];
        if (k == 5) /* the scale depends on the losses, so the halves cannot be joined */
            scale = put(&h, &lm_op_add, NULL, IN(out[0], scale), NULL);
        put(&h, &lm_op_head_grad, &head,
            IN(h.x, h.w, h.pos, from, scale, LM_NONE, LM_NONE, LM_NONE), dx);
        if (k == 1)
            put(&h, &lm_op_add, NULL, IN(out[1], scale), NULL);
        if (k == 2)
            kept = out[1];
        if (k == 3)
            kept = out[2];
        expect(&h, &kept, kept >= 0, k ? NULL : "head_loss");
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(linear_and_gelu),      cmocka_unit_test(linear_and_cast),
        cmocka_unit_test(norm_and_linear),      cmocka_unit_test(norm_dx_and_dw),
        cmocka_unit_test(attention_of_one_row), cmocka_unit_test(head_of_two_halves),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
