/* SPDX-License-Identifier: Apache-2.0 */
/* linear.c -- the linear layer and the two halves of its backward. */
#include "kernels/linear.h"

#include "graph/passes.h"
#include "kernels/matmul.h"
#include "op/example.h"
#include "op/ops.h"

static const lm_field dw_fields[] = { { LM_ATTR_WORD(lm_linear_attr, acc, lm_acc_words) }, { 0 } };

/* The gradient of a weight that is computed (adapters) is a value of each run, in the type of the weight. */
static lm_code computed_grad(lm_grad *s, const lm_node *n, lm_err *e)
{
    lm_graph *g = lm_grad_graph(s);
    lm_matmul_attr attr = { .turn_a = true };
    lm_vid in[2] = { lm_grad_of(s, n->out[0]), n->in[0] }, dw = LM_NONE;
    if (!lm_grad_wants(s, n->in[1]))
        return LM_OK;
    if (lm_graph_append(g, &lm_op_matmul, &attr, in, &dw, e))
        return e->code;
    return lm_grad_give(s, n->in[1], dw, e);
}

static lm_code linear_grad(lm_grad *s, const lm_node *n, lm_err *e)
{
    lm_graph *g = lm_grad_graph(s);
    lm_vid x = n->in[0], w = n->in[1], b = n->in[2], dy = lm_grad_of(s, n->out[0]);
    lm_linear_attr attr = { LM_ACC_ADD };
    bool computed = g->value[w].role != LM_ROLE_PARAM;

    if (computed && computed_grad(s, n, e))
        return e->code;
    if ((lm_grad_wants(s, w) && !computed) || lm_grad_wants(s, b)) {
        lm_vid in[2] = { dy, x }, out[2];
        lm_acc bias_acc = LM_ACC_ADD;
        g->phase = LM_PHASE_BACKWARD_WEIGHT;
        out[0] = LM_SKIP;
        if ((!computed && lm_grad_param(s, w, &out[0], &attr.acc, e)) ||
            lm_grad_param(s, b, &out[1], &bias_acc, e))
            return e->code;
        if (out[0] == LM_SKIP) {
            out[0] = LM_NONE;
            attr.acc = bias_acc;
        }
        if (out[1] >= 0 && bias_acc != attr.acc)
            return lm_fail(e, LM_EUSAGE, "linear", NULL,
                           "a weight and its bias are shared by different layers");
        if (lm_graph_append(g, &lm_op_linear_dw, &attr, in, out, e))
            return e->code;
        g->phase = LM_PHASE_BACKWARD_INPUT;
    }
    if (lm_grad_wants(s, x)) {
        lm_vid in[2] = { dy, w }, dx = LM_NONE;
        if (lm_graph_append(g, &lm_op_linear_dx, &attr, in, &dx, e))
            return e->code;
        return lm_grad_give(s, x, dx, e);
    }
    return LM_OK;
}

static void linear_cost(const lm_call *c, lm_cost *out)
{
    out->flops = 2.0 * (double)lm_tensor_count(&c->in[0]) * (double)c->in[1].dim[0];
    out->bytes = lm_call_bytes(c);
}

static void linear_example(lm_rng r, int i, lm_example *x)
{
    int64_t n = lm_example_size(r, i, 0, 70), m = lm_example_size(r, i, 1, 70);
    int64_t k = lm_example_size(r, i, 2, 130);
    lm_linear_attr attr = { LM_ACC_FIRST };
    *x = (lm_example){ .n_in = 3, .want = 1 };
    x->in[0] = lm_shape2(LM_DTYPE_F32, n, k);
    x->in[1] = lm_shape2(LM_DTYPE_F32, m, k);
    if (lm_example_draw(r, i, 3, 2))
        x->in[2] = lm_shape1(LM_DTYPE_F32, m);
    lm_example_attr(x, &attr);
}

const lm_op lm_op_linear = {
    .name = "linear",
    .attr_size = sizeof(lm_linear_attr),
    .in = { { "x", "N,K", LM_ACT_TYPE },
            { "w", "M,K", LM_WEIGHT },
            { "b", "M", LM_OPTIONAL | LM_ADDEND } },
    .out = { { "y", "N,M", LM_ACT_TYPE } },
    .split = "N M K+",
    .prec = LM_PREC_ALLOW,
    .grad = linear_grad,
    .cost = linear_cost,
    .example = linear_example,
};

static void dx_cost(const lm_call *c, lm_cost *out)
{
    out->flops = 2.0 * (double)lm_tensor_count(&c->in[0]) * (double)c->in[1].dim[1];
    out->bytes = lm_call_bytes(c);
}

const lm_op lm_op_linear_dx = {
    .name = "linear_dx",
    .attr_size = sizeof(lm_linear_attr),
    .in = { { "dy", "N,M", LM_ACT_TYPE | LM_GRADIENT }, { "w", "M,K", LM_WEIGHT } },
    .out = { { "dx", "N,K", LM_ACT_TYPE } },
    .split = "N M+ K",
    .prec = LM_PREC_ALLOW,
    .cost = dx_cost,
};

static void dw_cost(const lm_call *c, lm_cost *out)
{
    out->flops = 2.0 * (double)lm_tensor_count(&c->in[0]) * (double)c->in[1].dim[1];
    out->bytes = lm_call_bytes(c);
}

const lm_op lm_op_linear_dw = {
    .name = "linear_dw",
    .attr_size = sizeof(lm_linear_attr),
    .in = { { "dy", "N,M", LM_ACT_TYPE | LM_GRADIENT }, { "x", "N,K", LM_ACT_TYPE } },
    .out = { { "dw", "M,K", LM_GRADIENT }, { "db", "M", LM_OPTIONAL | LM_GRADIENT } },
    .fields = dw_fields,
    .split = "N+ M K",
    .prec = LM_PREC_ALLOW,
    .cost = dw_cost,
};
