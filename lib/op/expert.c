/* SPDX-License-Identifier: Apache-2.0 */
/* expert.c -- biases of experts, and the activation of gpt-oss. */
#include "kernels/expert.h"

#include "graph/passes.h"
#include "op/dispatch.h"
#include "op/example.h"
#include "op/ops.h"

static const lm_field act_fields[] = { { LM_ATTR_REAL(lm_clamped_swiglu_attr, limit) },
                                       { LM_ATTR_REAL(lm_clamped_swiglu_attr, alpha) },
                                       { 0 } };
static const lm_field bias_fields[] = { { LM_ATTR_INT(lm_grouped_bias_attr, groups, 'G') }, { 0 } };
static const lm_field db_fields[] = { { LM_ATTR_INT(lm_grouped_bias_attr, groups, 'G') },
                                      { LM_ATTR_WORD(lm_grouped_bias_attr, acc, lm_acc_words) },
                                      { 0 } };

static void cheap_cost(const lm_call *c, lm_cost *out)
{
    out->flops = (double)lm_tensor_count(&c->in[0]);
    out->bytes = lm_call_bytes(c);
}

/* ---- grouped_bias ---- */

static lm_code bias_grad(lm_grad *s, const lm_node *n, lm_err *e)
{
    lm_graph *g = lm_grad_graph(s);
    lm_grouped_bias_attr attr = *(const lm_grouped_bias_attr *)n->attr;
    lm_vid dy = lm_grad_of(s, n->out[0]), in[2] = { dy, n->in[2] }, db;
    if (lm_grad_wants(s, n->in[1])) {
        g->phase = LM_PHASE_BACKWARD_WEIGHT;
        if (lm_grad_weight(s, n->in[1], &db, &attr.acc, e) ||
            lm_graph_append(g, &lm_op_grouped_bias_db, &attr, in, &db, e) ||
            lm_grad_weight_give(s, n->in[1], db, e))
            return e->code;
        g->phase = LM_PHASE_BACKWARD_INPUT;
    }
    return lm_grad_wants(s, n->in[0]) ? lm_grad_give(s, n->in[0], dy, e) : LM_OK;
}

static void bias_example(lm_rng r, int i, lm_example *x)
{
    int64_t n = lm_example_size(r, i, 0, 127), m = lm_example_size(r, i, 1, 300);
    int64_t groups = lm_example_size(r, i, 2, 9);
    lm_grouped_bias_attr attr = { groups, LM_ACC_FIRST };
    *x = (lm_example){ .n_in = 3, .want = 1 };
    x->in[0] = lm_shape2(LM_DTYPE_F32, n, m);
    x->in[1] = lm_shape2(LM_DTYPE_F32, groups, m);
    x->in[2] = lm_shape1(LM_DTYPE_I32, groups + 1);
    lm_example_attr(x, &attr);
}

/* As in grouped.c. */
static const char *bias_form(const lm_call *c, int i)
{
    (void)c;
    return i > 1 ? NULL : i ? "o-so" : "se-s";
}

static const char *db_form(const lm_call *c, int i)
{
    (void)c;
    return i > 1 ? NULL : i ? "os+" : "s-e";
}

static lm_code bias_shard(lm_shard_call *s, int offsets, lm_err *e)
{
    if (lm_is_own(s))
        return lm_shard_append(s, e);
    ((lm_grouped_bias_attr *)s->attr)->groups = s->range.count;
    return lm_own_experts(s, offsets, e) ? e->code : lm_shard_append(s, e);
}

static lm_code y_shard(lm_shard_call *s, lm_err *e)
{
    return bias_shard(s, 2, e);
}

static lm_code db_shard(lm_shard_call *s, lm_err *e)
{
    return bias_shard(s, 1, e);
}

const lm_op lm_op_grouped_bias = {
    .name = "grouped_bias",
    .attr_size = sizeof(lm_grouped_bias_attr),
    .in = { { "x", "N,M", LM_ACT_TYPE | LM_OVER },
            { "b", "G,M", 0 },
            { "offsets", "G+1", LM_IDS } },
    .out = { { "y", "N,M", LM_ACT_TYPE | LM_OVER } },
    .fields = bias_fields,
    .split = "M",
    .form = bias_form,
    .shard = y_shard,
    .prec = LM_PREC_INFER,
    .grad = bias_grad,
    .cost = cheap_cost,
    .example = bias_example,
    .fill = lm_grouped_fill,
};

const lm_op lm_op_grouped_bias_db = {
    .name = "grouped_bias_db",
    .attr_size = sizeof(lm_grouped_bias_attr),
    .in = { { "dy", "N,M", LM_ACT_TYPE }, { "offsets", "G+1", LM_IDS } },
    .out = { { "db", "G,M", 0 } },
    .fields = db_fields,
    .split = "M",
    .form = db_form,
    .shard = db_shard,
    .prec = LM_PREC_ALLOW,
    .tolerance = { 1e-5, 1e-5 },
    .cost = cheap_cost,
};

/* ---- clamped_swiglu ---- */

static lm_code act_shape(lm_call *c, unsigned want, lm_err *e)
{
    const lm_clamped_swiglu_attr *a = c->attr;
    (void)want;
    return lm_expect(a->limit > 0, "clamped_swiglu", e, "its limit is not positive");
}

static lm_code act_grad(lm_grad *s, const lm_node *n, lm_err *e)
{
    lm_vid in[2] = { lm_grad_of(s, n->out[0]), n->in[0] }, dx = LM_NONE;
    if (!lm_grad_wants(s, n->in[0]))
        return LM_OK;
    if (lm_graph_append(lm_grad_graph(s), &lm_op_clamped_swiglu_dx, n->attr, in, &dx, e))
        return e->code;
    return lm_grad_give(s, n->in[0], dx, e);
}

/* A low limit, so that some numbers reach it. */
static void act_example(lm_rng r, int i, lm_example *x)
{
    lm_clamped_swiglu_attr attr = { 1.25, 1.702 };
    *x = (lm_example){ .n_in = 1, .want = 1 };
    x->in[0] =
        lm_shape2(LM_DTYPE_F32, lm_example_size(r, i, 0, 70), 2 * lm_example_size(r, i, 1, 300));
    lm_example_attr(x, &attr);
}

const lm_op lm_op_clamped_swiglu = {
    .name = "clamped_swiglu",
    .attr_size = sizeof(lm_clamped_swiglu_attr),
    .in = { { "gu", "N,I2", LM_ACT_TYPE } },
    .out = { { "h", "N,I", LM_ACT_TYPE } },
    .fields = act_fields,
    .split = "N I",
    .prec = LM_PREC_INFER,
    .shape = act_shape,
    .grad = act_grad,
    .cost = cheap_cost,
    .example = act_example,
};

const lm_op lm_op_clamped_swiglu_dx = {
    .name = "clamped_swiglu_dx",
    .attr_size = sizeof(lm_clamped_swiglu_attr),
    .in = { { "dh", "N,I", LM_ACT_TYPE }, { "gu", "N,I2", LM_ACT_TYPE } },
    .out = { { "dgu", "N,I2", LM_ACT_TYPE } },
    .fields = act_fields,
    .split = "N I",
    .prec = LM_PREC_INFER,
    .shape = act_shape,
    .cost = cheap_cost,
};
