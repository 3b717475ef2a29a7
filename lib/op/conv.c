/* SPDX-License-Identifier: Apache-2.0 */
/* conv.c -- short causal convolutions and their backward. */
#include "kernels/conv.h"

#include "graph/passes.h"
#include "op/example.h"
#include "op/ops.h"
#include "op/state_rows.h"

#define FIELDS                                                                                     \
    { LM_ATTR_INT(lm_conv_attr, batch, 'B') }, { LM_ATTR_INT(lm_conv_attr, seq, 'T') },            \
        { LM_ATTR_INT(lm_conv_attr, columns, 'X') }, { LM_ATTR_INT(lm_conv_attr, channels, 'Y') }, \
        { LM_ATTR_INT(lm_conv_attr, taps, 'W') }, { LM_ATTR_FLAG(lm_conv_attr, packed) },          \
        { LM_ATTR_INT(lm_conv_attr, heads, 'H') }, { LM_ATTR_INT(lm_conv_attr, key_heads, 'K') },  \
        { LM_ATTR_INT(lm_conv_attr, key_dim, 'D') },                                               \
    {                                                                                              \
        LM_ATTR_INT(lm_conv_attr, value_dim, 'E')                                                  \
    }

static const lm_field fields[] = { FIELDS, { 0 } };
static const lm_field dw_fields[] = { FIELDS,
                                      { LM_ATTR_WORD(lm_conv_attr, acc, lm_acc_words) },
                                      { 0 } };

/* Columns and channels fit together; z: what passes by is wanted. */
static lm_code columns_shape(const lm_conv_attr *a, bool z, lm_err *e)
{
    int64_t values = a->heads * a->value_dim;
    if (lm_expect(a->taps > 0 && a->taps <= LM_CONV_MOST, "conv", e, "%lld taps are not 1 to %d",
                  (long long)a->taps, LM_CONV_MOST))
        return e->code;
    if (!a->packed)
        return lm_expect(a->columns == a->channels && !z, "conv", e,
                         "columns that are not packed are the channels alone");
    return lm_expect(a->key_heads > 0 && a->heads % a->key_heads == 0 &&
                         a->channels == 2 * a->key_heads * a->key_dim + values &&
                         a->columns == a->channels + values,
                     "conv", e, "sizes of packed columns contradict each other");
}

static lm_code conv_shape(lm_call *c, unsigned want, lm_err *e)
{
    const lm_conv_attr *a = c->attr;
    return columns_shape(a, want >> 1 & 1, e);
}

static lm_code conv_grad(lm_grad *s, const lm_node *n, lm_err *e)
{
    lm_graph *g = lm_grad_graph(s);
    lm_conv_attr attr = *(const lm_conv_attr *)n->attr;
    lm_vid x = n->in[0], w = n->in[1], dz = n->n_out > 1 ? lm_grad_of(s, n->out[1]) : LM_NONE;
    lm_vid in[5] = { lm_grad_of(s, n->out[0]), x, w, n->in[2], dz }, dw, dx = LM_NONE;
    if (lm_grad_wants(s, w)) {
        lm_vid of[4] = { in[0], x, w, n->in[2] };
        g->phase = LM_PHASE_BACKWARD_WEIGHT;
        if (lm_grad_param(s, w, &dw, &attr.acc, e) ||
            lm_graph_append(g, &lm_op_conv_dw, &attr, of, &dw, e))
            return e->code;
        g->phase = LM_PHASE_BACKWARD_INPUT;
    }
    if (!lm_grad_wants(s, x))
        return LM_OK;
    if (lm_graph_append(g, &lm_op_conv_dx, &attr, in, &dx, e))
        return e->code;
    return lm_grad_give(s, x, dx, e);
}

static void conv_cost(const lm_call *c, lm_cost *out)
{
    const lm_conv_attr *a = c->attr;
    out->flops = (2.0 * (double)a->taps + 4) * (double)(a->batch * a->seq * a->channels);
    out->bytes = lm_call_bytes(c);
}

static void back_cost(const lm_call *c, lm_cost *out)
{
    conv_cost(c, out);
    out->flops *= 2;
}

/* Sizes of example i. */
static lm_conv_attr sizes(lm_rng r, int i)
{
    static const int64_t dims[] = { 1, 3, 8, 17, 32 };
    int64_t keys = 1 + (int64_t)lm_example_draw(r, i, 0, 2);
    lm_conv_attr a = { .batch = 1 + (int64_t)lm_example_draw(r, i, 1, 2),
                       .seq = i % 11 == 5 ? 300 : lm_example_size(r, i, 2, 33),
                       .taps = 1 + (int64_t)lm_example_draw(r, i, 3, LM_CONV_MOST),
                       .packed = i % 2,
                       .heads = keys * (1 + (int64_t)lm_example_draw(r, i, 4, 2)),
                       .key_heads = keys,
                       .key_dim = dims[lm_example_draw(r, i, 5, 5)],
                       .value_dim = dims[lm_example_draw(r, i, 6, 5)] };
    a.channels =
        a.packed ? 2 * keys * a.key_dim + a.heads * a.value_dim : lm_example_size(r, i, 7, 70);
    a.columns = a.channels + (a.packed ? a.heads * a.value_dim : 0);
    if (!a.packed)
        a.heads = a.key_heads = a.key_dim = a.value_dim = 0;
    return a;
}

static void conv_example(lm_rng r, int i, lm_example *x)
{
    lm_conv_attr a = sizes(r, i);
    *x = (lm_example){ .n_in = 3, .want = a.packed ? 3 : 1 };
    x->in[0] = lm_shape2(LM_DTYPE_F32, a.batch * a.seq, a.columns);
    x->in[1] = lm_shape2(LM_DTYPE_F32, a.channels, a.taps);
    if (lm_example_draw(r, i, 8, 2))
        x->in[2] = lm_shape1(LM_DTYPE_I32, a.batch * a.seq);
    lm_example_attr(x, &a);
}

static void conv_fill(lm_rng r, const lm_call *c)
{
    const lm_conv_attr *a = c->attr;
    lm_example_documents(r, a->batch, a->seq, 6, c->in[2].data, NULL);
}

const lm_op lm_op_conv = {
    .name = "conv",
    .attr_size = sizeof(lm_conv_attr),
    .in = { { "x", "BT,X", LM_ACT_TYPE }, { "w", "Y,W", 0 }, { "lo", "BT", LM_IDS | LM_OPTIONAL } },
    .out = { { "y", "BT,Y", LM_ACT_TYPE }, { "z", "BT,HE", LM_ACT_TYPE | LM_OPTIONAL } },
    .fields = fields,
    .split = "B",
    .prec = LM_PREC_INFER,
    .tolerance = { 1e-6, 4e-3 },
    .shape = conv_shape,
    .grad = conv_grad,
    .cost = conv_cost,
    .example = conv_example,
    .fill = conv_fill,
};

const lm_op lm_op_conv_dx = {
    .name = "conv_dx",
    .attr_size = sizeof(lm_conv_attr),
    .in = { { "dy", "BT,Y", LM_ACT_TYPE },
            { "x", "BT,X", LM_ACT_TYPE },
            { "w", "Y,W", 0 },
            { "lo", "BT", LM_IDS | LM_OPTIONAL },
            { "dz", "BT,HE", LM_ACT_TYPE | LM_OPTIONAL } },
    .out = { { "dx", "BT,X", LM_ACT_TYPE } },
    .fields = fields,
    .split = "B",
    .prec = LM_PREC_INFER,
    .tolerance = { 1e-6, 4e-3 },
    .cost = back_cost,
};

const lm_op lm_op_conv_dw = {
    .name = "conv_dw",
    .attr_size = sizeof(lm_conv_attr),
    .in = { { "dy", "BT,Y", LM_ACT_TYPE },
            { "x", "BT,X", LM_ACT_TYPE },
            { "w", "Y,W", 0 },
            { "lo", "BT", LM_IDS | LM_OPTIONAL } },
    .out = { { "dw", "Y,W", 0 } },
    .fields = dw_fields,
    .split = "B+",
    .prec = LM_PREC_INFER,
    .tolerance = { 1e-5, 1e-2 },
    .cost = back_cost,
};

/* ---- conv_cached ---- */

static const lm_field cached_fields[] = { { LM_ATTR_INT(lm_conv_attr, batch, 'B') },
                                          { LM_ATTR_INT(lm_conv_attr, seq, 0) },
                                          { LM_ATTR_INT(lm_conv_attr, columns, 'X') },
                                          { LM_ATTR_INT(lm_conv_attr, channels, 'Y') },
                                          { LM_ATTR_INT(lm_conv_attr, taps, 'W') },
                                          { LM_ATTR_FLAG(lm_conv_attr, packed) },
                                          { LM_ATTR_INT(lm_conv_attr, heads, 'H') },
                                          { LM_ATTR_INT(lm_conv_attr, key_heads, 'K') },
                                          { LM_ATTR_INT(lm_conv_attr, key_dim, 'D') },
                                          { LM_ATTR_INT(lm_conv_attr, value_dim, 'E') },
                                          { 0 } };

static lm_code cached_shape(lm_call *c, unsigned want, lm_err *e)
{
    const lm_conv_attr *a = c->attr;
    if (columns_shape(a, want >> 2 & 1, e) ||
        lm_expect(c->out[1].dim[1] == a->taps - 1, "conv_cached", e,
                  "tails of %lld rows, not of %lld", (long long)c->out[1].dim[1],
                  (long long)a->taps - 1))
        return e->code;
    return lm_state_rows_shape(c, "conv_cached", 2, a->seq, &c->out[1], e);
}

static void cached_example(lm_rng r, int i, lm_example *x)
{
    lm_conv_attr a = sizes(r, i);
    a.taps += a.taps < 2;
    a.seq = i % 3 ? a.seq : 1;
    *x = (lm_example){ .n_in = 7, .want = a.packed ? 7 : 3 };
    x->in[0] =
        lm_shape2(LM_DTYPE_F32, lm_state_rows_example(r, i, a.batch, &a.seq, &x->in[2]), a.columns);
    x->in[1] = lm_shape2(LM_DTYPE_F32, a.channels, a.taps);
    x->out[1] = lm_shape3(LM_DTYPE_NONE, a.batch + !lm_absent(&x->in[6]), a.taps - 1, a.channels);
    lm_example_attr(x, &a);
}

static void cached_fill(lm_rng r, const lm_call *c)
{
    const lm_conv_attr *a = c->attr;
    lm_state_rows_fill(r, &c->in[2], c->in[0].dim[0], a->batch, a->seq);
}

static void cached_cost(const lm_call *c, lm_cost *out)
{
    const lm_conv_attr *a = c->attr;
    out->flops = (2.0 * (double)a->taps + 4) * (double)(c->in[0].dim[0] * a->channels);
    out->bytes = lm_call_bytes(c);
}

const lm_op lm_op_conv_cached = {
    .name = "conv_cached",
    .attr_size = sizeof(lm_conv_attr),
    .in = { { "x", "N,X", LM_ACT_TYPE },
            { "w", "Y,W", 0 },
            { "used", "B", LM_IDS },
            { "fresh", "B", LM_IDS },
            { "first", "B+1", LM_IDS | LM_OPTIONAL },
            { "kind", "B", LM_IDS | LM_OPTIONAL },
            { "slot", "B", LM_IDS | LM_OPTIONAL } },
    .out = { { "y", "N,Y", LM_ACT_TYPE },
             { "tail", "S,V,Y", LM_ACT_TYPE | LM_GIVEN },
             { "z", "N,HE", LM_ACT_TYPE | LM_OPTIONAL } },
    .fields = cached_fields,
    .split = "",
    .prec = LM_PREC_INFER,
    .tolerance = { 1e-6, 4e-3 },
    .shape = cached_shape,
    .cost = cached_cost,
    .example = cached_example,
    .fill = cached_fill,
};
