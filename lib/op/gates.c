/* SPDX-License-Identifier: Apache-2.0 */
/* gates.c -- gates of attention and of the delta rule, and their backward. */
#include "kernels/gates.h"

#include "graph/passes.h"
#include "kernels/arrange.h"
#include "op/append.h"
#include "op/example.h"
#include "op/ops.h"

/* ---- gate_split, gate_join ---- */

static const lm_field split_fields[] = { { LM_ATTR_INT(lm_gate_split_attr, heads, 'H') },
                                         { LM_ATTR_INT(lm_gate_split_attr, kv_heads, 'K') },
                                         { LM_ATTR_INT(lm_gate_split_attr, head_dim, 'D') },
                                         { 0 } };

static void move_cost(const lm_call *c, lm_cost *out)
{
    out->flops = 0;
    out->bytes = lm_call_bytes(c);
}

/* A part that nothing reads has no gradient: zeros. */
static lm_code part_of(lm_grad *s, lm_vid v, lm_vid *out, lm_err *e)
{
    const lm_tensor *t = &lm_grad_graph(s)->value[v].t;
    const lm_window_attr zeros = { t->dim[0], 0, t->dim[0], t->dim[1] };
    *out = lm_grad_of(s, v);
    return *out >= 0 ? LM_OK : lm_append_node(lm_grad_graph(s), &lm_op_window, &zeros, &v, out, e);
}

static lm_code split_grad(lm_grad *s, const lm_node *n, lm_err *e)
{
    lm_vid in[2], dx;
    if (part_of(s, n->out[0], &in[0], e) || part_of(s, n->out[1], &in[1], e) ||
        lm_append_node(lm_grad_graph(s), &lm_op_gate_join, n->attr, in, &dx, e))
        return e->code;
    return lm_grad_give(s, n->in[0], dx, e);
}

static lm_code join_grad(lm_grad *s, const lm_node *n, lm_err *e)
{
    lm_vid dx = lm_grad_of(s, n->out[0]), out[LM_MAX_OUT] = { LM_NONE, LM_NONE };
    if (lm_graph_append(lm_grad_graph(s), &lm_op_gate_split, n->attr, &dx, out, e))
        return e->code;
    for (int i = 0; i < 2; i++)
        if (lm_grad_wants(s, n->in[i]) && lm_grad_give(s, n->in[i], out[i], e))
            return e->code;
    return LM_OK;
}

static lm_gate_split_attr split_sizes(lm_rng r, int i)
{
    static const int64_t dims[] = { 1, 2, 8, 17, 64 };
    return (lm_gate_split_attr){ 1 + (int64_t)lm_example_draw(r, i, 0, 4),
                                 1 + (int64_t)lm_example_draw(r, i, 1, 2),
                                 dims[lm_example_draw(r, i, 2, 5)] };
}

static void split_example(lm_rng r, int i, lm_example *x)
{
    lm_gate_split_attr a = split_sizes(r, i);
    *x = (lm_example){ .n_in = 1, .want = 3 };
    x->in[0] = lm_shape2(LM_DTYPE_F32, lm_example_size(r, i, 3, 70),
                         (2 * a.heads + 2 * a.kv_heads) * a.head_dim);
    lm_example_attr(x, &a);
}

static void join_example(lm_rng r, int i, lm_example *x)
{
    lm_gate_split_attr a = split_sizes(r, i);
    int64_t rows = lm_example_size(r, i, 3, 70);
    *x = (lm_example){ .n_in = 2, .want = 1 };
    x->in[0] = lm_shape2(LM_DTYPE_F32, rows, (a.heads + 2 * a.kv_heads) * a.head_dim);
    x->in[1] = lm_shape2(LM_DTYPE_F32, rows, a.heads * a.head_dim);
    lm_example_attr(x, &a);
}

const lm_op lm_op_gate_split = {
    .name = "gate_split",
    .attr_size = sizeof(lm_gate_split_attr),
    .in = { { "x", "N,(H2+2K)D", LM_ACT_TYPE | LM_LINEAR } },
    .out = { { "qkv", "N,(H+2K)D", LM_ACT_TYPE }, { "gate", "N,HD", LM_ACT_TYPE } },
    .fields = split_fields,
    .split = "N HK",
    .prec = LM_PREC_INFER,
    .grad = split_grad,
    .cost = move_cost,
    .example = split_example,
};

const lm_op lm_op_gate_join = {
    .name = "gate_join",
    .attr_size = sizeof(lm_gate_split_attr),
    .in = { { "qkv", "N,(H+2K)D", LM_ACT_TYPE | LM_LINEAR },
            { "gate", "N,HD", LM_ACT_TYPE | LM_LINEAR } },
    .out = { { "x", "N,(H2+2K)D", LM_ACT_TYPE } },
    .fields = split_fields,
    .split = "N HK",
    .prec = LM_PREC_INFER,
    .grad = join_grad,
    .cost = move_cost,
    .example = join_example,
};

/* ---- delta_gates ---- */

static const lm_field gates_fields[] = { { LM_ATTR_INT(lm_delta_gates_attr, heads, 'H') },
                                         { LM_ATTR_INT(lm_delta_gates_attr, key_heads, 'K') },
                                         { 0 } };
static const lm_field dw_fields[] = { { LM_ATTR_INT(lm_delta_gates_attr, heads, 'H') },
                                      { LM_ATTR_INT(lm_delta_gates_attr, key_heads, 'K') },
                                      { LM_ATTR_WORD(lm_delta_gates_attr, acc, lm_acc_words) },
                                      { 0 } };

static lm_code gates_shape(lm_call *c, unsigned want, lm_err *e)
{
    const lm_delta_gates_attr *a = c->attr;
    (void)want;
    return lm_expect(a->key_heads > 0 && a->heads % a->key_heads == 0, "delta_gates", e,
                     "%lld value heads are not a multiple of %lld key heads", (long long)a->heads,
                     (long long)a->key_heads);
}

/* Gradients of a_log and dt: one node if both are accumulated alike, otherwise one each. */
static lm_code gates_dw(lm_grad *s, const lm_node *n, lm_err *e)
{
    lm_graph *g = lm_grad_graph(s);
    lm_vid in[4] = { lm_grad_of(s, n->out[0]), n->in[0], n->in[1], n->in[2] };
    lm_vid out[2] = { LM_SKIP, LM_SKIP };
    lm_delta_gates_attr attr = *(const lm_delta_gates_attr *)n->attr;
    lm_acc acc[2] = { LM_ACC_FIRST, LM_ACC_FIRST };
    g->phase = LM_PHASE_BACKWARD_WEIGHT;
    for (int i = 0; i < 2; i++)
        if (lm_grad_wants(s, n->in[1 + i]) && lm_grad_param(s, n->in[1 + i], &out[i], &acc[i], e))
            return e->code;
    for (int i = 0; i < 2; i++) {
        lm_vid one[LM_MAX_OUT] = { i ? LM_SKIP : out[0], i ? out[1] : LM_SKIP };
        bool both = !i && out[0] != LM_SKIP && out[1] != LM_SKIP && acc[0] == acc[1];
        if (both)
            one[1] = out[1];
        attr.acc = acc[i];
        if (one[i] != LM_SKIP && lm_graph_append(g, &lm_op_delta_gates_dw, &attr, in, one, e))
            return e->code;
        if (both)
            break;
    }
    g->phase = LM_PHASE_BACKWARD_INPUT;
    return LM_OK;
}

static lm_code gates_grad(lm_grad *s, const lm_node *n, lm_err *e)
{
    lm_vid dg = lm_grad_of(s, n->out[0]), dbeta = lm_grad_of(s, n->out[1]), dx;
    lm_vid in[5] = { dg, dbeta, n->in[0], n->in[1], n->in[2] };
    if (dg >= 0 && (lm_grad_wants(s, n->in[1]) || lm_grad_wants(s, n->in[2])) && gates_dw(s, n, e))
        return e->code;
    if (!lm_grad_wants(s, n->in[0]))
        return LM_OK;
    if (lm_append_node(lm_grad_graph(s), &lm_op_delta_gates_dx, n->attr, in, &dx, e))
        return e->code;
    return lm_grad_give(s, n->in[0], dx, e);
}

static void gates_cost(const lm_call *c, lm_cost *out)
{
    const lm_delta_gates_attr *a = c->attr;
    out->flops = 16.0 * (double)a->heads * (double)c->in[0].dim[0];
    out->bytes = lm_call_bytes(c);
}

static void gates_example(lm_rng r, int i, lm_example *x)
{
    int64_t keys = 1 + (int64_t)lm_example_draw(r, i, 0, 5);
    lm_delta_gates_attr a = { keys * (1 + (int64_t)lm_example_draw(r, i, 1, 4)), keys,
                              LM_ACC_FIRST };
    *x = (lm_example){ .n_in = 3, .want = 3 };
    x->in[0] =
        lm_shape2(LM_DTYPE_F32, i % 7 == 3 ? 1100 : lm_example_size(r, i, 2, 70), 2 * a.heads);
    x->in[1] = x->in[2] = lm_shape1(LM_DTYPE_F32, a.heads);
    lm_example_attr(x, &a);
}

const lm_op lm_op_delta_gates = {
    .name = "delta_gates",
    .attr_size = sizeof(lm_delta_gates_attr),
    .in = { { "ba", "N,H2", LM_ACT_TYPE }, { "a_log", "H", 0 }, { "dt", "H", 0 } },
    .out = { { "g", "N,H", 0 }, { "beta", "N,H", 0 } },
    .fields = gates_fields,
    .split = "N KH",
    .prec = LM_PREC_INFER,
    .tolerance = { 1e-6, 4e-3 },
    .shape = gates_shape,
    .grad = gates_grad,
    .cost = gates_cost,
    .example = gates_example,
};

const lm_op lm_op_delta_gates_dx = {
    .name = "delta_gates_dx",
    .attr_size = sizeof(lm_delta_gates_attr),
    .in = { { "dg", "N,H", LM_OPTIONAL },
            { "dbeta", "N,H", LM_OPTIONAL },
            { "ba", "N,H2", LM_ACT_TYPE },
            { "a_log", "H", 0 },
            { "dt", "H", 0 } },
    .out = { { "dba", "N,H2", LM_ACT_TYPE } },
    .fields = gates_fields,
    .split = "N KH",
    .prec = LM_PREC_INFER,
    .tolerance = { 1e-6, 4e-3 },
    .cost = gates_cost,
};

const lm_op lm_op_delta_gates_dw = {
    .name = "delta_gates_dw",
    .attr_size = sizeof(lm_delta_gates_attr),
    .in = { { "dg", "N,H", 0 },
            { "ba", "N,H2", LM_ACT_TYPE },
            { "a_log", "H", 0 },
            { "dt", "H", 0 } },
    .out = { { "da_log", "H", LM_OPTIONAL }, { "ddt", "H", LM_OPTIONAL } },
    .fields = dw_fields,
    .split = "N+ KH",
    .prec = LM_PREC_INFER,
    .tolerance = { 1e-5, 1e-2 },
    .cost = gates_cost,
};
