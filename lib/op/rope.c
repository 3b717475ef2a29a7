/* SPDX-License-Identifier: Apache-2.0 */
/* rope.c -- rotary position embedding; its gradient is the inverse rotation. */
#include "kernels/rope.h"

#include "graph/passes.h"
#include "numeric/format.h"
#include "op/example.h"
#include "op/ops.h"

static const lm_field rope_fields[] = {
    { LM_ATTR_INT(lm_rope_attr, heads, 'H') },    { LM_ATTR_INT(lm_rope_attr, kv_heads, 'K') },
    { LM_ATTR_INT(lm_rope_attr, head_dim, 'D') }, { LM_ATTR_INT(lm_rope_attr, rotary_dim, 'R') },
    { LM_ATTR_FLAG(lm_rope_attr, inverse) },      { 0 }
};

static lm_code rope_shape(lm_call *c, unsigned want, lm_err *e)
{
    const lm_rope_attr *a = c->attr;
    (void)want;
    return lm_expect(a->rotary_dim % 2 == 0 && a->rotary_dim <= a->head_dim, "rope", e,
                     "R of the table is not even, or above D");
}

static lm_code rope_grad(lm_grad *s, const lm_node *n, lm_err *e)
{
    lm_rope_attr attr = *(const lm_rope_attr *)n->attr;
    lm_vid in[3] = { lm_grad_of(s, n->out[0]), n->in[1], n->in[2] }, dx = LM_NONE;
    if (!lm_grad_wants(s, n->in[0]))
        return LM_OK;
    attr.inverse = !attr.inverse;
    if (lm_graph_append(lm_grad_graph(s), &lm_op_rope, &attr, in, &dx, e))
        return e->code;
    return lm_grad_give(s, n->in[0], dx, e);
}

double lm_rope_unread_bytes(const lm_tensor *table, const lm_tensor *pos)
{
    int64_t rows = lm_absent(table) ? 0 : table->dim[0] - pos->dim[0];
    return rows > 0 ? (double)lm_plain_bytes(table->dtype, rows * table->dim[1]) : 0;
}

static void rope_cost(const lm_call *c, lm_cost *out)
{
    out->flops = 3.0 * (double)lm_tensor_count(&c->in[0]);
    out->bytes = lm_call_bytes(c) - lm_rope_unread_bytes(&c->in[2], &c->in[1]);
}

static void rope_example(lm_rng r, int i, lm_example *x)
{
    static const int64_t dims[] = { 2, 8, 16, 24, 64, 128 };
    int64_t n = lm_example_size(r, i, 0, 33), d = dims[lm_example_draw(r, i, 1, 6)];
    int64_t kv = 1 + (int64_t)lm_example_draw(r, i, 2, 3);
    int64_t h = kv * (1 + (int64_t)lm_example_draw(r, i, 3, 3));
    int64_t rot = d > 2 && lm_example_draw(r, i, 4, 2) ? d / 2 : d;
    lm_rope_attr attr = { h, kv, d, rot, lm_example_draw(r, i, 5, 4) == 0 };
    *x = (lm_example){ .n_in = 3, .want = 1 };
    x->in[0] = lm_shape2(LM_DTYPE_F32, n, (h + 2 * kv) * d);
    x->in[1] = lm_shape1(LM_DTYPE_I32, n);
    x->in[2] = lm_shape2(LM_DTYPE_F32, 40, rot);
    lm_example_attr(x, &attr);
}

static void rope_fill(lm_rng r, const lm_call *c)
{
    int32_t *pos = c->in[1].data;
    for (int64_t i = 0; i < c->in[1].dim[0]; i++)
        pos[i] = (int32_t)lm_rng_below(r, (uint64_t)i, (uint64_t)c->in[2].dim[0]);
}

const lm_op lm_op_rope = {
    .name = "rope",
    .attr_size = sizeof(lm_rope_attr),
    .in = { { "qkv", "N,(H+2K)D", LM_ACT_TYPE | LM_OVER | LM_LINEAR },
            { "pos", "N", LM_IDS },
            { "table", "P,R", LM_FIXED } },
    .out = { { "y", "N,(H+2K)D", LM_ACT_TYPE | LM_OVER } },
    .fields = rope_fields,
    .split = "N HK",
    .prec = LM_PREC_INFER,
    .shape = rope_shape,
    .grad = rope_grad,
    .cost = rope_cost,
    .example = rope_example,
    .fill = rope_fill,
};
