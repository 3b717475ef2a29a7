/* SPDX-License-Identifier: Apache-2.0 */
/* virtual.c -- rows of virtual tokens. */
#include "kernels/virtual.h"

#include "graph/passes.h"
#include "numeric/code_rows.h"
#include "op/example.h"
#include "op/ops.h"

static const lm_field fields[] = { { LM_ATTR_INT(lm_virtual_attr, first, 0) },
                                   { LM_ATTR_INT(lm_virtual_attr, at, 0) },
                                   { LM_ATTR_FLAG(lm_virtual_attr, add) },
                                   { 0 } };
static const lm_field dw_fields[] = { { LM_ATTR_WORD(lm_virtual_attr, acc, lm_acc_words) },
                                      { LM_ATTR_INT(lm_virtual_attr, first, 0) },
                                      { LM_ATTR_INT(lm_virtual_attr, at, 0) },
                                      { 0 } };

static lm_code check_columns(const char *op, const lm_virtual_attr *a, int64_t d, int64_t columns,
                             lm_err *e)
{
    return lm_expect(a->first >= 0 && a->at >= 0 && d <= columns && a->at <= columns - d, op, e,
                     "the table is not within the columns");
}

static lm_code rows_shape(lm_call *c, unsigned want, lm_err *e)
{
    (void)want;
    return check_columns("virtual_rows", c->attr, c->in[2].dim[1], c->in[0].dim[1], e);
}

/* The gradient of a parameter is kept between runs, that of a table that was computed is one more activation. */
static lm_code table_grad(lm_grad *s, const lm_node *n, lm_virtual_attr *attr, lm_err *e)
{
    lm_graph *g = lm_grad_graph(s);
    lm_vid table = n->in[2], in[2] = { lm_grad_of(s, n->out[0]), n->in[1] }, dw = LM_NONE;
    bool param = g->value[table].role == LM_ROLE_PARAM;
    attr->fresh = !param;
    if (param) {
        g->phase = LM_PHASE_BACKWARD_WEIGHT;
        if (lm_grad_param(s, table, &dw, &attr->acc, e))
            return e->code;
    } else if (lm_graph_value(g, LM_ROLE_ACT, g->value[table].t, NULL, &dw, e)) {
        return e->code;
    }
    if (lm_graph_append(g, &lm_op_virtual_rows_dw, attr, in, &dw, e))
        return e->code;
    g->phase = LM_PHASE_BACKWARD_INPUT;
    return param ? LM_OK : lm_grad_give(s, table, dw, e);
}

static lm_code rows_grad(lm_grad *s, const lm_node *n, lm_err *e)
{
    lm_graph *g = lm_grad_graph(s);
    lm_vid x = n->in[0], dy = lm_grad_of(s, n->out[0]), dx = dy, in[2] = { dy, n->in[1] };
    lm_virtual_attr attr = *(const lm_virtual_attr *)n->attr;
    attr.width = g->value[n->in[2]].t.dim[1];
    if (lm_grad_wants(s, n->in[2]) && table_grad(s, n, &attr, e))
        return e->code;
    if (!lm_grad_wants(s, x))
        return LM_OK;
    if (!attr.add) {
        dx = LM_NONE;
        if (lm_graph_append(g, &lm_op_virtual_rows_dx, &attr, in, &dx, e))
            return e->code;
    }
    return lm_grad_give(s, x, dx, e);
}

static void rows_cost(const lm_call *c, lm_cost *out)
{
    out->flops = 0;
    out->bytes = 2.0 * (double)lm_stored_bytes(&c->in[2]);
}

static void rows_example(lm_rng r, int i, lm_example *x)
{
    int64_t n = lm_example_size(r, i, 0, 70), rows = lm_example_size(r, i, 1, 20);
    int64_t d = lm_example_size(r, i, 2, 130);
    lm_virtual_attr attr = { .first = 40,
                             .at = lm_example_draw(r, i, 3, 2) ? 3 : 0,
                             .add = lm_example_draw(r, i, 4, 2) };
    *x = (lm_example){ .n_in = 3, .want = 1 };
    x->in[0] = lm_shape2(LM_DTYPE_F32, n, attr.at + d + (int64_t)(lm_example_draw(r, i, 5, 2) * 5));
    x->in[1] = lm_shape1(LM_DTYPE_I32, n);
    x->in[2] = lm_shape2(LM_DTYPE_F32, rows, d);
    lm_example_attr(x, &attr);
}

/* About half of the ids are virtual. */
static void rows_fill(lm_rng r, const lm_call *c)
{
    const lm_virtual_attr *a = c->attr;
    int32_t *tok = c->in[1].data;
    for (int64_t i = 0; i < c->in[1].dim[0]; i++)
        tok[i] = (int32_t)(lm_rng_below(r, (uint64_t)i * 2, 2)
                               ? a->first + (int64_t)lm_rng_below(r, (uint64_t)i * 2 + 1,
                                                                  (uint64_t)c->in[2].dim[0])
                               : (int64_t)lm_rng_below(r, (uint64_t)i * 2 + 1, (uint64_t)a->first));
}

const lm_op lm_op_virtual_rows = {
    .name = "virtual_rows",
    .attr_size = sizeof(lm_virtual_attr),
    .in = { { "x", "N,C", LM_ACT_TYPE | LM_OVER }, { "tok", "N", LM_IDS }, { "table", "P,D", 0 } },
    .out = { { "y", "N,C", LM_ACT_TYPE | LM_OVER } },
    .fields = fields,
    .split = "N",
    .prec = LM_PREC_INFER,
    .shape = rows_shape,
    .grad = rows_grad,
    .cost = rows_cost,
    .example = rows_example,
    .fill = rows_fill,
};

/* ---- its gradients ---- */

static lm_code dx_shape(lm_call *c, unsigned want, lm_err *e)
{
    const lm_virtual_attr *a = c->attr;
    (void)want;
    return check_columns("virtual_rows_dx", a, a->width, c->in[0].dim[1], e);
}

static void dx_cost(const lm_call *c, lm_cost *out)
{
    const lm_virtual_attr *a = c->attr;
    out->flops = 0;
    out->bytes = (double)(c->in[0].dim[0] * a->width) * (double)lm_dtype_size(c->in[0].dtype);
}

const lm_op lm_op_virtual_rows_dx = {
    .name = "virtual_rows_dx",
    .attr_size = sizeof(lm_virtual_attr),
    .in = { { "dy", "N,C", LM_ACT_TYPE | LM_OVER }, { "tok", "N", LM_IDS } },
    .out = { { "dx", "N,C", LM_ACT_TYPE | LM_OVER } },
    .fields = fields,
    .split = "N",
    .prec = LM_PREC_INFER,
    .shape = dx_shape,
    .cost = dx_cost,
};

static lm_code dw_shape(lm_call *c, unsigned want, lm_err *e)
{
    (void)want;
    return check_columns("virtual_rows_dw", c->attr, c->out[0].dim[1], c->in[0].dim[1], e);
}

static void dw_cost(const lm_call *c, lm_cost *out)
{
    out->flops = (double)(c->in[0].dim[0] * c->out[0].dim[1]);
    out->bytes = lm_call_bytes(c);
}

const lm_op lm_op_virtual_rows_dw = {
    .name = "virtual_rows_dw",
    .attr_size = sizeof(lm_virtual_attr),
    .in = { { "dy", "N,C", LM_ACT_TYPE }, { "tok", "N", LM_IDS } },
    .out = { { "dtable", "P,D", LM_GIVEN } },
    .fields = dw_fields,
    .split = "N+",
    .prec = LM_PREC_INFER,
    .shape = dw_shape,
    .cost = dw_cost,
};
