/* SPDX-License-Identifier: Apache-2.0 */
/* gated_norm.c -- the norm of heads times SiLU of a gate, and its backward. */
#include "kernels/gated_norm.h"

#include "graph/passes.h"
#include "op/example.h"
#include "op/ops.h"

static const lm_field fields[] = { { LM_ATTR_INT(lm_gated_norm_attr, heads, 'H') },
                                   { LM_ATTR_INT(lm_gated_norm_attr, head_dim, 'E') },
                                   { LM_ATTR_REAL(lm_gated_norm_attr, eps) },
                                   { 0 } };
static const lm_field dw_fields[] = { { LM_ATTR_INT(lm_gated_norm_attr, heads, 'H') },
                                      { LM_ATTR_INT(lm_gated_norm_attr, head_dim, 'E') },
                                      { LM_ATTR_WORD(lm_gated_norm_attr, acc, lm_acc_words) },
                                      { 0 } };

static lm_code grad(lm_grad *s, const lm_node *n, lm_err *e)
{
    lm_graph *g = lm_grad_graph(s);
    lm_gated_norm_attr attr = *(const lm_gated_norm_attr *)n->attr;
    lm_vid x = n->in[0], z = n->in[1], w = n->in[2], dy = lm_grad_of(s, n->out[0]), dw;
    lm_vid d[LM_MAX_OUT] = { lm_grad_wants(s, x) ? LM_NONE : LM_SKIP,
                             lm_grad_wants(s, z) ? LM_NONE : LM_SKIP };
    if (lm_grad_wants(s, w)) {
        lm_vid in[4] = { dy, x, z, n->out[1] };
        g->phase = LM_PHASE_BACKWARD_WEIGHT;
        if (lm_grad_param(s, w, &dw, &attr.acc, e) ||
            lm_graph_append(g, &lm_op_gated_norm_dw, &attr, in, &dw, e))
            return e->code;
        g->phase = LM_PHASE_BACKWARD_INPUT;
    }
    if (d[0] == LM_SKIP && d[1] == LM_SKIP)
        return LM_OK;
    lm_vid in[5] = { dy, x, z, w, n->out[1] };
    if (lm_graph_append(g, &lm_op_gated_norm_dx, &attr, in, d, e) ||
        (d[0] >= 0 && lm_grad_give(s, x, d[0], e)))
        return e->code;
    return d[1] >= 0 ? lm_grad_give(s, z, d[1], e) : LM_OK;
}

static void cost(const lm_call *c, lm_cost *out)
{
    out->flops = 10.0 * (double)lm_tensor_count(&c->in[0]);
    out->bytes = lm_call_bytes(c);
}

static void example(lm_rng r, int i, lm_example *x)
{
    static const int64_t dims[] = { 2, 8, 16, 24, 33, 64, 128 };
    lm_gated_norm_attr a = { 1 + (int64_t)lm_example_draw(r, i, 0, 4),
                             dims[lm_example_draw(r, i, 1, 7)], 1e-6, LM_ACC_FIRST };
    *x = (lm_example){ .n_in = 3, .want = 3 };
    x->in[0] = lm_shape2(LM_DTYPE_F32, i % 7 == 3 ? 600 : lm_example_size(r, i, 2, 70),
                         a.heads * a.head_dim);
    x->in[1] = x->in[0];
    x->in[2] = lm_shape1(LM_DTYPE_F32, a.head_dim);
    lm_example_attr(x, &a);
}

const lm_op lm_op_gated_norm = {
    .name = "gated_norm",
    .attr_size = sizeof(lm_gated_norm_attr),
    .in = { { "x", "N,HE", LM_ACT_TYPE }, { "z", "N,HE", LM_ACT_TYPE }, { "w", "E", 0 } },
    .out = { { "y", "N,HE", LM_ACT_TYPE }, { "stat", "N,H", LM_SAVED } },
    .fields = fields,
    .split = "N H",
    .prec = LM_PREC_INFER,
    .tolerance = { 1e-6, 8e-3 },
    .grad = grad,
    .cost = cost,
    .example = example,
};

const lm_op lm_op_gated_norm_dx = {
    .name = "gated_norm_dx",
    .attr_size = sizeof(lm_gated_norm_attr),
    .in = { { "dy", "N,HE", LM_ACT_TYPE },
            { "x", "N,HE", LM_ACT_TYPE },
            { "z", "N,HE", LM_ACT_TYPE },
            { "w", "E", 0 },
            { "stat", "N,H", 0 } },
    .out = { { "dx", "N,HE", LM_ACT_TYPE | LM_OPTIONAL },
             { "dz", "N,HE", LM_ACT_TYPE | LM_OPTIONAL } },
    .fields = fields,
    .split = "N H",
    .prec = LM_PREC_INFER,
    .tolerance = { 1e-6, 8e-3 },
    .cost = cost,
};

const lm_op lm_op_gated_norm_dw = {
    .name = "gated_norm_dw",
    .attr_size = sizeof(lm_gated_norm_attr),
    .in = { { "dy", "N,HE", LM_ACT_TYPE },
            { "x", "N,HE", LM_ACT_TYPE },
            { "z", "N,HE", LM_ACT_TYPE },
            { "stat", "N,H", 0 } },
    .out = { { "dw", "E", 0 } },
    .fields = dw_fields,
    .split = "N+ H+",
    .prec = LM_PREC_INFER,
    .tolerance = { 1e-6, 8e-3 },
    .cost = cost,
};
