/* SPDX-License-Identifier: Apache-2.0 */
/* grouped.c -- grouped linear layers and the two halves of their backward. */
#include "kernels/grouped.h"

#include "graph/passes.h"
#include "op/dispatch.h"
#include "op/example.h"
#include "op/ops.h"

static const lm_field sizes[] = { { LM_ATTR_INT(lm_grouped_attr, groups, 'G') },
                                  { LM_ATTR_INT(lm_grouped_attr, rows, 'M') },
                                  { 0 } };
static const lm_field dw_fields[] = { { LM_ATTR_INT(lm_grouped_attr, groups, 'G') },
                                      { LM_ATTR_INT(lm_grouped_attr, rows, 'M') },
                                      { LM_ATTR_WORD(lm_grouped_attr, acc, lm_acc_words) },
                                      { 0 } };

static lm_code y_grad(lm_grad *s, const lm_node *n, lm_err *e)
{
    lm_graph *g = lm_grad_graph(s);
    lm_vid x = n->in[0], w = n->in[1], offsets = n->in[2], dy = lm_grad_of(s, n->out[0]);
    lm_grouped_attr attr = *(const lm_grouped_attr *)n->attr;

    if (lm_grad_wants(s, w)) {
        lm_vid in[3] = { dy, x, offsets }, dw;
        g->phase = LM_PHASE_BACKWARD_WEIGHT;
        if (lm_grad_weight(s, w, &dw, &attr.acc, e) ||
            lm_graph_append(g, &lm_op_grouped_linear_dw, &attr, in, &dw, e) ||
            lm_grad_weight_give(s, w, dw, e))
            return e->code;
        g->phase = LM_PHASE_BACKWARD_INPUT;
    }
    if (lm_grad_wants(s, x)) {
        lm_vid in[3] = { dy, w, offsets }, dx = LM_NONE;
        if (lm_graph_append(g, &lm_op_grouped_linear_dx, &attr, in, &dx, e))
            return e->code;
        return lm_grad_give(s, x, dx, e);
    }
    return LM_OK;
}

/* Each row is multiplied with the weights of one group: x has their K columns, or dy their M beside a result of K. */
static void grouped_cost(const lm_call *c, lm_cost *out)
{
    const lm_grouped_attr *a = c->attr;
    int64_t k = c->in[0].dim[1] == a->rows ? c->out[0].dim[1] : c->in[0].dim[1];
    out->flops = 2.0 * (double)c->in[0].dim[0] * (double)a->rows * (double)k;
    out->bytes = lm_call_bytes(c);
}

static void y_example(lm_rng r, int i, lm_example *x)
{
    int64_t n = lm_example_size(r, i, 0, 127), m = lm_example_size(r, i, 1, 70);
    int64_t k = lm_example_size(r, i, 2, 127), groups = lm_example_size(r, i, 3, 9);
    lm_grouped_attr attr = { groups, m, LM_ACC_FIRST };
    *x = (lm_example){ .n_in = 3, .want = 1 };
    x->in[0] = lm_shape2(LM_DTYPE_F32, n, k);
    x->in[1] = lm_shape2(LM_DTYPE_F32, groups * m, k);
    x->in[2] = lm_shape1(LM_DTYPE_I32, groups + 1);
    lm_example_attr(x, &attr);
}

/* Whole groups of each rank, whose rows only these have; or all groups, with rows of its own. */
static const char *product_form(const lm_call *c, int i)
{
    (void)c;
    return i > 1 ? NULL : i ? "o-so" : "se-s";
}

static const char *dw_form(const lm_call *c, int i)
{
    (void)c;
    return i > 1 ? NULL : i ? "oos+" : "ss-e";
}

static lm_code grouped_shard(lm_shard_call *s, lm_err *e)
{
    if (lm_is_own(s))
        return lm_shard_append(s, e);
    ((lm_grouped_attr *)s->attr)->groups = s->range.count;
    return lm_own_experts(s, 2, e) ? e->code : lm_shard_append(s, e);
}

/* Group boundaries at random positions, in order: some groups are empty, and often some rows are of
 * none. */
void lm_grouped_fill(lm_rng r, const lm_call *c)
{
    int32_t *offsets = c->in[2].data;
    int64_t groups = c->in[2].dim[0] - 1, n = c->in[0].dim[0];

    offsets[0] = 0;
    n -= (int64_t)lm_rng_below(r, 0, (uint64_t)n + 1) / 2;
    for (int64_t g = 1; g < groups; g++) {
        int32_t cut = (int32_t)lm_rng_below(r, (uint64_t)g, (uint64_t)n + 1);
        int64_t at = g;
        for (; at > 1 && offsets[at - 1] > cut; at--)
            offsets[at] = offsets[at - 1];
        offsets[at] = cut;
    }
    offsets[groups] = (int32_t)n;
}

const lm_op lm_op_grouped_linear = {
    .name = "grouped_linear",
    .attr_size = sizeof(lm_grouped_attr),
    .in = { { "x", "N,K", LM_ACT_TYPE }, { "w", "GM,K", LM_WEIGHT }, { "offsets", "G+1", LM_IDS } },
    .out = { { "y", "N,M", LM_ACT_TYPE } },
    .fields = sizes,
    .split = "M K+",
    .form = product_form,
    .shard = grouped_shard,
    .prec = LM_PREC_ALLOW,
    .grad = y_grad,
    .cost = grouped_cost,
    .example = y_example,
    .fill = lm_grouped_fill,
};

const lm_op lm_op_grouped_linear_dx = {
    .name = "grouped_linear_dx",
    .attr_size = sizeof(lm_grouped_attr),
    .in = { { "dy", "N,M", LM_ACT_TYPE },
            { "w", "GM,K", LM_WEIGHT },
            { "offsets", "G+1", LM_IDS } },
    .out = { { "dx", "N,K", LM_ACT_TYPE } },
    .fields = sizes,
    .split = "M+ K",
    .form = product_form,
    .shard = grouped_shard,
    .prec = LM_PREC_ALLOW,
    .cost = grouped_cost,
};

const lm_op lm_op_grouped_linear_dw = {
    .name = "grouped_linear_dw",
    .attr_size = sizeof(lm_grouped_attr),
    .in = { { "dy", "N,M", LM_ACT_TYPE },
            { "x", "N,K", LM_ACT_TYPE },
            { "offsets", "G+1", LM_IDS } },
    .out = { { "dw", "GM,K", 0 } },
    .fields = dw_fields,
    .split = "M K",
    .form = dw_form,
    .shard = grouped_shard,
    .prec = LM_PREC_ALLOW,
    .cost = grouped_cost,
};
