/* SPDX-License-Identifier: Apache-2.0 */
/* merge.c -- nodes of one operator on adjacent pieces of memory become one node over the whole run:
 * one call over the block, with the same bits. */
#include <string.h>

#include "graph/passes.h"

/* Whether operand `v` of node n has an element for each of the outputs. */
static bool is_flat(const lm_graph *g, const lm_node *n, const lm_operand *o, lm_vid v)
{
    return !strcmp(o->dims, "*") || (!strcmp(o->dims, "~") && v >= 0 &&
                                     lm_same_shape(&g->value[v].t, &g->value[n->out[0]].t));
}

static bool equal_attributes(const lm_op *op, const char *a, const char *b)
{
    static const size_t bytes[] = { [LM_FIELD_INT] = sizeof(int64_t),
                                    [LM_FIELD_REAL] = sizeof(double),
                                    [LM_FIELD_FLAG] = sizeof(bool),
                                    [LM_FIELD_WORD] = sizeof(int) };
    if (!op->attr_size || !memcmp(a, b, op->attr_size))
        return true;
    for (const lm_field *f = op->fields; f && f->name; f++)
        if (f->kind == LM_FIELD_TEXT || memcmp(a + f->at, b + f->at, bytes[f->kind]))
            return false;
    return true;
}

/* Elements of padding between view a and view b behind it; -1: b does not begin where a ends. */
static int64_t padding(const lm_graph *g, lm_vid a, lm_vid b)
{
    const lm_value *x = &g->value[a], *y = &g->value[b];
    int64_t end = x->at + lm_tensor_count(&x->t);
    int64_t begin = (end + LM_BLOCK_ALIGN - 1) / LM_BLOCK_ALIGN * LM_BLOCK_ALIGN;
    if (x->of < 0 || x->of != y->of || (y->at != end && y->at != begin))
        return -1;
    return y->at - end;
}

/* Whether operand b begins where operand a ends, or both are the same value. */
static bool goes_on(const lm_graph *g, const lm_node *m, const lm_node *n, const lm_operand *o,
                    lm_vid a, lm_vid b, int64_t *gap)
{
    if (!is_flat(g, m, o, a) || !is_flat(g, n, o, b) || a < 0 || b < 0)
        return a == b && (a < 0 || o->dims[0] != '~' || lm_tensor_count(&g->value[a].t) == 1);
    int64_t here = padding(g, a, b);
    if (*gap < 0)
        *gap = here;
    return here >= 0 && here == *gap;
}

static lm_vid whole_of(const lm_graph *g, lm_vid v)
{
    return g->value[v].of >= 0 ? g->value[v].of : v;
}

/* True if an output overlaps another operand at a different offset: one call would write that
 * memory before it is read. */
static bool is_shifted(const lm_graph *g, const lm_node *n)
{
    for (int o = 0; o < n->n_out; o++)
        for (int i = 0; i < n->n_in + n->n_out; i++) {
            lm_vid out = n->out[o], v = i < n->n_in ? n->in[i] : n->out[i - n->n_in];
            if (out >= 0 && v >= 0 && whole_of(g, out) == whole_of(g, v) &&
                g->value[out].at != g->value[v].at)
                return true;
        }
    return false;
}

/* The order of panels depends on the width of their matrix: their nodes are not parts of flat runs. */
static bool has_panels(const lm_graph *g, const lm_node *n)
{
    for (int i = 0; i < n->n_out; i++)
        if (n->out[i] >= 0 && g->value[n->out[i]].t.panels)
            return true;
    return false;
}

/* True if every operand of node b begins where that of node a ends. */
static bool follows(const lm_graph *g, const lm_node *a, const lm_node *b)
{
    int64_t gap = -1;
    if (a->op != b->op || !a->op->flat || a->phase != b->phase || a->when != b->when ||
        is_shifted(g, a) || is_shifted(g, b) || has_panels(g, a) || has_panels(g, b) ||
        !equal_attributes(a->op, a->attr, b->attr))
        return false;
    for (int i = 0; i < a->n_in; i++)
        if (!goes_on(g, a, b, &a->op->in[i], a->in[i], b->in[i], &gap))
            return false;
    for (int i = 0; i < a->n_out; i++)
        if (!goes_on(g, a, b, &a->op->out[i], a->out[i], b->out[i], &gap))
            return false;
    return gap >= 0;
}

/* Extend *v to the view from its beginning to the end of `last`. */
static lm_code stretch(lm_graph *g, lm_vid *v, lm_vid last, lm_err *e)
{
    if (*v == last)
        return LM_OK;
    const lm_value *a = &g->value[*v], *b = &g->value[last];
    int64_t count = b->at + lm_tensor_count(&b->t) - a->at;
    return lm_graph_view(g, a->of, a->at, lm_shape1(a->t.dtype, count), NULL, v, e);
}

lm_code lm_pass_merge(lm_graph *g, lm_err *e)
{
    size_t left = 0;
    for (size_t k = 0, end; k < g->n_nodes; k = end) {
        lm_node n = g->node[k];
        for (end = k + 1; end < g->n_nodes && follows(g, &g->node[end - 1], &g->node[end]); end++)
            ;
        const lm_node *last = &g->node[end - 1];
        for (int i = 0; end > k + 1 && i < n.n_in; i++)
            if (stretch(g, &n.in[i], last->in[i], e))
                return e->code;
        for (int i = 0; end > k + 1 && i < n.n_out; i++)
            if (stretch(g, &n.out[i], last->out[i], e))
                return e->code;
        g->node[left++] = n;
    }
    g->n_nodes = left;
    return LM_OK;
}
