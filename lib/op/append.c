/* SPDX-License-Identifier: Apache-2.0 */
/* append.c -- nodes that gradient rules append. */
#include "op/append.h"

#include <string.h>

#include "kernels/arrange.h"
#include "kernels/comm.h"
#include "op/ops.h"

lm_code lm_append_node(lm_graph *g, const lm_op *op, const void *attr, const lm_vid *in,
                       lm_vid *out, lm_err *e)
{
    lm_vid made = LM_NONE; /* *out may be one of the inputs */
    lm_graph_append(g, op, attr, in, &made, e);
    *out = made;
    return e->code;
}

static lm_code append_reshape(lm_graph *g, lm_vid v, const lm_tensor *shape, lm_vid *out, lm_err *e)
{
    lm_permute_attr a = { .ndim = 1, .to_ndim = shape->ndim };
    a.dim[0] = lm_tensor_count(shape);
    memcpy(a.to, shape->dim, sizeof a.to);
    return lm_append_node(g, &lm_op_permute, &a, &v, out, e);
}

lm_code lm_append_as(lm_graph *g, lm_vid v, const lm_tensor *shape, lm_vid *out, lm_err *e)
{
    const lm_tensor want = *shape; /* may be of the graph, which moves as it grows */
    *out = v;
    if (!lm_same_shape(&g->value[v].t, &want) && append_reshape(g, v, &want, &v, e))
        return e->code;
    *out = v;
    if (g->value[v].t.dtype == want.dtype)
        return LM_OK;
    *out = LM_NONE;
    if (lm_graph_value(g, LM_ROLE_ACT, want, NULL, out, e))
        return e->code;
    return lm_graph_append(g, &lm_op_cast, NULL, &v, out, e);
}

lm_code lm_append_batch_sum(lm_graph *g, lm_vid v, const lm_tensor *shape, lm_vid *out, lm_err *e)
{
    lm_reduce_attr a = { .kind = LM_REDUCE_SUM, .over = LM_OVER_COLUMN };
    const lm_tensor want = *shape;
    int64_t count = lm_tensor_count(&g->value[v].t), batch = g->value[v].t.dim[0];
    lm_tensor rows = lm_shape2(g->value[v].t.dtype, batch, count / batch);
    if (append_reshape(g, v, &rows, &v, e) || lm_append_node(g, &lm_op_reduce, &a, &v, &v, e))
        return e->code;
    return lm_append_as(g, v, &want, out, e);
}

lm_code lm_shard_ids(lm_shard_call *s, int i, lm_vid *real, lm_err *e)
{
    lm_part_ids_attr attr = { s->range.from, s->range.count };
    lm_vid out[2] = { LM_NONE, real ? LM_NONE : LM_SKIP };
    if (lm_graph_append(s->graph, &lm_op_part_ids, &attr, &s->in[i], out, e))
        return e->code;
    s->in[i] = out[0];
    if (real)
        *real = out[1];
    return LM_OK;
}
