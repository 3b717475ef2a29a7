/* SPDX-License-Identifier: Apache-2.0 */
/* norm.c -- RMSNorm and LayerNorm with the residual addition before it, and the per-head norm of q
 * and k. */
#include "kernels/norm.h"

#include "op/example.h"
#include "op/norms.h"
#include "op/ops.h"

static const char *const kinds[] = { "rms", "layer", "rms_once" };
static const lm_field norm_fields[] = { { LM_ATTR_WORD(lm_norm_attr, kind, kinds) },
                                        { LM_ATTR_REAL(lm_norm_attr, eps) },
                                        { LM_ATTR_RARE_FLAG(lm_norm_attr, plus_one) },
                                        { 0 } };
static const lm_field norm_dw_fields[] = { { LM_ATTR_WORD(lm_norm_attr, kind, kinds) },
                                           { LM_ATTR_WORD(lm_norm_attr, acc, lm_acc_words) },
                                           { LM_ATTR_RARE_FLAG(lm_norm_attr, plus_one) },
                                           { 0 } };
static const lm_field head_norm_fields[] = { { LM_ATTR_INT(lm_head_norm_attr, heads, 'H') },
                                             { LM_ATTR_INT(lm_head_norm_attr, kv_heads, 'K') },
                                             { LM_ATTR_INT(lm_head_norm_attr, head_dim, 'D') },
                                             { LM_ATTR_REAL(lm_head_norm_attr, eps) },
                                             { LM_ATTR_RARE_FLAG(lm_head_norm_attr, plus_one) },
                                             { 0 } };
static const lm_field head_norm_dw_fields[] = { { LM_ATTR_INT(lm_head_norm_attr, heads, 'H') },
                                                { LM_ATTR_INT(lm_head_norm_attr, kv_heads, 'K') },
                                                { LM_ATTR_INT(lm_head_norm_attr, head_dim, 'D') },
                                                { LM_ATTR_WORD(lm_head_norm_attr, acc,
                                                               lm_acc_words) },
                                                { LM_ATTR_RARE_FLAG(lm_head_norm_attr, plus_one) },
                                                { 0 } };

/* s is present iff r is. */
static lm_code norm_shape(lm_call *c, unsigned want, lm_err *e)
{
    const lm_norm_attr *a = c->attr;
    (void)want;
    if (lm_expect(a->kind == LM_NORM_RMS || !a->plus_one, "norm", e, "only RMSNorm has 1 + w"))
        return e->code;
    if (lm_absent(&c->in[3]))
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
    lm_norm_attr attr = { layer ? LM_NORM_LAYER : LM_NORM_RMS, 1e-5, LM_ACC_FIRST, false };
    attr.plus_one = !layer && lm_example_draw(r, i, 4, 2);
    if (!layer && !attr.plus_one && lm_example_draw(r, i, 5, 2))
        attr.kind = LM_NORM_RMS_ONCE;
    *x = (lm_example){ .n_in = 4, .want = 7 };
    x->in[0] = lm_shape2(LM_DTYPE_F32, n, c);
    x->in[1] = lm_shape1(LM_DTYPE_F32, c);
    if (layer)
        x->in[2] = lm_shape1(LM_DTYPE_F32, c);
    if (residual)
        x->in[3] = lm_shape2(LM_DTYPE_F32, n, c);
    lm_example_attr(x, &attr);
}

const lm_op lm_op_norm = {
    .name = "norm",
    .attr_size = sizeof(lm_norm_attr),
    .in = { { "x", "N,C", LM_ACT_TYPE | LM_OVER },
            { "w", "C", 0 },
            { "b", "C", LM_OPTIONAL },
            { "r", "N,C", LM_ACT_TYPE | LM_OPTIONAL | LM_OVER } },
    .out = { { "y", "N,C", LM_ACT_TYPE },
             { "stat", "N,2", LM_SAVED },
             { "s", "N,C", LM_ACT_TYPE | LM_OPTIONAL | LM_OVER } },
    .fields = norm_fields,
    .split = "N",
    .prec = LM_PREC_INFER,
    .tolerance = { 1e-6, 8e-3 },
    .shape = norm_shape,
    .grad = norm_grad,
    .cost = norm_cost,
    .example = norm_example,
};

static void norm_dx_cost(const lm_call *c, lm_cost *out)
{
    out->flops = 10.0 * (double)lm_tensor_count(&c->in[0]);
    out->bytes = lm_call_bytes(c);
}

const lm_op lm_op_norm_dx = {
    .name = "norm_dx",
    .attr_size = sizeof(lm_norm_attr),
    .in = { { "dy", "N,C", LM_ACT_TYPE | LM_OVER },
            { "s", "N,C", LM_ACT_TYPE },
            { "w", "C", 0 },
            { "stat", "N,2", 0 },
            { "dres", "N,C", LM_ACT_TYPE | LM_OPTIONAL | LM_OVER } },
    .out = { { "ds", "N,C", LM_ACT_TYPE | LM_OVER } },
    .fields = norm_fields,
    .split = "N",
    .prec = LM_PREC_INFER,
    .tolerance = { 1e-6, 8e-3 },
    .cost = norm_dx_cost,
};

const lm_op lm_op_norm_dw = {
    .name = "norm_dw",
    .attr_size = sizeof(lm_norm_attr),
    .in = { { "dy", "N,C", LM_ACT_TYPE }, { "s", "N,C", LM_ACT_TYPE }, { "stat", "N,2", 0 } },
    .out = { { "dw", "C", 0 }, { "db", "C", LM_OPTIONAL } },
    .fields = norm_dw_fields,
    .split = "N+ C",
    .prec = LM_PREC_INFER,
    .tolerance = { 1e-6, 8e-3 },
    .cost = norm_cost,
};

lm_code lm_qk_norms_grad(lm_grad *s, const lm_node *n, const lm_op *dw, const lm_op *dx, void *attr,
                         lm_acc *acc, lm_err *e)
{
    lm_graph *g = lm_grad_graph(s);
    lm_vid qkv = n->in[0], wq = n->in[1], wk = n->in[2], dy = lm_grad_of(s, n->out[0]);

    if (lm_grad_wants(s, wq) || lm_grad_wants(s, wk)) {
        lm_vid in[3] = { dy, qkv, n->out[1] }, out[2];
        g->phase = LM_PHASE_BACKWARD_WEIGHT;
        if (lm_grad_param(s, wq, &out[0], acc, e) || lm_grad_param(s, wk, &out[1], acc, e))
            return e->code;
        for (int i = 0; i < 2; i++)
            out[i] = out[i] == LM_SKIP ? LM_NONE : out[i];
        if (lm_graph_append(g, dw, attr, in, out, e))
            return e->code;
        g->phase = LM_PHASE_BACKWARD_INPUT;
    }
    if (!lm_grad_wants(s, qkv))
        return LM_OK;
    lm_vid in[5] = { dy, qkv, wq, wk, n->out[1] }, dqkv = LM_NONE;
    if (lm_graph_append(g, dx, attr, in, &dqkv, e))
        return e->code;
    return lm_grad_give(s, qkv, dqkv, e);
}

static lm_code head_norm_grad(lm_grad *s, const lm_node *n, lm_err *e)
{
    lm_head_norm_attr attr = *(const lm_head_norm_attr *)n->attr;
    return lm_qk_norms_grad(s, n, &lm_op_head_norm_dw, &lm_op_head_norm_dx, &attr, &attr.acc, e);
}

static void head_norm_example(lm_rng r, int i, lm_example *x)
{
    static const int64_t dims[] = { 2, 8, 16, 24, 64, 128 };
    int64_t n = lm_example_size(r, i, 0, 33), d = dims[lm_example_draw(r, i, 1, 6)];
    int64_t kv = 1 + (int64_t)lm_example_draw(r, i, 2, 3);
    int64_t h = kv * (1 + (int64_t)lm_example_draw(r, i, 3, 3));
    lm_head_norm_attr attr = { h, kv, d, 1e-6, LM_ACC_FIRST, lm_example_draw(r, i, 4, 2) };
    *x = (lm_example){ .n_in = 3, .want = 3 };
    x->in[0] = lm_shape2(LM_DTYPE_F32, n, (h + 2 * kv) * d);
    x->in[1] = x->in[2] = lm_shape1(LM_DTYPE_F32, d);
    lm_example_attr(x, &attr);
}

const lm_op lm_op_head_norm = {
    .name = "head_norm",
    .attr_size = sizeof(lm_head_norm_attr),
    .in = { { "qkv", "N,(H+2K)D", LM_ACT_TYPE }, { "wq", "D", 0 }, { "wk", "D", 0 } },
    .out = { { "y", "N,(H+2K)D", LM_ACT_TYPE }, { "stat", "N,H+K", LM_SAVED } },
    .fields = head_norm_fields,
    .split = "N HK",
    .prec = LM_PREC_INFER,
    .tolerance = { 1e-6, 8e-3 },
    .grad = head_norm_grad,
    .cost = norm_cost,
    .example = head_norm_example,
};

const lm_op lm_op_head_norm_dx = {
    .name = "head_norm_dx",
    .attr_size = sizeof(lm_head_norm_attr),
    .in = { { "dy", "N,(H+2K)D", LM_ACT_TYPE | LM_OVER | LM_GRADIENT },
            { "qkv", "N,(H+2K)D", LM_ACT_TYPE },
            { "wq", "D", 0 },
            { "wk", "D", 0 },
            { "stat", "N,H+K", 0 } },
    .out = { { "dqkv", "N,(H+2K)D", LM_ACT_TYPE | LM_OVER | LM_GRADIENT } },
    .fields = head_norm_fields,
    .split = "N HK",
    .prec = LM_PREC_INFER,
    .tolerance = { 1e-6, 8e-3 },
    .cost = norm_dx_cost,
};

const lm_op lm_op_head_norm_dw = {
    .name = "head_norm_dw",
    .attr_size = sizeof(lm_head_norm_attr),
    .in = { { "dy", "N,(H+2K)D", LM_ACT_TYPE | LM_GRADIENT },
            { "qkv", "N,(H+2K)D", LM_ACT_TYPE },
            { "stat", "N,H+K", 0 } },
    .out = { { "dwq", "D", 0 }, { "dwk", "D", 0 } },
    .fields = head_norm_dw_fields,
    .split = "N+ HK+",
    .prec = LM_PREC_INFER,
    .tolerance = { 1e-6, 8e-3 },
    .cost = norm_cost,
};
