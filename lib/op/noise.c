/* SPDX-License-Identifier: Apache-2.0 */
/* noise.c -- counted random noise on activations. */
#include "kernels/noise.h"

#include "graph/passes.h"
#include "op/example.h"
#include "op/ops.h"
#include "op/part.h"

static const char *const kind_words[] = { "added", "scaled", "weighed" };
static const lm_field noise_fields[] = { { LM_ATTR_REAL(lm_noise_attr, amount) },
                                         { LM_ATTR_WORD(lm_noise_attr, kind, kind_words) },
                                         { LM_ATTR_INT(lm_noise_attr, site, 0) },
                                         LM_PART_FIELDS(lm_noise_attr, origin),
                                         { 0 } };

static lm_code noise_shape(lm_call *c, unsigned want, lm_err *e)
{
    const lm_noise_attr *a = c->attr;
    (void)want;
    return lm_expect(a->amount >= 0, "noise", e, "an amount of %g is below 0", a->amount);
}

static lm_code noise_grad(lm_grad *s, const lm_node *n, lm_err *e)
{
    lm_vid dy = lm_grad_of(s, n->out[0]), dx = LM_NONE;
    if (!lm_grad_wants(s, n->in[0]))
        return LM_OK;
    if (((const lm_noise_attr *)n->attr)->kind == LM_NOISE_ADDED)
        return lm_grad_give(s, n->in[0], dy, e);
    if (lm_graph_append(lm_grad_graph(s), &lm_op_noise, n->attr, &dy, &dx, e))
        return e->code;
    return lm_grad_give(s, n->in[0], dx, e);
}

/* A Philox block of four draws, and a quantile of some ten operations. */
static void noise_cost(const lm_call *c, lm_cost *out)
{
    out->flops = 30.0 * (double)lm_tensor_count(&c->in[0]);
    out->bytes = lm_call_bytes(c);
}

static lm_code noise_shard(lm_shard_call *s, lm_err *e)
{
    return lm_part_append(s, &((lm_noise_attr *)s->attr)->origin, e);
}

static void noise_example(lm_rng r, int i, lm_example *x)
{
    const lm_noise_attr attr = { .amount = 0.25 * (double)(1 + lm_example_draw(r, i, 2, 3)),
                                 .kind = (lm_noise_kind)(i % 3),
                                 .site = i };
    *x = (lm_example){ .n_in = 1, .want = 1 };
    x->in[0] = lm_shape2(LM_DTYPE_F32, lm_example_size(r, i, 0, 40), lm_example_size(r, i, 1, 200));
    lm_example_attr(x, &attr);
}

const lm_op lm_op_noise = {
    .name = "noise",
    .attr_size = sizeof(lm_noise_attr),
    .in = { { "x", "*", LM_ACT_TYPE | LM_OVER } },
    .out = { { "y", "*", LM_ACT_TYPE | LM_OVER } },
    .fields = noise_fields,
    .split = "*",
    .ranges = "*",
    .shard = noise_shard,
    .prec = LM_PREC_INFER,
    .tolerance = { 2e-6, 4e-3 },
    .shape = noise_shape,
    .grad = noise_grad,
    .cost = noise_cost,
    .example = noise_example,
};
