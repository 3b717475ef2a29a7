/* SPDX-License-Identifier: Apache-2.0 */
/* route_load.c -- bars of routers' numbers and sums of weights by expert, of which losses of loads are made. */
#include "kernels/route.h"

#include "op/append.h"
#include "op/example.h"
#include "op/ops.h"

static const lm_field bar_fields[] = { { LM_ATTR_INT(lm_route_bar_attr, k, 0) }, { 0 } };
static const lm_field importance_fields[] = {
    { LM_ATTR_INT(lm_route_importance_attr, experts, 'E') }, { 0 }
};

/* ---- bars ---- */

static lm_code bar_shape(lm_call *c, unsigned want, lm_err *e)
{
    const int64_t k = ((const lm_route_bar_attr *)c->attr)->k, experts = c->in[0].dim[1];
    (void)want;
    return lm_expect(k >= 1 && k < experts && experts <= LM_ROUTE_MOST_EXPERTS, "route_bar", e,
                     "%lld numbers of a row of %lld, of at most %d", (long long)k,
                     (long long)experts, LM_ROUTE_MOST_EXPERTS);
}

static lm_code bar_grad(lm_grad *s, const lm_node *n, lm_err *e)
{
    lm_vid in[3] = { n->in[0], n->out[1], lm_grad_of(s, n->out[0]) }, dy;
    if (lm_append_node(lm_grad_graph(s), &lm_op_route_bar_dy, n->attr, in, &dy, e))
        return e->code;
    return lm_grad_give(s, n->in[0], dy, e);
}

/* Each of the K + 1 largest is a pass over the row. */
static void bar_cost(const lm_call *c, lm_cost *out)
{
    const int64_t k = ((const lm_route_bar_attr *)c->attr)->k;
    out->flops = (double)(k + 2) * (double)lm_tensor_count(&c->in[0]);
    out->bytes = lm_call_bytes(c);
}

static void bar_dy_cost(const lm_call *c, lm_cost *out)
{
    out->flops = 3 * (double)lm_tensor_count(&c->in[0]);
    out->bytes = lm_call_bytes(c);
}

static void bar_example(lm_rng r, int i, lm_example *x)
{
    const int64_t experts = 1 + lm_example_size(r, i, 1, 69), most = experts < 9 ? experts - 1 : 8;
    const lm_route_bar_attr a = { 1 + (int64_t)lm_example_draw(r, i, 2, (uint64_t)most) };
    *x = (lm_example){ .n_in = 1, .want = 3 };
    x->in[0] = lm_shape2(LM_DTYPE_F32, lm_example_size(r, i, 0, 70), experts);
    lm_example_attr(x, &a);
}

const lm_op lm_op_route_bar = {
    .name = "route_bar",
    .attr_size = sizeof(lm_route_bar_attr),
    .in = { { "y", "T,E", 0 } },
    .out = { { "bar", "T,E", 0 }, { "at", "T,2", LM_IDS | LM_SAVED } },
    .fields = bar_fields,
    .split = "T",
    .prec = LM_PREC_DENY,
    .tolerance = { 1e-7, 1e-7 },
    .shape = bar_shape,
    .grad = bar_grad,
    .cost = bar_cost,
    .example = bar_example,
};

const lm_op lm_op_route_bar_dy = {
    .name = "route_bar_dy",
    .attr_size = sizeof(lm_route_bar_attr),
    .in = { { "y", "T,E", 0 }, { "at", "T,2", LM_IDS }, { "dbar", "T,E", 0 } },
    .out = { { "dy", "T,E", 0 } },
    .fields = bar_fields,
    .split = "T",
    .prec = LM_PREC_DENY,
    .tolerance = { 2e-6, 2e-6 },
    .cost = bar_dy_cost,
};

/* ---- sums of weights ---- */

static lm_code importance_shape(lm_call *c, unsigned want, lm_err *e)
{
    const int64_t experts = ((const lm_route_importance_attr *)c->attr)->experts;
    (void)want;
    return lm_expect(experts >= 1 && experts <= LM_ROUTE_MOST_EXPERTS &&
                         c->in[0].dim[0] <= INT32_MAX / c->in[0].dim[1],
                     "route_importance", e, "%lld experts, of at most %d", (long long)experts,
                     LM_ROUTE_MOST_EXPERTS);
}

static lm_code importance_grad(lm_grad *s, const lm_node *n, lm_err *e)
{
    lm_vid in[2] = { n->in[1], lm_grad_of(s, n->out[0]) }, dw;
    if (lm_append_node(lm_grad_graph(s), &lm_op_route_importance_dw, n->attr, in, &dw, e))
        return e->code;
    return lm_grad_give(s, n->in[0], dw, e);
}

static void importance_cost(const lm_call *c, lm_cost *out)
{
    out->flops = (double)lm_tensor_count(&c->in[0]);
    out->bytes = lm_call_bytes(c);
}

/* Experts in any order, some of the assignments dropped. */
static void importance_fill(lm_rng r, const lm_call *c)
{
    const int64_t experts = ((const lm_route_importance_attr *)c->attr)->experts;
    int32_t *id = c->in[1].data;
    for (int64_t i = 0; i < lm_tensor_count(&c->in[1]); i++) {
        id[i] = (int32_t)lm_rng_below(r, (uint64_t)(2 * i), (uint64_t)experts);
        id[i] = lm_rng_below(r, (uint64_t)(2 * i + 1), 6) ? id[i] : -1 - id[i];
    }
}

static void importance_example(lm_rng r, int i, lm_example *x)
{
    const lm_route_importance_attr a = { lm_example_size(r, i, 2, 70) };
    const int64_t tokens = lm_example_size(r, i, 0, 127) + (i % 3 ? 0 : 100);
    *x = (lm_example){ .n_in = 2, .want = 1 };
    x->in[0] = lm_shape2(LM_DTYPE_F32, tokens, lm_example_size(r, i, 1, 8));
    x->in[1] = x->in[0];
    x->in[1].dtype = LM_DTYPE_I32;
    lm_example_attr(x, &a);
}

const lm_op lm_op_route_importance = {
    .name = "route_importance",
    .attr_size = sizeof(lm_route_importance_attr),
    .in = { { "weight", "T,K", 0 }, { "expert", "T,K", LM_IDS } },
    .out = { { "sum", "E", 0 } },
    .fields = importance_fields,
    .split = "T+",
    .prec = LM_PREC_DENY,
    .tolerance = { 2e-6, 2e-6 },
    .shape = importance_shape,
    .grad = importance_grad,
    .cost = importance_cost,
    .example = importance_example,
    .fill = importance_fill,
};

const lm_op lm_op_route_importance_dw = {
    .name = "route_importance_dw",
    .attr_size = sizeof(lm_route_importance_attr),
    .in = { { "expert", "T,K", LM_IDS }, { "dsum", "E", 0 } },
    .out = { { "dweight", "T,K", 0 } },
    .fields = importance_fields,
    .split = "T",
    .prec = LM_PREC_DENY,
    .tolerance = { 1e-7, 1e-7 },
    .cost = importance_cost,
};
