/* SPDX-License-Identifier: Apache-2.0 */
/* gaussian.c -- rows of Gaussian attention, with norms of heads behind them, and their backward. */
#include "kernels/gaussian.h"

#include "graph/passes.h"
#include "op/example.h"
#include "op/ops.h"

static const lm_field fields[] = { { LM_ATTR_INT(lm_gaussian_attr, heads, 'H') },
                                   { LM_ATTR_INT(lm_gaussian_attr, kv_heads, 'K') },
                                   { LM_ATTR_INT(lm_gaussian_attr, head_dim, 'D') },
                                   { LM_ATTR_FLAG(lm_gaussian_attr, queries) },
                                   { 0 } };

static lm_code rows_grad(lm_grad *s, const lm_node *n, lm_err *e)
{
    const lm_vid in[2] = { lm_grad_of(s, n->out[0]), n->out[0] };
    lm_vid dqkv = LM_NONE;
    if (!lm_grad_wants(s, n->in[0]))
        return LM_OK;
    if (lm_graph_append(lm_grad_graph(s), &lm_op_gaussian_rows_dx, n->attr, in, &dqkv, e))
        return e->code;
    return lm_grad_give(s, n->in[0], dqkv, e);
}

/* A multiply-add for each number of a head that has a norm. */
static void cost(const lm_call *c, lm_cost *out)
{
    const lm_gaussian_attr *a = c->attr;
    int64_t heads = a->kv_heads + (a->queries ? a->heads : 0);
    out->flops = 2.0 * (double)(c->in[0].dim[0] * heads * a->head_dim);
    out->bytes = lm_call_bytes(c);
}

static void example(lm_rng r, int i, lm_example *x)
{
    static const int64_t dims[] = { 1, 4, 8, 20, 64, 128, 33, 256 };
    int64_t kv = 1 + (int64_t)lm_example_draw(r, i, 0, 3);
    lm_gaussian_attr a = { .heads = kv * (1 + (int64_t)lm_example_draw(r, i, 1, 3)),
                           .kv_heads = kv,
                           .head_dim = dims[lm_example_draw(r, i, 2, 8)],
                           .queries = lm_example_draw(r, i, 3, 2) };
    *x = (lm_example){ .n_in = 1, .want = 1 };
    x->in[0] =
        lm_shape2(LM_DTYPE_F32, lm_example_size(r, i, 4, 65), (a.heads + 2 * kv) * a.head_dim);
    lm_example_attr(x, &a);
}

const lm_op lm_op_gaussian_rows = {
    .name = "gaussian_rows",
    .attr_size = sizeof(lm_gaussian_attr),
    .in = { { "qkv", "N,(H+2K)D", LM_ACT_TYPE } },
    .out = { { "y", "N,(H+K)(D+8)+KD", LM_ACT_TYPE } },
    .fields = fields,
    .split = "N HK",
    .prec = LM_PREC_INFER,
    .tolerance = { 2e-6, 4e-3 },
    .grad = rows_grad,
    .cost = cost,
    .example = example,
};

const lm_op lm_op_gaussian_rows_dx = {
    .name = "gaussian_rows_dx",
    .attr_size = sizeof(lm_gaussian_attr),
    .in = { { "dy", "N,(H+K)(D+8)+KD", LM_ACT_TYPE | LM_GRADIENT },
            { "y", "N,(H+K)(D+8)+KD", LM_ACT_TYPE } },
    .out = { { "dqkv", "N,(H+2K)D", LM_ACT_TYPE | LM_GRADIENT } },
    .fields = fields,
    .split = "N HK",
    .prec = LM_PREC_INFER,
    .tolerance = { 2e-6, 4e-3 },
    .cost = cost,
};
