/* SPDX-License-Identifier: Apache-2.0 */
/* divergence.c -- how far a student's distribution is from a teacher's, row by row, beside the head (distillation). */
#include "kernels/divergence.h"

#include "graph/passes.h"
#include "op/example.h"
#include "op/ops.h"

static const lm_field divergence_fields[] = {
    { LM_ATTR_INT(lm_divergence_attr, vocab, 0) },
    { LM_ATTR_WORD(lm_divergence_attr, acc, lm_acc_words) },
    { LM_ATTR_REAL(lm_divergence_attr, beta) },
    { LM_ATTR_REAL(lm_divergence_attr, temperature) },
    { LM_ATTR_RARE_REAL(lm_divergence_attr, soft_cap) },
    { LM_ATTR_RARE_REAL(lm_divergence_attr, teacher_cap) },
    { 0 }
};

static lm_code divergence_shape(lm_call *c, unsigned want, lm_err *e)
{
    const lm_divergence_attr *a = c->attr;
    (void)want;
    if (a->vocab < 1 || a->vocab > c->in[1].dim[0] || a->vocab > c->in[3].dim[0])
        return lm_expect(false, "divergence", e, "the heads do not have %lld words both",
                         (long long)a->vocab);
    return lm_expect(a->beta >= 0 && a->beta <= 1 && a->temperature > 0, "divergence", e,
                     "beta is not within 0 and 1, or the temperature not above 0");
}

static lm_code divergence_rule(lm_grad *s, const lm_node *n, lm_err *e)
{
    lm_graph *g = lm_grad_graph(s);
    lm_divergence_attr attr = *(const lm_divergence_attr *)n->attr;
    lm_vid in[6] = { n->in[0], n->in[1], n->in[2], n->in[3], n->in[4], lm_grad_of(s, n->out[0]) };
    lm_vid out[2] = { lm_grad_wants(s, n->in[0]) ? LM_NONE : LM_SKIP, LM_SKIP };
    bool wants = out[0] == LM_NONE;
    if (lm_grad_weight(s, n->in[1], &out[1], &attr.acc, e) ||
        lm_graph_append(g, &lm_op_divergence_grad, &attr, in, out, e) ||
        lm_grad_weight_give(s, n->in[1], out[1], e))
        return e->code;
    return wants ? lm_grad_give(s, n->in[0], out[0], e) : LM_OK;
}

static double flops_of(const lm_tensor *x, const lm_tensor *w)
{
    return 2.0 * (double)lm_tensor_count(x) * (double)w->dim[0];
}

static void divergence_cost(const lm_call *c, lm_cost *out)
{
    out->flops = flops_of(&c->in[0], &c->in[1]) + flops_of(&c->in[2], &c->in[3]);
    out->bytes = lm_call_bytes(c);
}

static void grad_cost(const lm_call *c, lm_cost *out)
{
    divergence_cost(c, out);
    out->flops +=
        flops_of(&c->in[0], &c->in[1]) * (!lm_absent(&c->out[0]) + !lm_absent(&c->out[1]));
}

static void divergence_example(lm_rng r, int i, lm_example *x)
{
    static const double betas[] = { 0.5, 0, 1, 0.1 };
    int64_t n = lm_example_size(r, i, 0, 40), v = lm_example_size(r, i, 1, 127) + 1;
    lm_divergence_attr a = { .vocab = v, .acc = LM_ACC_FIRST, .beta = betas[i % 4] };
    a.temperature = i % 3 ? 1 : 2.5;
    a.soft_cap = i % 5 == 1 ? 3 : 0;
    a.teacher_cap = i % 5 == 2 ? 2.5 : 0;
    *x = (lm_example){ .n_in = 5, .want = 1 };
    x->in[0] = lm_shape2(LM_DTYPE_F32, n, lm_example_size(r, i, 2, 40));
    x->in[1] = lm_shape2(LM_DTYPE_F32, v + (i % 2 ? 7 : 0), x->in[0].dim[1]);
    x->in[2] = lm_shape2(LM_DTYPE_F32, n, lm_example_size(r, i, 3, 40));
    x->in[3] = lm_shape2(LM_DTYPE_F32, v + (i % 3 ? 0 : 5), x->in[2].dim[1]);
    x->in[4] = lm_shape1(LM_DTYPE_I32, n);
    lm_example_attr(x, &a);
}

/* Rows that count and rows that do not, and logits of a trained model's size: sums of squares of x and w are divided. */
static void divergence_fill(lm_rng r, const lm_call *c)
{
    const lm_divergence_attr *a = c->attr;
    int32_t *target = c->in[4].data;
    for (int64_t i = 0; i < c->in[4].dim[0]; i++)
        target[i] = lm_rng_below(r, (uint64_t)i, 5) == 0 ? -1 : (int32_t)(i % a->vocab);
    for (int k = 0; k < 4; k += 2)
        for (int64_t i = 0; i < lm_tensor_count(&c->in[k]); i++)
            lm_set(c->in[k].dtype, c->in[k].data, i,
                   0.4 * lm_rng_normal(r, (uint64_t)(1000003 * (k + 1) + i)));
}

#define INPUTS                                                                          \
    { "x", "N,C", LM_ACT_TYPE }, { "w", "V,C", LM_WEIGHT },                             \
        { "xt", "N,D", LM_ACT_TYPE | LM_FIXED }, { "wt", "U,D", LM_WEIGHT | LM_FIXED }, \
    {                                                                                   \
        "target", "N", LM_IDS                                                           \
    }

const lm_op lm_op_divergence = {
    .name = "divergence",
    .attr_size = sizeof(lm_divergence_attr),
    .in = { INPUTS },
    .out = { { "loss", "N", 0 } },
    .fields = divergence_fields,
    .split = "N",
    .prec = LM_PREC_ALLOW,
    .tolerance = { 5e-6, 2e-2 },
    .shape = divergence_shape,
    .grad = divergence_rule,
    .cost = divergence_cost,
    .example = divergence_example,
    .fill = divergence_fill,
};

const lm_op lm_op_divergence_grad = {
    .name = "divergence_grad",
    .attr_size = sizeof(lm_divergence_attr),
    .in = { INPUTS, { "scale", "N", LM_FIXED } },
    .out = { { "dx", "N,C", LM_ACT_TYPE | LM_OPTIONAL }, { "dw", "V,C", LM_OPTIONAL } },
    .fields = divergence_fields,
    .split = "N+",
    .prec = LM_PREC_ALLOW,
    .tolerance = { 5e-6, 2e-2 },
    .shape = divergence_shape,
    .cost = grad_cost,
};
