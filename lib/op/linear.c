/* SPDX-License-Identifier: Apache-2.0 */
/* linear.c -- the linear layer and the two halves of its backward. */
#include "kernels/linear.h"

#include "graph/passes.h"
#include "op/example.h"
#include "op/ops.h"

static lm_code linear_shape(lm_call *c, unsigned want, lm_err *e)
{
    const lm_tensor *x = &c->in[0], *w = &c->in[1], *b = &c->in[2];
    (void)want;
    if (lm_expect(x->ndim == 2 && w->ndim == 2 && x->dim[1] == w->dim[1], "linear", e,
                  "x is not [N,K] or w not [M,K] of the same K") ||
        lm_expect(lm_absent(b) || (b->ndim == 1 && b->dim[0] == w->dim[0]), "linear", e,
                  "the bias does not have one element for each of %lld outputs",
                  (long long)w->dim[0]))
        return e->code;
    c->out[0] = lm_shape2(x->dtype, x->dim[0], w->dim[0]);
    return LM_OK;
}

static lm_code linear_grad(lm_grad *s, const lm_node *n, lm_err *e)
{
    lm_graph *g = lm_grad_graph(s);
    lm_vid x = n->in[0], w = n->in[1], b = n->in[2], dy = lm_grad_of(s, n->out[0]);
    lm_linear_attr attr = { LM_ACC_ADD };

    if (lm_grad_wants(s, w) || lm_grad_wants(s, b)) {
        lm_vid in[2] = { dy, x }, out[2];
        lm_acc bias_acc = LM_ACC_ADD;
        g->phase = LM_PHASE_BACKWARD_WEIGHT;
        if (lm_grad_param(s, w, &out[0], &attr.acc, e) ||
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
    lm_example_attr(x, &attr, sizeof attr);
}

const lm_op lm_op_linear = { .name = "linear",
                             .attr_size = sizeof(lm_linear_attr),
                             .n_in = 3,
                             .n_out = 1,
                             .optional_in = 4,
                             .act_in = 3,
                             .low_param = 2,
                             .prec = LM_PREC_ALLOW,
                             .shape = linear_shape,
                             .grad = linear_grad,
                             .cost = linear_cost,
                             .example = linear_example };

static lm_code dx_shape(lm_call *c, unsigned want, lm_err *e)
{
    const lm_tensor *dy = &c->in[0], *w = &c->in[1];
    (void)want;
    if (lm_expect(dy->ndim == 2 && w->ndim == 2 && dy->dim[1] == w->dim[0], "linear_dx", e,
                  "dy is not [N,M] or w not [M,K] of the same M"))
        return e->code;
    c->out[0] = lm_shape2(dy->dtype, dy->dim[0], w->dim[1]);
    return LM_OK;
}

static void dx_cost(const lm_call *c, lm_cost *out)
{
    out->flops = 2.0 * (double)lm_tensor_count(&c->in[0]) * (double)c->in[1].dim[1];
    out->bytes = lm_call_bytes(c);
}

const lm_op lm_op_linear_dx = { .name = "linear_dx",
                                .attr_size = sizeof(lm_linear_attr),
                                .n_in = 2,
                                .n_out = 1,
                                .act_in = 3,
                                .low_param = 2,
                                .prec = LM_PREC_ALLOW,
                                .shape = dx_shape,
                                .cost = dx_cost };

static lm_code dw_shape(lm_call *c, unsigned want, lm_err *e)
{
    const lm_tensor *dy = &c->in[0], *x = &c->in[1];
    if (lm_expect(dy->ndim == 2 && x->ndim == 2 && dy->dim[0] == x->dim[0], "linear_dw", e,
                  "dy is not [N,M] or x not [N,K] of the same N"))
        return e->code;
    c->out[0] = lm_shape2(lm_wide(dy->dtype), dy->dim[1], x->dim[1]);
    if (want & 2)
        c->out[1] = lm_shape1(lm_wide(dy->dtype), dy->dim[1]);
    return LM_OK;
}

static void dw_cost(const lm_call *c, lm_cost *out)
{
    out->flops = 2.0 * (double)lm_tensor_count(&c->in[0]) * (double)c->in[1].dim[1];
    out->bytes = lm_call_bytes(c);
}

const lm_op lm_op_linear_dw = { .name = "linear_dw",
                                .attr_size = sizeof(lm_linear_attr),
                                .n_in = 2,
                                .n_out = 2,
                                .act_in = 3,
                                .prec = LM_PREC_ALLOW,
                                .shape = dw_shape,
                                .cost = dw_cost };
