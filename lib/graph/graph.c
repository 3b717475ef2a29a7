/* SPDX-License-Identifier: Apache-2.0 */
/* graph.c -- values, nodes and the list.
 *
 * Values and nodes are in growing arrays and refer to each other by index, because an append may move
 * the arrays.  Names and attributes are in the graph's arena: they keep their addresses, and go with
 * the graph.  The order of the nodes is the order of execution; a node reads only values that exist
 * when it is appended, so no cycle can be made. */
#include "graph/graph.h"

#include <inttypes.h>
#include <string.h>

#include "numeric/code_rows.h"

const char *lm_phase_name(lm_phase p)
{
    static const char *const names[LM_PHASE_COUNT] = { "forward", "recompute", "dinput", "dweight",
                                                       "update" };
    return names[p];
}

lm_code lm_graph_new(lm_graph **out, lm_err *e)
{
    lm_graph *g = NULL;
    *out = NULL;
    if (lm_alloc_n(&g, 1, sizeof *g, "a graph", e))
        return e->code;
    if (lm_arena_new(&g->arena, 1 << 16, e)) {
        lm_free(g);
        return e->code;
    }
    g->layer = -1;
    *out = g;
    return LM_OK;
}

void lm_graph_free(lm_graph *g)
{
    if (!g)
        return;
    lm_free(g->value);
    lm_free(g->node);
    lm_arena_free(g->arena);
    lm_free(g);
}

/* least: of each dimension. */
static lm_code add_value(lm_graph *g, lm_role role, lm_tensor shape, int64_t least,
                         const char *name, lm_vid *out, lm_err *e)
{
    char *copy = NULL;
    int64_t count = 1;
    *out = LM_NONE;
    for (int i = 0; i < shape.ndim; i++)
        if (shape.dim[i] < least || !lm_mul_i64_ok(count, shape.dim[i], &count))
            return lm_fail(e, LM_EUSAGE, name ? name : "a value", NULL,
                           "dimension %d is %" PRId64 ", or the tensor is too large", i,
                           shape.dim[i]);
    if (lm_grow(&g->value, &g->cap_values, g->n_values + 1, sizeof *g->value, "values of a graph",
                e))
        return e->code;
    if (name && lm_arena_strdup(g->arena, &copy, name, strlen(name), e))
        return e->code;
    shape.data = NULL; /* memory is bound to values by each executor: a graph has none */
    g->value[g->n_values] = (lm_value){ .name = copy,
                                        .role = role,
                                        .space = g->space,
                                        .t = shape,
                                        .grad_of = LM_NONE,
                                        .of = LM_NONE,
                                        .rows = LM_NONE };
    *out = (lm_vid)g->n_values++;
    return LM_OK;
}

lm_code lm_graph_value(lm_graph *g, lm_role role, lm_tensor shape, const char *name, lm_vid *out,
                       lm_err *e)
{
    return add_value(g, role, shape, 1, name, out, e);
}

static bool is_split(const lm_layout *l)
{
    bool split = false;
    for (int i = 0; i < LM_AXES; i++)
        split = split || l->axis[i].share == LM_SPLIT;
    return split;
}

lm_code lm_graph_view(lm_graph *g, lm_vid of, int64_t at, lm_tensor shape, const char *name,
                      lm_vid *out, lm_err *e)
{
    const lm_value *whole = &g->value[of];
    const char *where = name ? name : "a view";
    lm_role role = whole->role;
    *out = LM_NONE;
    if (role == LM_ROLE_ACT)
        return lm_fail(e, LM_EBUG, where, NULL,
                       "is a view of an activation, which has no memory between runs");
    if (is_split(&whole->layout))
        return lm_fail(e, LM_EBUG, where, NULL, "is a view of a value that is split over ranks");
    shape.dtype = whole->t.dtype;
    if (add_value(g, role, shape, 0, name, out, e))
        return e->code;
    whole = &g->value[of]; /* the array may have moved */
    if (at < 0 || at > lm_tensor_count(&whole->t) - lm_tensor_count(&shape)) {
        g->n_values--;
        *out = LM_NONE;
        return lm_fail(e, LM_EBUG, where, NULL, "reaches beyond the value that it is a view of");
    }
    g->has_views = true;
    g->value[*out].of = whole->of >= 0 ? whole->of : of;
    g->value[*out].at = whole->of >= 0 ? whole->at + at : at;
    return LM_OK;
}

static bool has_view(const lm_graph *g, lm_vid v)
{
    for (size_t k = 0; g->has_views && k < g->n_values; k++)
        if (g->value[k].of == v)
            return true;
    return false;
}

lm_code lm_graph_lay(lm_graph *g, lm_vid v, const lm_layout *layout, lm_err *e)
{
    lm_value *x = &g->value[v];
    if (lm_layout_check(layout, x->t.ndim, e))
        return e->code;
    if (is_split(layout) && (x->of >= 0 || has_view(g, v)))
        return lm_fail(e, LM_EBUG, x->name ? x->name : "a value", NULL,
                       "is or has a view, and cannot be split over ranks");
    x->layout = *layout;
    return LM_OK;
}

size_t lm_value_bytes(const lm_value *v, const lm_mesh *mesh)
{
    int64_t first[LM_MAX_DIMS];
    lm_tensor part;
    lm_layout_part(&v->layout, mesh, &v->t, &part, first);
    return part.codes ? lm_code_rows_bytes(part.codes, first[0], part.dim[0], part.dim[1])
                      : lm_stored_bytes(&part);
}

bool lm_graph_share(const lm_graph *g, lm_vid a, lm_vid b)
{
    /* Passes ask this for every pair of operands: without views two values share nothing. */
    if (a < 0 || b < 0 || a == b || !g->has_views)
        return a >= 0 && a == b;
    const lm_value *x = &g->value[a], *y = &g->value[b];
    if ((x->of >= 0 ? x->of : a) != (y->of >= 0 ? y->of : b))
        return false;
    return x->at < y->at + lm_tensor_count(&y->t) && y->at < x->at + lm_tensor_count(&x->t);
}

lm_call lm_node_call(const lm_graph *g, const lm_node *n, lm_tensor *in, lm_tensor *out)
{
    return lm_node_call_in_room(g, n, 0, in, out);
}

lm_dtype lm_node_act(const lm_graph *g, const lm_node *n)
{
    for (int i = 0; i < n->n_in; i++)
        if ((n->op->in[i].is & LM_ACT_TYPE) && n->in[i] >= 0)
            return g->value[n->in[i]].t.dtype;
    for (int i = 0; i < n->n_out; i++)
        if (n->out[i] >= 0 && lm_dtype_is_float(g->value[n->out[i]].t.dtype) &&
            !(n->op->out[i].is & LM_DOUBLE))
            return g->value[n->out[i]].t.dtype;
    return LM_DTYPE_F32;
}

/* Call the shape rule, then create or check the outputs of n. */
static lm_code shape_node(lm_graph *g, lm_node *n, lm_err *e)
{
    lm_tensor in[LM_MAX_IN], out[LM_MAX_OUT];
    unsigned want = 0;
    lm_call c = lm_node_call(g, n, in, out);

    for (int i = 0; i < n->n_out; i++)
        want |= (unsigned)(n->out[i] != LM_SKIP) << i;
    if (lm_op_shape(n->op, &c, want, e))
        return e->code;
    for (int i = 0; i < n->n_out; i++) {
        if (n->out[i] == LM_SKIP || lm_absent(&out[i])) {
            n->out[i] = LM_NONE;
            continue;
        }
        if (n->out[i] == LM_NONE) {
            if (lm_graph_value(g, LM_ROLE_ACT, out[i], NULL, &n->out[i], e))
                return e->code;
        } else {
            const lm_tensor *have = &g->value[n->out[i]].t;
            if (!lm_same_shape(have, &out[i]) || have->dtype != out[i].dtype)
                return lm_fail(e, LM_EBUG, n->op->name, NULL,
                               "%s has another shape or dtype than the given value",
                               n->op->out[i].name);
        }
    }
    return LM_OK;
}

lm_code lm_graph_append(lm_graph *g, const lm_op *op, const void *attr, const lm_vid *in,
                        lm_vid *out, lm_err *e)
{
    lm_node n = { .op = op,
                  .n_in = lm_op_ins(op),
                  .n_out = lm_op_outs(op),
                  .phase = g->phase,
                  .layer = g->layer,
                  .when = g->when };
    if (lm_grow(&g->node, &g->cap_nodes, g->n_nodes + 1, sizeof *g->node, "nodes of a graph", e))
        return e->code;
    if (op->attr_size) {
        if (lm_arena_alloc(g->arena, &n.attr, 1, op->attr_size, e))
            return e->code;
        memcpy(n.attr, attr, op->attr_size);
    }
    memcpy(n.in, in, (size_t)n.n_in * sizeof *in);
    memcpy(n.out, out, (size_t)n.n_out * sizeof *out);
    if (shape_node(g, &n, e))
        return e->code;
    memcpy(out, n.out, (size_t)n.n_out * sizeof *out);
    g->node[g->n_nodes++] = n;
    return LM_OK;
}

void lm_graph_cost(const lm_graph *g, lm_graph_cost_sum *sum)
{
    lm_tensor in[LM_MAX_IN], out[LM_MAX_OUT];
    memset(sum, 0, sizeof *sum);
    for (size_t k = 0; k < g->n_nodes; k++) {
        lm_cost one = { 0 };
        lm_call c = lm_node_call_in_room(g, &g->node[k], 1, in, out); /* mean numbers of rows */
        g->node[k].op->cost(&c, &one);
        lm_cost *to[2] = { &sum->phase[g->node[k].phase], &sum->all };
        for (int i = 0; i < 2; i++) {
            to[i]->flops += one.flops;
            to[i]->bytes += one.bytes;
            for (int axis = 0; axis < LM_AXES; axis++)
                to[i]->sent[axis] += one.sent[axis];
        }
    }
}
