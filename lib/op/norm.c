/* SPDX-License-Identifier: Apache-2.0 */
/* norm.c -- RMSNorm and LayerNorm with the residual add in front, and the per-head norm of q and k.
 */
#include "kernels/norm.h"

#include "graph/passes.h"
#include "op/example.h"
#include "op/ops.h"

static lm_code norm_shape(lm_call *c, unsigned want, lm_err *e)
{
    const lm_tensor *x = &c->in[0], *w = &c->in[1], *b = &c->in[2], *r = &c->in[3];
    if (lm_expect(x->ndim == 2 && w->ndim == 1 && w->dim[0] == x->dim[1], "norm", e,
                  "x is not [N,C] or w not [C]") ||
        lm_expect(lm_absent(b) || lm_same_shape(b, w), "norm", e, "b is not [C]") ||
        lm_expect(lm_absent(r) || lm_same_shape(r, x), "norm", e,
                  "the residual does not have the shape of x"))
        return e->code;
    (void)want;
    c->out[0] = lm_shape2(x->dtype, x->dim[0], x->dim[1]);
    c->out[1] = lm_shape2(lm_wide(x->dtype), x->dim[0], 2);
    if (lm_absent(r))
        c->out[2] = (lm_tensor){ .dtype = LM_DTYPE_NONE };
    else
        c->out[2] = c->out[0];
    return LM_OK;
}

static lm_code norm_grad(lm_grad *s, const lm_node *n, lm_err *e)
{
    lm_graph *g = lm_grad_graph(s);
    lm_vid x = n->in[0], w = n->in[1], b = n->in[2], r = n->in[3];
    lm_vid sum = n->out[2] >= 0 ? n->out[2] : x, dy = lm_grad_of(s, n->out[0]);
    lm_vid dres = lm_grad_take(s, sum), ds = dres;
    lm_norm_attr attr = *(const lm_norm_attr *)n->attr;

    if (dy != LM_NONE && (lm_grad_wants(s, w) || lm_grad_wants(s, b))) {
        lm_vid in[3] = { dy, sum, n->out[1] }, out[2];
        lm_acc bias_acc = LM_ACC_ADD;
        g->phase = LM_PHASE_BACKWARD_WEIGHT;
        if (lm_grad_param(s, w, &out[0], &attr.acc, e) ||
            lm_grad_param(s, b, &out[1], &bias_acc, e))
            return e->code;
        if (out[0] == LM_SKIP) {
            out[0] = LM_NONE;
            attr.acc = bias_acc;
        }
        if (lm_graph_append(g, &lm_op_norm_dw, &attr, in, out, e))
            return e->code;
        g->phase = LM_PHASE_BACKWARD_INPUT;
    }
    if (dy != LM_NONE && lm_grad_wants(s, sum)) {
        lm_vid in[5] = { dy, sum, w, n->out[1], dres };
        ds = LM_NONE;
        if (lm_graph_append(g, &lm_op_norm_dx, &attr, in, &ds, e))
            return e->code;
    }
    if (ds != LM_NONE && (lm_grad_give(s, x, ds, e) || (r >= 0 && lm_grad_give(s, r, ds, e))))
        return e->code;
    return LM_OK;
}

static void norm_cost(const lm_call *c, lm_cost *out)
{
    out->flops = 6.0 * (double)lm_tensor_count(&c->in[0]);
    out->bytes = lm_call_bytes(c);
}

static void norm_example(lm_rng r, int i, lm_example *x)
{
    int64_t n = lm_example_size(r, i, 0, 40), c = lm_example_size(r, i, 1, 300);
    bool layer = lm_example_draw(r, i, 2, 2), residual = lm_example_draw(r, i, 3, 2);
    lm_norm_attr attr = { layer ? LM_NORM_LAYER : LM_NORM_RMS, 1e-5, LM_ACC_FIRST };
    *x = (lm_example){ .n_in = 4, .want = 7 };
    x->in[0] = lm_shape2(LM_DTYPE_F32, n, c);
    x->in[1] = lm_shape1(LM_DTYPE_F32, c);
    if (layer)
        x->in[2] = lm_shape1(LM_DTYPE_F32, c);
    if (residual)
        x->in[3] = lm_shape2(LM_DTYPE_F32, n, c);
    lm_example_attr(x, &attr, sizeof attr);
}

const lm_op lm_op_norm = { .name = "norm",
                           .attr_size = sizeof(lm_norm_attr),
                           .n_in = 4,
                           .n_out = 3,
                           .optional_in = 12,
                           .act_in = 9,
                           .inplace = { 0, 0, 9 },
                           .prec = LM_PREC_INFER,
                           .tolerance = { 1e-6, 8e-3 },
                           .saved_out = 2,
                           .shape = norm_shape,
                           .grad = norm_grad,
                           .cost = norm_cost,
                           .example = norm_example };

static lm_code norm_dx_shape(lm_call *c, unsigned want, lm_err *e)
{
    (void)want;
    if (lm_expect(lm_same_shape(&c->in[0], &c->in[1]) &&
                      (lm_absent(&c->in[4]) || lm_same_shape(&c->in[0], &c->in[4])),
                  "norm_dx", e, "dy, s and dres differ in shape"))
        return e->code;
    c->out[0] = c->in[0];
    return LM_OK;
}

static void norm_dx_cost(const lm_call *c, lm_cost *out)
{
    out->flops = 10.0 * (double)lm_tensor_count(&c->in[0]);
    out->bytes = lm_call_bytes(c);
}

const lm_op lm_op_norm_dx = { .name = "norm_dx",
                              .attr_size = sizeof(lm_norm_attr),
                              .n_in = 5,
                              .n_out = 1,
                              .optional_in = 16,
                              .act_in = 1 | 2 | 16,
                              .inplace = { 1 | 16 },
                              .prec = LM_PREC_INFER,
                              .tolerance = { 1e-6, 8e-3 },
                              .shape = norm_dx_shape,
                              .cost = norm_dx_cost };

static lm_code norm_dw_shape(lm_call *c, unsigned want, lm_err *e)
{
    if (lm_expect(c->in[0].ndim == 2 && lm_same_shape(&c->in[0], &c->in[1]), "norm_dw", e,
                  "dy and s differ in shape"))
        return e->code;
    c->out[0] = lm_shape1(lm_wide(c->in[0].dtype), c->in[0].dim[1]);
    c->out[1] = want & 2 ? c->out[0] : (lm_tensor){ .dtype = LM_DTYPE_NONE };
    return LM_OK;
}

const lm_op lm_op_norm_dw = { .name = "norm_dw",
                              .attr_size = sizeof(lm_norm_attr),
                              .n_in = 3,
                              .n_out = 2,
                              .act_in = 3,
                              .prec = LM_PREC_INFER,
                              .tolerance = { 1e-6, 8e-3 },
                              .shape = norm_dw_shape,
                              .cost = norm_cost };

static lm_code head_norm_shape(lm_call *c, unsigned want, lm_err *e)
{
    const lm_head_norm_attr *a = c->attr;
    const lm_tensor *q = &c->in[0];
    (void)want;
    if (lm_expect(q->ndim == 2 && q->dim[1] == (a->heads + 2 * a->kv_heads) * a->head_dim,
                  "head_norm", e, "qkv is not [N,(H+2K)D]") ||
        lm_expect(c->in[1].dim[0] == a->head_dim && c->in[2].dim[0] == a->head_dim, "head_norm", e,
                  "the weights are not [D]"))
        return e->code;
    c->out[0] = lm_shape2(q->dtype, q->dim[0], q->dim[1]);
    c->out[1] = lm_shape2(lm_wide(q->dtype), q->dim[0], a->heads + a->kv_heads);
    return LM_OK;
}

static lm_code head_norm_grad(lm_grad *s, const lm_node *n, lm_err *e)
{
    lm_graph *g = lm_grad_graph(s);
    lm_vid qkv = n->in[0], wq = n->in[1], wk = n->in[2], dy = lm_grad_of(s, n->out[0]);
    lm_head_norm_attr attr = *(const lm_head_norm_attr *)n->attr;

    if (lm_grad_wants(s, wq) || lm_grad_wants(s, wk)) {
        lm_vid in[3] = { dy, qkv, n->out[1] }, out[2];
        g->phase = LM_PHASE_BACKWARD_WEIGHT;
        if (lm_grad_param(s, wq, &out[0], &attr.acc, e) ||
            lm_grad_param(s, wk, &out[1], &attr.acc, e))
            return e->code;
        for (int i = 0; i < 2; i++)
            out[i] = out[i] == LM_SKIP ? LM_NONE : out[i];
        if (lm_graph_append(g, &lm_op_head_norm_dw, &attr, in, out, e))
            return e->code;
        g->phase = LM_PHASE_BACKWARD_INPUT;
    }
    if (!lm_grad_wants(s, qkv))
        return LM_OK;
    lm_vid in[5] = { dy, qkv, wq, wk, n->out[1] }, dx = LM_NONE;
    if (lm_graph_append(g, &lm_op_head_norm_dx, &attr, in, &dx, e))
        return e->code;
    return lm_grad_give(s, qkv, dx, e);
}

static void head_norm_example(lm_rng r, int i, lm_example *x)
{
    static const int64_t dims[] = { 2, 8, 16, 24, 64, 128 };
    int64_t n = lm_example_size(r, i, 0, 33), d = dims[lm_example_draw(r, i, 1, 6)];
    int64_t kv = 1 + (int64_t)lm_example_draw(r, i, 2, 3);
    int64_t h = kv * (1 + (int64_t)lm_example_draw(r, i, 3, 3));
    lm_head_norm_attr attr = { h, kv, d, 1e-6, LM_ACC_FIRST };
    *x = (lm_example){ .n_in = 3, .want = 3 };
    x->in[0] = lm_shape2(LM_DTYPE_F32, n, (h + 2 * kv) * d);
    x->in[1] = x->in[2] = lm_shape1(LM_DTYPE_F32, d);
    lm_example_attr(x, &attr, sizeof attr);
}

const lm_op lm_op_head_norm = { .name = "head_norm",
                                .attr_size = sizeof(lm_head_norm_attr),
                                .n_in = 3,
                                .n_out = 2,
                                .act_in = 1,
                                .prec = LM_PREC_INFER,
                                .tolerance = { 1e-6, 8e-3 },
                                .saved_out = 2,
                                .shape = head_norm_shape,
                                .grad = head_norm_grad,
                                .cost = norm_cost,
                                .example = head_norm_example };

static lm_code head_norm_dx_shape(lm_call *c, unsigned want, lm_err *e)
{
    (void)want;
    if (lm_expect(lm_same_shape(&c->in[0], &c->in[1]), "head_norm_dx", e,
                  "dy and qkv differ in shape"))
        return e->code;
    c->out[0] = c->in[0];
    return LM_OK;
}

const lm_op lm_op_head_norm_dx = { .name = "head_norm_dx",
                                   .attr_size = sizeof(lm_head_norm_attr),
                                   .n_in = 5,
                                   .n_out = 1,
                                   .act_in = 3,
                                   .inplace = { 1 },
                                   .prec = LM_PREC_INFER,
                                   .tolerance = { 1e-6, 8e-3 },
                                   .shape = head_norm_dx_shape,
                                   .cost = norm_dx_cost };

static lm_code head_norm_dw_shape(lm_call *c, unsigned want, lm_err *e)
{
    const lm_head_norm_attr *a = c->attr;
    (void)want, (void)e;
    c->out[0] = c->out[1] = lm_shape1(lm_wide(c->in[0].dtype), a->head_dim);
    return LM_OK;
}

const lm_op lm_op_head_norm_dw = { .name = "head_norm_dw",
                                   .attr_size = sizeof(lm_head_norm_attr),
                                   .n_in = 3,
                                   .n_out = 2,
                                   .act_in = 3,
                                   .prec = LM_PREC_INFER,
                                   .tolerance = { 1e-6, 8e-3 },
                                   .shape = head_norm_dw_shape,
                                   .cost = norm_cost };
