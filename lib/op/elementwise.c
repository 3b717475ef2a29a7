/* SPDX-License-Identifier: Apache-2.0 */
/* elementwise.c -- activations, sums, dropout, casts, row selection. */
#include "kernels/elementwise.h"

#include "graph/passes.h"
#include "op/example.h"
#include "op/ops.h"
#include "op/part.h"

static const lm_field gelu_fields[] = { { LM_ATTR_FLAG(lm_gelu_attr, exact) }, { 0 } };
static const lm_field soft_cap_fields[] = { { LM_ATTR_REAL(lm_soft_cap_attr, cap) }, { 0 } };
static const lm_field dropout_fields[] = { { LM_ATTR_REAL(lm_dropout_attr, p) },
                                           { LM_ATTR_INT(lm_dropout_attr, site, 0) },
                                           LM_PART_FIELDS(lm_dropout_attr, origin),
                                           { 0 } };

static void cheap_cost(const lm_call *c, lm_cost *out)
{
    out->flops = (double)lm_tensor_count(&c->in[0]);
    out->bytes = lm_call_bytes(c);
}

/* dy, x -> dx by `op`. */
static lm_code grad_by(lm_grad *s, const lm_node *n, const lm_op *op, lm_err *e)
{
    lm_vid in[2] = { lm_grad_of(s, n->out[0]), n->in[0] }, dx = LM_NONE;
    if (!lm_grad_wants(s, n->in[0]))
        return LM_OK;
    if (lm_graph_append(lm_grad_graph(s), op, n->attr, in, &dx, e))
        return e->code;
    return lm_grad_give(s, n->in[0], dx, e);
}

static lm_tensor example_matrix(lm_rng r, int i)
{
    return lm_shape2(LM_DTYPE_F32, lm_example_size(r, i, 0, 40), lm_example_size(r, i, 1, 200));
}

/* ---- gelu ---- */

static lm_code gelu_grad(lm_grad *s, const lm_node *n, lm_err *e)
{
    return grad_by(s, n, &lm_op_gelu_dx, e);
}

static void gelu_example(lm_rng r, int i, lm_example *x)
{
    lm_gelu_attr attr = { lm_example_draw(r, i, 2, 2) };
    *x = (lm_example){ .n_in = 1, .want = 1, .in = { example_matrix(r, i) } };
    lm_example_attr(x, &attr);
}

const lm_op lm_op_gelu = {
    .name = "gelu",
    .attr_size = sizeof(lm_gelu_attr),
    .in = { { "x", "*", LM_ACT_TYPE } },
    .out = { { "y", "*", LM_ACT_TYPE } },
    .fields = gelu_fields,
    .flat = true,
    .split = "*",
    .prec = LM_PREC_INFER,
    .grad = gelu_grad,
    .cost = cheap_cost,
    .example = gelu_example,
};

const lm_op lm_op_gelu_dx = {
    .name = "gelu_dx",
    .attr_size = sizeof(lm_gelu_attr),
    .in = { { "dy", "*", LM_ACT_TYPE | LM_OVER }, { "x", "*", LM_ACT_TYPE } },
    .out = { { "dx", "*", LM_ACT_TYPE | LM_OVER } },
    .fields = gelu_fields,
    .flat = true,
    .split = "*",
    .prec = LM_PREC_INFER,
    .cost = cheap_cost,
};

/* ---- swiglu ---- */

static lm_code swiglu_grad(lm_grad *s, const lm_node *n, lm_err *e)
{
    return grad_by(s, n, &lm_op_swiglu_dx, e);
}

static void swiglu_example(lm_rng r, int i, lm_example *x)
{
    *x = (lm_example){ .n_in = 1, .want = 1, .in = { example_matrix(r, i) } };
    x->in[0].dim[1] *= 2;
}

const lm_op lm_op_swiglu = {
    .name = "swiglu",
    .in = { { "gu", "N,2I", LM_ACT_TYPE } },
    .out = { { "h", "N,I", LM_ACT_TYPE } },
    .split = "N I",
    .prec = LM_PREC_INFER,
    .grad = swiglu_grad,
    .cost = cheap_cost,
    .example = swiglu_example,
};

const lm_op lm_op_swiglu_dx = {
    .name = "swiglu_dx",
    .in = { { "dh", "N,I", LM_ACT_TYPE }, { "gu", "N,2I", LM_ACT_TYPE } },
    .out = { { "dgu", "N,2I", LM_ACT_TYPE } },
    .split = "N I",
    .prec = LM_PREC_INFER,
    .cost = cheap_cost,
};

/* ---- geglu ---- */

static lm_code geglu_grad(lm_grad *s, const lm_node *n, lm_err *e)
{
    return grad_by(s, n, &lm_op_geglu_dx, e);
}

const lm_op lm_op_geglu = {
    .name = "geglu",
    .in = { { "gu", "N,2I", LM_ACT_TYPE } },
    .out = { { "h", "N,I", LM_ACT_TYPE } },
    .split = "N I",
    .prec = LM_PREC_INFER,
    .grad = geglu_grad,
    .cost = cheap_cost,
    .example = swiglu_example,
};

const lm_op lm_op_geglu_dx = {
    .name = "geglu_dx",
    .in = { { "dh", "N,I", LM_ACT_TYPE }, { "gu", "N,2I", LM_ACT_TYPE } },
    .out = { { "dgu", "N,2I", LM_ACT_TYPE } },
    .split = "N I",
    .prec = LM_PREC_INFER,
    .cost = cheap_cost,
};

/* ---- soft_cap ---- */

static lm_code soft_cap_shape(lm_call *c, unsigned want, lm_err *e)
{
    const lm_soft_cap_attr *a = c->attr;
    (void)want;
    return lm_expect(a->cap > 0, "soft_cap", e, "a cap of %g is not above 0", a->cap);
}

static lm_code soft_cap_grad(lm_grad *s, const lm_node *n, lm_err *e)
{
    return grad_by(s, n, &lm_op_soft_cap_dx, e);
}

static void soft_cap_example(lm_rng r, int i, lm_example *x)
{
    lm_soft_cap_attr attr = { 0.5 + (double)lm_example_draw(r, i, 2, 3) };
    *x = (lm_example){ .n_in = 1, .want = 1, .in = { example_matrix(r, i) } };
    lm_example_attr(x, &attr);
}

const lm_op lm_op_soft_cap = {
    .name = "soft_cap",
    .attr_size = sizeof(lm_soft_cap_attr),
    .in = { { "x", "*", LM_ACT_TYPE | LM_OVER } },
    .out = { { "y", "*", LM_ACT_TYPE | LM_OVER } },
    .fields = soft_cap_fields,
    .flat = true,
    .split = "*",
    .prec = LM_PREC_INFER,
    .shape = soft_cap_shape,
    .grad = soft_cap_grad,
    .cost = cheap_cost,
    .example = soft_cap_example,
};

const lm_op lm_op_soft_cap_dx = {
    .name = "soft_cap_dx",
    .attr_size = sizeof(lm_soft_cap_attr),
    .in = { { "dy", "*", LM_ACT_TYPE | LM_OVER }, { "x", "*", LM_ACT_TYPE } },
    .out = { { "dx", "*", LM_ACT_TYPE | LM_OVER } },
    .fields = soft_cap_fields,
    .flat = true,
    .split = "*",
    .prec = LM_PREC_INFER,
    .shape = soft_cap_shape,
    .cost = cheap_cost,
};

/* ---- add ---- */

static lm_code add_grad(lm_grad *s, const lm_node *n, lm_err *e)
{
    lm_vid dy = lm_grad_of(s, n->out[0]);
    if (lm_grad_give(s, n->in[0], dy, e))
        return e->code;
    return lm_grad_give(s, n->in[1], dy, e);
}

static void add_example(lm_rng r, int i, lm_example *x)
{
    *x = (lm_example){ .n_in = 2, .want = 1 };
    x->in[0] = x->in[1] = example_matrix(r, i);
}

const lm_op lm_op_add = {
    .name = "add",
    .in = { { "a", "*", LM_ACT_TYPE | LM_OVER | LM_LINEAR },
            { "b", "*", LM_ACT_TYPE | LM_OVER | LM_LINEAR } },
    .out = { { "y", "*", LM_ACT_TYPE | LM_OVER } },
    .flat = true,
    .split = "*",
    .prec = LM_PREC_INFER,
    .grad = add_grad,
    .cost = cheap_cost,
    .example = add_example,
};

/* ---- dropout: the same mask on the way back ---- */

static lm_code dropout_grad(lm_grad *s, const lm_node *n, lm_err *e)
{
    return grad_by(s, n, &lm_op_dropout, e);
}

static lm_code dropout_shard(lm_shard_call *s, lm_err *e)
{
    return lm_part_append(s, &((lm_dropout_attr *)s->attr)->origin, e);
}

static void dropout_example(lm_rng r, int i, lm_example *x)
{
    lm_dropout_attr attr = { .p = 0.1 + 0.2 * (double)lm_example_draw(r, i, 2, 3), .site = i };
    *x = (lm_example){ .n_in = 1, .want = 1, .in = { example_matrix(r, i) } };
    lm_example_attr(x, &attr);
}

const lm_op lm_op_dropout = {
    .name = "dropout",
    .attr_size = sizeof(lm_dropout_attr),
    .in = { { "x", "*", LM_ACT_TYPE | LM_OVER } },
    .out = { { "y", "*", LM_ACT_TYPE | LM_OVER } },
    .fields = dropout_fields,
    .split = "*",
    .ranges = "*",
    .shard = dropout_shard,
    .prec = LM_PREC_INFER,
    .grad = dropout_grad,
    .cost = cheap_cost,
    .example = dropout_example,
};

/* ---- cast: the output's type is the caller's ---- */

static lm_code cast_grad(lm_grad *s, const lm_node *n, lm_err *e)
{
    lm_graph *g = lm_grad_graph(s);
    lm_vid dy = lm_grad_of(s, n->out[0]), dx = LM_NONE;
    if (!lm_grad_wants(s, n->in[0]))
        return LM_OK;
    if (lm_graph_value(g, LM_ROLE_ACT, g->value[n->in[0]].t, NULL, &dx, e) ||
        lm_graph_append(g, &lm_op_cast, NULL, &dy, &dx, e))
        return e->code;
    return lm_grad_give(s, n->in[0], dx, e);
}

static void cast_example(lm_rng r, int i, lm_example *x)
{
    *x = (lm_example){ .n_in = 1, .want = 1, .in = { example_matrix(r, i) } };
    x->out[0] = x->in[0];
    x->out[0].dtype = lm_example_draw(r, i, 2, 2) ? LM_DTYPE_BF16 : LM_DTYPE_F32;
}

const lm_op lm_op_cast = {
    .name = "cast",
    .in = { { "x", "*", LM_ACT_TYPE } },
    .out = { { "y", "*", LM_ANY_TYPE } },
    .flat = true,
    .split = "*",
    .prec = LM_PREC_INFER,
    .grad = cast_grad,
    .cost = cheap_cost,
    .example = cast_example,
};

/* ---- rows ---- */

static void rows_example(lm_rng r, int i, lm_example *x)
{
    *x = (lm_example){ .n_in = 2, .want = 1, .in = { example_matrix(r, i) } };
    x->in[1] = lm_shape1(LM_DTYPE_I32, lm_example_size(r, i, 2, 20));
}

static void rows_fill(lm_rng r, const lm_call *c)
{
    int32_t *idx = c->in[1].data;
    for (int64_t i = 0; i < c->in[1].dim[0]; i++)
        idx[i] = (int32_t)lm_rng_below(r, (uint64_t)i, (uint64_t)c->in[0].dim[0]);
}

const lm_op lm_op_rows = {
    .name = "rows",
    .in = { { "x", "N,C", LM_ACT_TYPE }, { "idx", "M", LM_IDS } },
    .out = { { "y", "M,C", LM_ACT_TYPE } },
    .split = "M C",
    .prec = LM_PREC_INFER,
    .cost = cheap_cost,
    .example = rows_example,
    .fill = rows_fill,
};
