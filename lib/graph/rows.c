/* SPDX-License-Identifier: Apache-2.0 */
/* rows.c -- values of which the data tell how many rows there are.  An operator makes them (lm_op.rows); what others make of
 * them row by row, which the letters of their tables tell, has as many. */
#include <math.h>
#include <string.h>

#include "graph/graph.h"

/* Rows of a value with so much room. */
static int64_t rows_in_room(const lm_value *v, double room)
{
    const double rows = ceil(room * (double)v->mean);
    return rows >= (double)v->most ? v->most : rows < 1 ? 1 : (int64_t)rows;
}

lm_tensor lm_value_in_room(const lm_graph *g, lm_vid v, double room)
{
    lm_tensor t = g->value[v].t;
    if (room > 0 && g->value[v].rows >= 0)
        t.dim[0] = rows_in_room(&g->value[v], room);
    return t;
}

lm_call lm_node_call_in_room(const lm_graph *g, const lm_node *n, double room, lm_tensor *in,
                             lm_tensor *out)
{
    static const lm_tensor absent = { .dtype = LM_DTYPE_NONE };
    for (int i = 0; i < n->n_in; i++)
        in[i] = n->in[i] >= 0 ? lm_value_in_room(g, n->in[i], room) : absent;
    for (int i = 0; i < n->n_out; i++)
        out[i] = n->out[i] >= 0 ? lm_value_in_room(g, n->out[i], room) : absent;
    return (lm_call){ .attr = n->attr, .in = in, .n_in = n->n_in, .out = out, .n_out = n->n_out };
}

static lm_vid operand_at(const lm_node *n, int i)
{
    return i < n->n_in ? n->in[i] : n->out[i - n->n_in];
}

static const char *dims_at(const lm_node *n, int i)
{
    return i < n->n_in ? n->op->in[i].dims : n->op->out[i - n->n_in].dims;
}

/* How the rows of an operand are named: a letter, '*' of operands of any shape, 0 for what is not a letter alone. */
static char rows_letter(const char *dims)
{
    return dims[0] == '*' || dims[0] == '~' ? '*' : lm_dim_letter(dims, 0);
}

/* Whether dimension d of a table is made of more than the letter, or is not the rows. */
static bool has_elsewhere(const char *dims, char letter)
{
    const char *comma = strchr(dims, ',');
    const size_t first = comma ? (size_t)(comma - dims) : strlen(dims);
    const char *at = strchr(dims, letter);
    return at && (rows_letter(dims) != letter || strchr(dims + first, letter));
}

/* An operand whose rows are those of `of`, or can be: an activation that this node makes. */
static bool follows(const lm_graph *g, const lm_node *n, int i, lm_vid of)
{
    const lm_value *v = &g->value[operand_at(n, i)], *x = &g->value[of];
    return v->role == LM_ROLE_ACT && v->t.ndim && v->t.dim[0] == x->t.dim[0] &&
           (v->rows == x->rows || (i >= n->n_in && v->rows < 0));
}

/* An input that all rows read. */
static bool is_repeated(const lm_graph *g, const lm_node *n, int i, lm_vid of)
{
    const lm_tensor *t = &g->value[operand_at(n, i)].t;
    return i < n->n_in && dims_at(n, i)[0] == '~' && t->dim[0] == 1 &&
           (t->ndim == g->value[of].t.ndim || lm_tensor_count(t) == 1);
}

/* Whether the node reads `of`, whose rows have the letter, row by row, and makes such alone of it. */
static bool goes_by_rows(const lm_graph *g, const lm_node *n, char letter, lm_vid of)
{
    for (int i = 0; i < n->n_in + n->n_out; i++) {
        if (operand_at(n, i) < 0)
            continue;
        const char *dims = dims_at(n, i);
        if (letter != '*' && has_elsewhere(dims, letter))
            return false;
        if (rows_letter(dims) == letter && !follows(g, n, i, of) && !is_repeated(g, n, i, of))
            return false;
    }
    return letter != 0;
}

static void forget(lm_graph *g, lm_vid rows)
{
    for (size_t v = 0; v < g->n_values; v++)
        if (g->value[v].rows == rows)
            g->value[v].rows = LM_NONE;
}

/* Results of node n have as many rows as `of`. */
static void pass_on(lm_graph *g, const lm_node *n, char letter, lm_vid of)
{
    for (int o = 0; o < n->n_out; o++) {
        if (n->out[o] < 0 || rows_letter(n->op->out[o].dims) != letter)
            continue;
        lm_value *v = &g->value[n->out[o]];
        v->rows = g->value[of].rows;
        v->mean = g->value[of].mean;
        v->most = g->value[of].most;
    }
}

/* unfit: by number of rows, those that some operator reads otherwise. */
static void visit(lm_graph *g, const lm_node *n, bool *unfit)
{
    for (int i = 0; i < n->n_in; i++) {
        const lm_vid v = n->in[i];
        if (v < 0 || g->value[v].rows < 0)
            continue;
        const char letter = rows_letter(n->op->in[i].dims);
        if (goes_by_rows(g, n, letter, v))
            pass_on(g, n, letter, v);
        else
            unfit[g->value[v].rows] = true;
    }
}

/* What the operator itself says. */
static void begin(lm_graph *g, const lm_node *n)
{
    lm_tensor in[LM_MAX_IN], out[LM_MAX_OUT];
    lm_live_rows r = { 0 };
    const lm_call c = lm_node_call(g, n, in, out);
    lm_value *v = &g->value[n->out[0]];
    n->op->rows(&c, &r);
    v->rows = n->in[r.of];
    v->mean = r.mean;
    v->most = r.most;
}

lm_code lm_graph_find_rows(lm_graph *g, double room, lm_err *e)
{
    bool *unfit = NULL;
    if (lm_alloc_n(&unfit, g->n_values, sizeof *unfit, "numbers of rows", e))
        return e->code;
    for (size_t k = 0; k < g->n_nodes; k++) {
        const lm_node *n = &g->node[k];
        visit(g, n, unfit);
        if (n->op->rows)
            begin(g, n);
    }
    for (size_t v = 0; v < g->n_values; v++)
        if (unfit[v])
            forget(g, (lm_vid)v);
    lm_free(unfit);
    g->room = room;
    return LM_OK;
}
