/* SPDX-License-Identifier: Apache-2.0 */
/* map_gradient.c -- gradients of formulas, as formulas and sums where an operand is repeated; and of reductions, as
 * formulas over what they repeat to. */
#include <string.h>

#include "op/append.h"
#include "op/formula.h"
#include "op/ops.h"

/* ---- map ---- */

/* The type of a gradient for an operand of type t: all is F64 or nothing. */
static lm_dtype gradient_type(lm_dtype t, lm_dtype y)
{
    return y == LM_DTYPE_F64 || t == LM_DTYPE_BF16 ? (y == LM_DTYPE_F64 ? y : t) : LM_DTYPE_F32;
}

/* Give operand x its gradient d, which has the shape of y. */
static lm_code give_operand(lm_grad *s, const lm_node *n, lm_vid x, lm_vid d, lm_err *e)
{
    lm_graph *g = lm_grad_graph(s);
    lm_reduce_attr sum = { .kind = LM_REDUCE_SUM };
    lm_tensor shape = g->value[x].t;
    const lm_tensor *y = &g->value[n->out[0]].t;
    shape.dtype = gradient_type(shape.dtype, y->dtype);
    if (lm_tensor_count(&shape) != lm_tensor_count(y)) {
        sum.over = lm_tensor_count(&shape) == 1 ? LM_OVER_ALL
                   : shape.dim[0] == 1          ? LM_OVER_COLUMN
                                                : LM_OVER_ROW;
        if (lm_append_node(g, &lm_op_reduce, &sum, &d, &d, e))
            return e->code;
    }
    if (lm_append_as(g, d, &shape, &d, e))
        return e->code;
    return lm_grad_give(s, x, d, e);
}

/* A node with the gradients of operands x[0 .. k). */
static lm_code append_gradient(lm_grad *s, const lm_node *n, const int *x, int k, lm_vid *d,
                               lm_err *e)
{
    lm_graph *g = lm_grad_graph(s);
    const lm_map_attr *a = n->attr;
    lm_map_attr attr;
    int source[LM_MAP_X];
    unsigned seeds = 0;
    lm_vid in[LM_MAX_IN];
    for (int i = 0; i < LM_MAX_IN; i++)
        in[i] = LM_NONE;
    for (int i = 0; i < LM_MAP_Y; i++)
        seeds |= (unsigned)(lm_grad_of(s, n->out[i]) != LM_NONE) << i;
    if (lm_formula_gradient(&a->program, seeds, x, k, &attr, source, e))
        return e->code;
    in[0] = n->in[0];
    in[1] = n->in[1];
    for (int i = 0; i < LM_MAP_X && source[i] >= 0; i++)
        in[LM_MAP_FIRST_X + i] = source[i] < LM_MAP_X ? n->in[LM_MAP_FIRST_X + source[i]]
                                                      : lm_grad_of(s, n->out[source[i] - LM_MAP_X]);
    for (int i = 0; i < LM_MAX_OUT; i++)
        d[i] = LM_SKIP;
    for (int i = 0; i < k; i++) {
        const lm_tensor *of = &g->value[n->in[LM_MAP_FIRST_X + x[i]]].t;
        lm_tensor y = g->value[n->out[0]].t;
        bool whole = lm_tensor_count(of) == lm_tensor_count(&y);
        y.dtype = gradient_type(whole ? of->dtype : LM_DTYPE_F32, y.dtype);
        if (lm_graph_value(g, LM_ROLE_ACT, y, NULL, &d[i], e))
            return e->code;
    }
    return lm_graph_append(g, &lm_op_map, &attr, in, d, e);
}

lm_code lm_map_grad(lm_grad *s, const lm_node *n, lm_err *e)
{
    int x[LM_MAP_X], wanted = 0;
    lm_vid d[LM_MAX_OUT];
    for (int i = 0; i < LM_MAP_X; i++)
        if (lm_grad_wants(s, n->in[LM_MAP_FIRST_X + i]))
            x[wanted++] = i;
    for (int at = 0, k; at < wanted; at += k) {
        k = wanted - at < LM_MAP_Y ? wanted - at : LM_MAP_Y;
        /* Too long for one program: one operand at a time. */
        if (append_gradient(s, n, x + at, k, d, e) && k > 1 && e->code == LM_EBUG) {
            *e = (lm_err){ 0 };
            k = 1;
            append_gradient(s, n, x + at, k, d, e);
        }
        for (int i = 0; i < k && !e->code; i++)
            give_operand(s, n, n->in[LM_MAP_FIRST_X + x[at + i]], d[i], e);
        if (e->code)
            return e->code;
    }
    return LM_OK;
}

/* ---- reduce ---- */

static lm_code append_text(lm_graph *g, const char *text, const lm_vid v[3], double c,
                           lm_tensor shape, lm_vid *out, lm_err *e)
{
    static const char *const names[] = { "x", "y", "d" };
    static const char *const result[] = { "o" };
    lm_formula_operand operand[3];
    lm_formula_constant constant = { "c", c };
    lm_formula f = { .text = text,
                     .operand = operand,
                     .constant = &constant,
                     .n_constants = 1,
                     .result = result,
                     .n_results = 1 };
    lm_map_attr attr;
    lm_vid in[LM_MAX_IN], made[LM_MAX_OUT];
    for (int i = 0; i < LM_MAX_IN; i++)
        in[i] = LM_NONE;
    for (int i = 0; i < LM_MAX_OUT; i++)
        made[i] = LM_SKIP;
    for (int i = 0; i < 3; i++)
        if (lm_formula_mentions(text, names[i])) {
            operand[f.n_operands] =
                (lm_formula_operand){ names[i], f.n_operands, &g->value[v[i]].t };
            in[LM_MAP_FIRST_X + f.n_operands++] = v[i];
        }
    if (lm_formula_compile(&f, &attr, e) ||
        lm_graph_value(g, LM_ROLE_ACT, shape, NULL, &made[0], e) ||
        lm_graph_append(g, &lm_op_map, &attr, in, made, e))
        return e->code;
    *out = made[0];
    return LM_OK;
}

lm_code lm_reduce_grad(lm_grad *s, const lm_node *n, lm_err *e)
{
    static const char *const text[] = {
        [LM_REDUCE_SUM] = "o = d*c",
        [LM_REDUCE_SQUARES] = "o = x*(d*(2*c))",
        [LM_REDUCE_MAX] = "o = where(x < y, 0, d)",
        [LM_REDUCE_ABS_MAX] = "o = where(abs(x) < y, 0, sign(x)*d)",
    };
    lm_graph *g = lm_grad_graph(s);
    const lm_reduce_attr *a = n->attr;
    lm_tensor shape = g->value[n->in[0]].t, seen = shape;
    lm_reduce_sizes size = lm_reduce_sizes_of(a, &shape);
    lm_vid v[3] = { n->in[0], n->out[0], lm_grad_of(s, n->out[0]) }, d;
    if (a->over == LM_OVER_BLOCK)
        seen = lm_shape2(shape.dtype, size.parts, size.terms);
    if (lm_append_as(g, v[0], &seen, &v[0], e))
        return e->code;
    seen.dtype = gradient_type(seen.dtype, g->value[n->out[0]].t.dtype);
    shape.dtype = seen.dtype;
    if (append_text(g, text[a->kind], v, a->mean ? 1 / (double)size.terms : 1, seen, &d, e) ||
        lm_append_as(g, d, &shape, &d, e))
        return e->code;
    return lm_grad_give(s, n->in[0], d, e);
}
