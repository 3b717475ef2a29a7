/* SPDX-License-Identifier: Apache-2.0 */
/* head.c -- vocabulary head and cross-entropy; the gradients are outputs of the same node. */
#include "kernels/head.h"

#include "graph/passes.h"
#include "op/example.h"
#include "op/ops.h"

static lm_code head_shape(lm_call *c, unsigned want, lm_err *e)
{
    const lm_head_attr *a = c->attr;
    const lm_tensor *x = &c->in[0], *w = &c->in[1], *t = &c->in[2], *scale = &c->in[3];
    lm_dtype wide = lm_wide(x->dtype);
    if (lm_expect(x->ndim == 2 && w->ndim == 2 && x->dim[1] == w->dim[1], "head_loss", e,
                  "x is not [N,C] or w not [V,C]") ||
        lm_expect(t->ndim == 1 && t->dim[0] == x->dim[0] && scale->ndim == 1, "head_loss", e,
                  "target is not [N] or scale not [1]") ||
        lm_expect(a->vocab >= 1 && a->vocab <= w->dim[0], "head_loss", e,
                  "%lld words do not fit a head of %lld rows", (long long)a->vocab,
                  (long long)w->dim[0]))
        return e->code;
    c->out[0] = lm_shape1(wide, x->dim[0]);
    c->out[1] = want & 2 ? *x : (lm_tensor){ .dtype = LM_DTYPE_NONE };
    c->out[2] =
        want & 4 ? lm_shape2(wide, w->dim[0], w->dim[1]) : (lm_tensor){ .dtype = LM_DTYPE_NONE };
    return LM_OK;
}

static lm_code head_grad(lm_grad *s, const lm_node *n, lm_err *e)
{
    lm_graph *g = lm_grad_graph(s);
    lm_node *node;
    lm_vid dx = LM_NONE, dw = LM_NONE;
    lm_acc acc = LM_ACC_FIRST;
    if (lm_grad_of(s, n->out[0]) != LM_NONE)
        return lm_fail(e, LM_EUSAGE, "head_loss", NULL, "only the root of a backward pass");
    if ((lm_grad_wants(s, n->in[0]) &&
         lm_graph_value(g, LM_ROLE_ACT, g->value[n->in[0]].t, NULL, &dx, e)) ||
        (lm_grad_wants(s, n->in[1]) && lm_grad_param(s, n->in[1], &dw, &acc, e)))
        return e->code;
    node = lm_grad_node(s, n);
    node->out[1] = dx;
    node->out[2] = dw;
    ((lm_head_attr *)node->attr)->acc = acc;
    return dx == LM_NONE ? LM_OK : lm_grad_give(s, n->in[0], dx, e);
}

static void head_cost(const lm_call *c, lm_cost *out)
{
    double one = 2.0 * (double)lm_tensor_count(&c->in[0]) * (double)c->in[1].dim[0];
    out->flops = one * (1 + !lm_absent(&c->out[1]) + !lm_absent(&c->out[2]));
    out->bytes = lm_call_bytes(c);
}

static void head_example(lm_rng r, int i, lm_example *x)
{
    int64_t n = lm_example_size(r, i, 0, 70), v = lm_example_size(r, i, 1, 127) + 1;
    int64_t c = lm_example_size(r, i, 2, 70);
    lm_head_attr attr = { v, 0, LM_ACC_FIRST };
    if (lm_example_draw(r, i, 3, 3) == 0)
        v += 7; /* padding */
    if (lm_example_draw(r, i, 4, 3) == 0)
        attr.chunk_rows = 1 + n / 3;
    *x = (lm_example){ .n_in = 4, .want = 1 };
    x->in[0] = lm_shape2(LM_DTYPE_F32, n, c);
    x->in[1] = lm_shape2(LM_DTYPE_F32, v, c);
    x->in[2] = lm_shape1(LM_DTYPE_I32, n);
    x->in[3] = lm_shape1(LM_DTYPE_F32, 1);
    lm_example_attr(x, &attr, sizeof attr);
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

const lm_op lm_op_head_loss = { .name = "head_loss",
                                .attr_size = sizeof(lm_head_attr),
                                .n_in = 4,
                                .n_out = 3,
                                .act_in = 3,
                                .low_param = 2,
                                .prec = LM_PREC_ALLOW,
                                .tolerance = { 2e-6, 1e-2 },
                                .fixed_in = 8,
                                .shape = head_shape,
                                .grad = head_grad,
                                .cost = head_cost,
                                .example = head_example,
                                .fill = head_fill };
