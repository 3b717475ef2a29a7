/* SPDX-License-Identifier: Apache-2.0 */
/* head.c -- vocabulary head and cross-entropy: the losses, and their gradients from the log of the
 * sum; the joined form computes both in one pass over the logits (op/fuse.h). */
#include "kernels/head.h"

#include "op/example.h"
#include "op/head_shard.h"
#include "op/ops.h"

static const lm_field stats_fields[] = { { LM_ATTR_INT(lm_head_attr, vocab, 0) },
                                         { LM_ATTR_INT(lm_head_attr, chunk_rows, 0) },
                                         { LM_ATTR_RARE_REAL(lm_head_attr, soft_cap) },
                                         { 0 } };
static const lm_field head_fields[] = { { LM_ATTR_INT(lm_head_attr, vocab, 0) },
                                        { LM_ATTR_INT(lm_head_attr, chunk_rows, 0) },
                                        { LM_ATTR_WORD(lm_head_attr, acc, lm_acc_words) },
                                        { LM_ATTR_RARE_REAL(lm_head_attr, soft_cap) },
                                        { 0 } };

static lm_code head_shape(lm_call *c, unsigned want, lm_err *e)
{
    const lm_head_attr *a = c->attr;
    int64_t rows = c->in[1].dim[0];
    (void)want;
    return lm_expect(a->vocab >= 1 && a->vocab <= rows, "head", e,
                     "%lld words do not fit a head of %lld rows", (long long)a->vocab,
                     (long long)rows);
}

/* The gradients of w and of a bias, which the kernels make together. */
static lm_code weight_grads(lm_grad *s, const lm_node *n, lm_vid out[3], lm_acc *acc, lm_err *e)
{
    lm_acc of_bias = LM_ACC_FIRST;
    if (lm_grad_weight(s, n->in[1], &out[1], acc, e) ||
        lm_grad_param(s, n->in[3], &out[2], &of_bias, e) || out[2] < 0)
        return e->code;
    if (out[1] == LM_SKIP) { /* w is frozen */
        out[1] = LM_NONE;
        *acc = of_bias;
    }
    return lm_expect(*acc == of_bias, "head", e,
                     "a weight and its bias are shared by different heads");
}

static lm_code stats_grad(lm_grad *s, const lm_node *n, lm_err *e)
{
    lm_graph *g = lm_grad_graph(s);
    lm_head_attr attr = *(const lm_head_attr *)n->attr;
    lm_vid by_loss = lm_grad_of(s, n->out[0]), by_entropy = lm_grad_of(s, n->out[3]);
    lm_vid in[8] = { n->in[0], n->in[1], n->in[2], n->out[1], by_loss, LM_NONE, LM_NONE, n->in[3] };
    lm_vid out[3] = { lm_grad_wants(s, n->in[0]) ? LM_NONE : LM_SKIP, LM_SKIP, LM_SKIP };
    bool wants = out[0] == LM_NONE;
    if (by_entropy != LM_NONE) {
        in[5] = n->out[3];
        in[6] = by_entropy;
    }
    if (weight_grads(s, n, out, &attr.acc, e) ||
        lm_graph_append(g, &lm_op_head_grad, &attr, in, out, e) ||
        lm_grad_weight_give(s, n->in[1], out[1], e))
        return e->code;
    return wants ? lm_grad_give(s, n->in[0], out[0], e) : LM_OK;
}

static double product_flops(const lm_call *c)
{
    return 2.0 * (double)lm_tensor_count(&c->in[0]) * (double)c->in[1].dim[0];
}

static void stats_cost(const lm_call *c, lm_cost *out)
{
    out->flops = product_flops(c);
    out->bytes = lm_call_bytes(c);
}

static void grad_cost(const lm_call *c, lm_cost *out)
{
    out->flops = product_flops(c) * (1 + !lm_absent(&c->out[0]) + !lm_absent(&c->out[1]));
    out->bytes = lm_call_bytes(c);
}

static void loss_cost(const lm_call *c, lm_cost *out)
{
    out->flops = product_flops(c) * (1 + !lm_absent(&c->out[1]) + !lm_absent(&c->out[2]));
    out->bytes = lm_call_bytes(c);
}

static void stats_example(lm_rng r, int i, lm_example *x)
{
    int64_t n = lm_example_size(r, i, 0, 70), v = lm_example_size(r, i, 1, 127) + 1;
    int64_t c = lm_example_size(r, i, 2, 70);
    lm_head_attr attr = { .vocab = v, .acc = LM_ACC_FIRST };
    attr.soft_cap = lm_example_draw(r, i, 7, 3) == 0 ? 2.5 : 0;
    if (lm_example_draw(r, i, 3, 3) == 0)
        v += 7; /* padding: no target */
    if (lm_example_draw(r, i, 4, 3) == 0)
        attr.chunk_rows = 1 + n / 3;
    *x = (lm_example){ .n_in = 4, .want = lm_example_draw(r, i, 5, 2) ? 7 : 3 };
    x->want |= i % 2 ? 8 : 0;
    x->want |= i % 5 > 2 ? 16 : 0;
    x->in[0] = lm_shape2(LM_DTYPE_F32, n, c);
    x->in[1] = lm_shape2(LM_DTYPE_F32, v, c);
    x->in[2] = lm_shape1(LM_DTYPE_I32, n);
    if (i % 3 == 1)
        x->in[3] = lm_shape1(LM_DTYPE_F32, v);
    lm_example_attr(x, &attr);
}

static void loss_example(lm_rng r, int i, lm_example *x)
{
    stats_example(r, i, x);
    x->n_in = 5;
    x->in[4] = x->in[3];
    x->in[3] = lm_shape1(LM_DTYPE_F32, x->in[0].dim[0]);
    x->want = 1 + 2 * (unsigned)lm_example_draw(r, i, 6, 4);
    x->want |= x->in[4].ndim && x->want & 4 ? 8 : 0;
}

static void head_fill(lm_rng r, const lm_call *c)
{
    const lm_head_attr *a = c->attr;
    int32_t *target = c->in[2].data;
    for (int64_t i = 0; i < c->in[2].dim[0]; i++)
        target[i] = lm_rng_below(r, (uint64_t)i * 2, 6) == 0
                        ? -1
                        : (int32_t)lm_rng_below(r, (uint64_t)i * 2 + 1, (uint64_t)a->vocab);
}

const lm_op lm_op_head_stats = {
    .name = "head_stats",
    .attr_size = sizeof(lm_head_attr),
    .in = { { "x", "N,C", LM_ACT_TYPE },
            { "w", "V,C", LM_WEIGHT },
            { "target", "N", LM_IDS },
            { "bias", "V", LM_OPTIONAL } },
    .out = { { "loss", "N", 0 },
             { "lse", "N", LM_SAVED | LM_OPTIONAL },
             { "logit", "N", LM_SAVED | LM_OPTIONAL },
             { "entropy", "N", LM_OPTIONAL },
             { "collision", "N", LM_SAVED | LM_OPTIONAL } },
    .fields = stats_fields,
    .split = "N V",
    .splits = lm_head_stats_splits,
    .shard = lm_head_stats_shard,
    .ranges = "V",
    .prec = LM_PREC_ALLOW,
    .tolerance = { 2e-6, 1e-2 },
    .shape = head_shape,
    .grad = stats_grad,
    .cost = stats_cost,
    .example = stats_example,
    .fill = head_fill,
};

const lm_op lm_op_head_grad = {
    .name = "head_grad",
    .attr_size = sizeof(lm_head_attr),
    .in = { { "x", "N,C", LM_ACT_TYPE },
            { "w", "V,C", LM_WEIGHT },
            { "target", "N", LM_IDS },
            { "lse", "N", 0 },
            { "scale", "N", LM_FIXED },
            { "entropy", "N", LM_OPTIONAL },
            { "dentropy", "N", LM_OPTIONAL | LM_FIXED },
            { "bias", "V", LM_OPTIONAL } },
    .out = { { "dx", "N,C", LM_ACT_TYPE | LM_OPTIONAL },
             { "dw", "V,C", LM_OPTIONAL },
             { "dbias", "V", LM_OPTIONAL } },
    .fields = head_fields,
    .split = "N+ V+",
    .splits = lm_head_splits,
    .shard = lm_head_grad_shard,
    .ranges = "V",
    .prec = LM_PREC_ALLOW,
    .tolerance = { 2e-6, 1e-2 },
    .shape = head_shape,
    .cost = grad_cost,
};

const lm_op lm_op_head_loss = {
    .name = "head_loss",
    .attr_size = sizeof(lm_head_attr),
    .in = { { "x", "N,C", LM_ACT_TYPE },
            { "w", "V,C", LM_WEIGHT },
            { "target", "N", LM_IDS },
            { "scale", "N", LM_FIXED },
            { "bias", "V", LM_OPTIONAL } },
    .out = { { "loss", "N", 0 },
             { "dx", "N,C", LM_ACT_TYPE | LM_OPTIONAL },
             { "dw", "V,C", LM_OPTIONAL },
             { "dbias", "V", LM_OPTIONAL } },
    .fields = head_fields,
    .split = "N+",
    .prec = LM_PREC_ALLOW,
    .tolerance = { 2e-6, 1e-2 },
    .shape = head_shape,
    .cost = loss_cost,
    .example = loss_example,
    .fill = head_fill,
};
