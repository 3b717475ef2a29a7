/* SPDX-License-Identifier: Apache-2.0 */
/* qk_norm.c -- the norm of all queries of a row, and of all its keys (kernels/norm.h). */
#include "kernels/norm.h"
#include "op/example.h"
#include "op/norms.h"
#include "op/ops.h"

static const lm_field fields[] = { { LM_ATTR_INT(lm_qk_norm_attr, heads, 'H') },
                                   { LM_ATTR_INT(lm_qk_norm_attr, kv_heads, 'K') },
                                   { LM_ATTR_INT(lm_qk_norm_attr, head_dim, 'D') },
                                   { LM_ATTR_REAL(lm_qk_norm_attr, eps) },
                                   { 0 } };
static const lm_field dw_fields[] = { { LM_ATTR_INT(lm_qk_norm_attr, heads, 'H') },
                                      { LM_ATTR_INT(lm_qk_norm_attr, kv_heads, 'K') },
                                      { LM_ATTR_INT(lm_qk_norm_attr, head_dim, 'D') },
                                      { LM_ATTR_WORD(lm_qk_norm_attr, acc, lm_acc_words) },
                                      { 0 } };

static void cost(const lm_call *c, lm_cost *out)
{
    out->flops = 6.0 * (double)lm_tensor_count(&c->in[0]);
    out->bytes = lm_call_bytes(c);
}

static lm_code grad(lm_grad *s, const lm_node *n, lm_err *e)
{
    lm_qk_norm_attr attr = *(const lm_qk_norm_attr *)n->attr;
    return lm_qk_norms_grad(s, n, &lm_op_qk_norm_dw, &lm_op_qk_norm_dx, &attr, &attr.acc, e);
}

static void example(lm_rng r, int i, lm_example *x)
{
    static const int64_t dims[] = { 2, 6, 8, 16, 24, 64 };
    int64_t n = lm_example_size(r, i, 0, 33), d = dims[lm_example_draw(r, i, 1, 6)];
    int64_t kv = 1 + (int64_t)lm_example_draw(r, i, 2, 3);
    int64_t h = kv * (1 + (int64_t)lm_example_draw(r, i, 3, 3));
    lm_qk_norm_attr attr = { h, kv, d, 1e-6, LM_ACC_FIRST };
    *x = (lm_example){ .n_in = 3, .want = 3 };
    x->in[0] = lm_shape2(LM_DTYPE_F32, n, (h + 2 * kv) * d);
    x->in[1] = lm_shape1(LM_DTYPE_F32, h * d);
    x->in[2] = lm_shape1(LM_DTYPE_F32, kv * d);
    lm_example_attr(x, &attr);
}

const lm_op lm_op_qk_norm = {
    .name = "qk_norm",
    .attr_size = sizeof(lm_qk_norm_attr),
    .in = { { "qkv", "N,(H+2K)D", LM_ACT_TYPE }, { "wq", "HD", 0 }, { "wk", "KD", 0 } },
    .out = { { "y", "N,(H+2K)D", LM_ACT_TYPE }, { "stat", "N,2", LM_SAVED } },
    .fields = fields,
    .split = "N",
    .prec = LM_PREC_INFER,
    .tolerance = { 1e-6, 8e-3 },
    .grad = grad,
    .cost = cost,
    .example = example,
};

const lm_op lm_op_qk_norm_dx = {
    .name = "qk_norm_dx",
    .attr_size = sizeof(lm_qk_norm_attr),
    .in = { { "dy", "N,(H+2K)D", LM_ACT_TYPE | LM_OVER },
            { "qkv", "N,(H+2K)D", LM_ACT_TYPE },
            { "wq", "HD", 0 },
            { "wk", "KD", 0 },
            { "stat", "N,2", 0 } },
    .out = { { "dqkv", "N,(H+2K)D", LM_ACT_TYPE | LM_OVER } },
    .fields = fields,
    .split = "N",
    .prec = LM_PREC_INFER,
    .tolerance = { 1e-6, 8e-3 },
    .cost = cost,
};

const lm_op lm_op_qk_norm_dw = {
    .name = "qk_norm_dw",
    .attr_size = sizeof(lm_qk_norm_attr),
    .in = { { "dy", "N,(H+2K)D", LM_ACT_TYPE },
            { "qkv", "N,(H+2K)D", LM_ACT_TYPE },
            { "stat", "N,2", 0 } },
    .out = { { "dwq", "HD", 0 }, { "dwk", "KD", 0 } },
    .fields = dw_fields,
    .split = "N+",
    .prec = LM_PREC_INFER,
    .tolerance = { 1e-6, 8e-3 },
    .cost = cost,
};
