/* SPDX-License-Identifier: Apache-2.0 */
/* distance.c -- biases of attention by distance, from a learned table of buckets. */
#include "kernels/distance.h"

#include "graph/passes.h"
#include "op/example.h"
#include "op/ops.h"

static const lm_field dtable_fields[] = {
    { LM_ATTR_WORD(lm_distance_bias_attr, acc, lm_acc_words) }, { 0 }
};

static lm_code bias_grad(lm_grad *s, const lm_node *n, lm_err *e)
{
    lm_graph *g = lm_grad_graph(s);
    lm_distance_bias_attr attr = { LM_ACC_FIRST };
    lm_vid in[2] = { lm_grad_of(s, n->out[0]), n->in[1] }, dtable;
    if (!lm_grad_wants(s, n->in[0]))
        return LM_OK;
    g->phase = LM_PHASE_BACKWARD_WEIGHT;
    if (lm_grad_param(s, n->in[0], &dtable, &attr.acc, e) ||
        lm_graph_append(g, &lm_op_distance_bias_dtable, &attr, in, &dtable, e))
        return e->code;
    g->phase = LM_PHASE_BACKWARD_INPUT;
    return LM_OK;
}

static void bias_cost(const lm_call *c, lm_cost *out)
{
    out->flops = 0;
    out->bytes = lm_call_bytes(c);
}

static void bias_example(lm_rng r, int i, lm_example *x)
{
    lm_distance_bias_attr attr = { LM_ACC_FIRST };
    *x = (lm_example){ .n_in = 2, .want = 1 };
    x->in[0] = lm_shape2(LM_DTYPE_F32, lm_example_size(r, i, 0, 64), lm_example_size(r, i, 1, 33));
    x->in[1] = lm_shape1(LM_DTYPE_I32, lm_example_size(r, i, 2, 127));
    lm_example_attr(x, &attr);
}

static void bias_fill(lm_rng r, const lm_call *c)
{
    int32_t *bucket = c->in[1].data;
    for (int64_t z = 0; z < c->in[1].dim[0]; z++)
        bucket[z] = (int32_t)lm_rng_below(r, (uint64_t)z, (uint64_t)c->in[0].dim[0]);
}

const lm_op lm_op_distance_bias = {
    .name = "distance_bias",
    .attr_size = sizeof(lm_distance_bias_attr),
    .in = { { "table", "N,H", 0 }, { "bucket", "Z", LM_IDS } },
    .out = { { "bias", "H,Z", 0 } },
    .split = "H Z",
    .prec = LM_PREC_DENY,
    .grad = bias_grad,
    .cost = bias_cost,
    .example = bias_example,
    .fill = bias_fill,
};

static void dtable_cost(const lm_call *c, lm_cost *out)
{
    out->flops = (double)lm_tensor_count(&c->in[0]);
    out->bytes = lm_call_bytes(c);
}

const lm_op lm_op_distance_bias_dtable = {
    .name = "distance_bias_dtable",
    .attr_size = sizeof(lm_distance_bias_attr),
    .in = { { "dbias", "H,Z", 0 }, { "bucket", "Z", LM_IDS } },
    .out = { { "dtable", "N,H", LM_GIVEN } },
    .fields = dtable_fields,
    .split = "H Z+",
    .prec = LM_PREC_DENY,
    .tolerance = { 1e-6, 1e-6 },
    .cost = dtable_cost,
};
