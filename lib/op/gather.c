/* SPDX-License-Identifier: Apache-2.0 */
/* gather.c -- elements by constant indices, and its transpose. */
#include "kernels/arrange.h"

#include "op/append.h"
#include "op/example.h"
#include "op/ops.h"

static void gather_cost(const lm_call *c, lm_cost *out)
{
    out->flops = 0;
    out->bytes = lm_call_bytes(c);
}

static lm_code gather_shape(lm_call *c, unsigned want, lm_err *e)
{
    (void)want, (void)e;
    c->out[0].ndim = c->in[1].ndim;
    memcpy(c->out[0].dim, c->in[1].dim, sizeof c->out[0].dim);
    return LM_OK;
}

static lm_code gather_grad(lm_grad *s, const lm_node *n, lm_err *e)
{
    lm_graph *g = lm_grad_graph(s);
    const lm_tensor *x = &g->value[n->in[0]].t;
    lm_scatter_attr a = { .ndim = x->ndim };
    lm_vid in[2] = { lm_grad_of(s, n->out[0]), n->in[1] }, dx;
    memcpy(a.dim, x->dim, sizeof a.dim);
    if (lm_append_node(g, &lm_op_scatter, &a, in, &dx, e))
        return e->code;
    return lm_grad_give(s, n->in[0], dx, e);
}

/* Indices into `count` elements, some of them negative; unique: no other twice. */
static void fill_ids(lm_rng r, const lm_tensor *ids, int64_t count, bool unique)
{
    int32_t *id = ids->data;
    int64_t n = lm_tensor_count(ids);
    for (int64_t i = 0; i < n; i++) {
        id[i] = (int32_t)lm_rng_below(r, (uint64_t)(2 * i), (uint64_t)count);
        if (unique)
            id[i] = i < count ? (int32_t)(count - 1 - i) : -1;
        if (lm_rng_below(r, (uint64_t)(2 * i + 1), 5) == 0)
            id[i] = -1;
    }
}

static void gather_fill(lm_rng r, const lm_call *c)
{
    fill_ids(r, &c->in[1], lm_tensor_count(&c->in[0]), false);
}

static void gather_example(lm_rng r, int i, lm_example *x)
{
    int64_t rows = lm_example_size(r, i, 0, 40), cols = lm_example_size(r, i, 1, 70);
    *x = (lm_example){ .n_in = 2, .want = 1 };
    x->in[0] = i % 2 ? lm_shape2(LM_DTYPE_F32, rows, cols) : lm_shape1(LM_DTYPE_F32, rows);
    x->in[1] = lm_shape2(LM_DTYPE_I32, lm_example_size(r, i, 2, 40), lm_example_size(r, i, 3, 70));
}

const lm_op lm_op_gather = {
    .name = "gather",
    .in = { { "x", "*", LM_ACT_TYPE }, { "ids", "~", LM_IDS } },
    .out = { { "y", "*", LM_ACT_TYPE } },
    .split = "",
    .prec = LM_PREC_INFER,
    .shape = gather_shape,
    .grad = gather_grad,
    .cost = gather_cost,
    .example = gather_example,
    .fill = gather_fill,
};

/* ---- scatter ---- */

static const lm_field scatter_fields[] = { { LM_ATTR_FLAG(lm_scatter_attr, unique) }, { 0 } };

static lm_code scatter_shape(lm_call *c, unsigned want, lm_err *e)
{
    const lm_scatter_attr *a = c->attr;
    int64_t count = 1;
    (void)want;
    if (a->ndim < 1 || a->ndim > LM_MAX_DIMS)
        return lm_expect(false, "scatter", e, "y has no shape");
    for (int i = 0; i < a->ndim; i++)
        if (a->dim[i] < 1 || __builtin_mul_overflow(count, a->dim[i], &count))
            return lm_expect(false, "scatter", e, "y has no elements, or too many");
    c->out[0].ndim = a->ndim;
    memcpy(c->out[0].dim, a->dim, sizeof a->dim);
    return LM_OK;
}

static lm_code scatter_grad(lm_grad *s, const lm_node *n, lm_err *e)
{
    lm_graph *g = lm_grad_graph(s);
    lm_vid in[2] = { lm_grad_of(s, n->out[0]), n->in[1] }, dx;
    if (lm_append_node(g, &lm_op_gather, NULL, in, &dx, e))
        return e->code;
    return lm_grad_give(s, n->in[0], dx, e);
}

static void scatter_fill(lm_rng r, const lm_call *c)
{
    fill_ids(r, &c->in[1], lm_tensor_count(&c->out[0]), ((const lm_scatter_attr *)c->attr)->unique);
}

static void scatter_example(lm_rng r, int i, lm_example *x)
{
    lm_scatter_attr a = { .ndim = 1 + i % 2, .unique = i % 3 == 0 };
    a.dim[0] = lm_example_size(r, i, 0, 40);
    a.dim[1] = lm_example_size(r, i, 1, 70);
    *x = (lm_example){ .n_in = 2, .want = 1 };
    x->in[0] = lm_shape2(LM_DTYPE_F32, lm_example_size(r, i, 2, 40), lm_example_size(r, i, 3, 70));
    x->in[1] = x->in[0];
    x->in[1].dtype = LM_DTYPE_I32;
    lm_example_attr(x, &a);
}

const lm_op lm_op_scatter = {
    .name = "scatter",
    .attr_size = sizeof(lm_scatter_attr),
    .in = { { "x", "*", LM_ACT_TYPE }, { "ids", "*", LM_IDS } },
    .out = { { "y", "*", LM_ACT_TYPE } },
    .fields = scatter_fields,
    .split = "",
    .prec = LM_PREC_INFER,
    .shape = scatter_shape,
    .grad = scatter_grad,
    .cost = gather_cost,
    .example = scatter_example,
    .fill = scatter_fill,
};
