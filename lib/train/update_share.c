/* SPDX-License-Identifier: Apache-2.0 */
/* update_share.c -- ranks along dp that share the steps of an update: which has what, and the list of one of them.
 *
 * The whole list is built first.  It says which tensors can be cut: those whose nodes are of single elements.  Then the block
 * of parameters is divided into ranges of equal length, as far as their ends may lie there; contiguous ones, so that gradients
 * are distributed and parameters gathered in one call.  Nodes of other ranks' tensors are removed, and operands of a part of a
 * tensor become views of its rows. */
#include <string.h>

#include "base/mem.h"
#include "op/ops.h"
#include "train/update_impl.h"

lm_code update_note(lm_update *u, int i, lm_err *e)
{
    if (!u->o.zero)
        return LM_OK;
    if (lm_grow(&u->of_node, &u->cap_of, u->g->n_nodes, sizeof *u->of_node, "nodes", e))
        return e->code;
    while (u->n_of < u->g->n_nodes)
        u->of_node[u->n_of++] = i;
    return LM_OK;
}

void update_share_fini(lm_update *u)
{
    lm_free(u->of_node);
    lm_free(u->bound);
    lm_free(u->own);
}

/* Elements of a row; of a tensor that another rank has there may be no rows. */
static int64_t width_of(const lm_update_tensor *t)
{
    int64_t n = 1;
    for (int i = 1; i < t->shape.ndim; i++)
        n *= t->shape.dim[i];
    return n;
}

/* ---- which tensors can be cut ---- */

static lm_vid operand(const lm_node *n, int i)
{
    return i < n->n_in ? n->in[i] : n->out[i - n->n_in];
}

/* True if each operand has the tensor's shape, or is one number. */
static bool is_of_elements(const lm_update *u, const lm_node *n, const lm_update_tensor *t)
{
    bool fits = n->op->flat || n->op == &lm_op_panels, numbers = true;
    for (int i = 0; i < n->n_in + n->n_out; i++) {
        const lm_vid v = operand(n, i);
        const lm_tensor *x = v < 0 ? NULL : &u->g->value[v].t;
        const bool number = !x || lm_tensor_count(x) == 1 || u->g->value[v].role == LM_ROLE_INPUT;
        fits &= number || lm_same_shape(x, &t->shape);
        numbers &= number;
    }
    return fits || numbers;
}

static bool has_other_state(const lm_update *u, const lm_update_tensor *t)
{
    for (size_t k = 0; k < u->n_states; k++)
        for (int i = 0; i < u->state[k].n_parts; i++)
            if (u->state[k].part[i].tensor == t->index &&
                !lm_same_shape(&u->state[k].part[i].shape, &t->shape))
                return true;
    return false;
}

static void find_cuts(const lm_update *u, bool *can)
{
    for (int i = 0; i < u->n_tensors; i++)
        can[i] = u->t[i].unit > 0 && update_count(&u->t[i]) > 1 && !has_other_state(u, &u->t[i]);
    for (size_t k = 0; k < u->g->n_nodes; k++) {
        const int i = u->of_node[k];
        if (i >= 0)
            can[i] &= is_of_elements(u, &u->g->node[k], &u->t[i]);
    }
}

/* ---- dealing ---- */

static int64_t nearest(int64_t a, int64_t b, int64_t to)
{
    return (to > a ? to - a : a - to) <= (to > b ? to - b : b - to) ? a : b;
}

/* The end of a range near element `at`. */
static int64_t end_near(const lm_update *u, const bool *can, int64_t at)
{
    int i = u->n_tensors;
    while (i > 0 && u->t[i - 1].offset > at)
        i--;
    if (i == 0)
        return u->n_tensors ? nearest(0, u->t[0].offset, at) : 0;
    const lm_update_tensor *t = &u->t[i - 1];
    const int64_t next = i < u->n_tensors ? u->t[i].offset : u->o.trained,
                  step = t->unit * width_of(t), count = update_count(t);
    int64_t end = nearest(t->offset, next, at);
    for (int64_t k = can[i - 1] ? (at - t->offset) / step : 0, n = k + 1; k > 0 && k <= n; k++)
        if (k * step < count)
            end = nearest(end, t->offset + k * step, at);
    return end;
}

static lm_code deal(lm_update *u, lm_err *e)
{
    const int ranks = u->o.mesh->size[LM_AXIS_DP];
    bool *can = NULL;
    if (lm_alloc_n(&u->bound, (size_t)ranks + 1, sizeof *u->bound, "ranges of ranks", e) ||
        lm_alloc_n(&can, (size_t)u->n_tensors + 1, sizeof *can, "a list of tensors", e))
        return e->code;
    find_cuts(u, can);
    for (int r = 1; r <= ranks; r++) {
        const int64_t end = r < ranks ? end_near(u, can, u->o.trained / ranks * r) : u->o.trained;
        u->bound[r] = end > u->bound[r - 1] ? end : u->bound[r - 1];
    }
    lm_free(can);
    return LM_OK;
}

static void own_of(const lm_update *u, const lm_update_tensor *t, lm_store_own *out)
{
    const int rank = u->o.mesh->rank[LM_AXIS_DP];
    const int64_t width = width_of(t), end = t->offset + update_count(t),
                  from = u->bound[rank] > t->offset ? u->bound[rank] : t->offset,
                  to = u->bound[rank + 1] < end ? u->bound[rank + 1] : end;
    *out = (lm_store_own){ 0 };
    if (from < to)
        *out = (lm_store_own){ (from - t->offset) / width, (to - from) / width };
}

static lm_code find_own(lm_update *u, lm_err *e)
{
    int most = 0;
    for (int i = 0; i < u->n_tensors; i++)
        most = u->t[i].index > most ? u->t[i].index : most;
    if (lm_alloc_n(&u->own, (size_t)most + 1, sizeof *u->own, "ranges of ranks", e))
        return e->code;
    for (int i = 0; i < u->n_tensors; i++)
        own_of(u, &u->t[i], &u->own[u->t[i].index]);
    return LM_OK;
}

void update_own_range(const lm_update *u, int i, int64_t *from, int64_t *end)
{
    const lm_update_tensor *t = &u->t[i];
    const lm_store_own all = { 0, t->shape.dim[0] }, *own = u->own ? &u->own[t->index] : &all;
    *from = own->row * width_of(t);
    *end = *from + own->rows * width_of(t);
}

/* ---- the list of one rank ---- */

/* *v, of tensor t, becomes the rows of this rank; `made`: by value, what has been made of it. */
static lm_code narrow(lm_update *u, const lm_update_tensor *t, lm_vid *made, lm_vid *v, lm_err *e)
{
    const lm_store_own *own = &u->own[t->index];
    if (*v < 0 || !lm_same_shape(&u->g->value[*v].t, &t->shape))
        return LM_OK;
    if (made[*v] < 0) {
        const lm_value x = u->g->value[*v];
        lm_tensor shape = x.t;
        shape.dim[0] = own->rows;
        if (x.of >= 0 ? lm_graph_view(u->g, x.of, x.at + own->row * width_of(t), shape, x.name,
                                      &made[*v], e)
                      : lm_graph_value(u->g, x.role, shape, x.name, &made[*v], e))
            return e->code;
        u->g->value[made[*v]].t.panels = x.t.panels;
    }
    *v = made[*v];
    return LM_OK;
}

static lm_code keep_own(lm_update *u, lm_vid *made, lm_err *e)
{
    size_t left = 0;
    for (size_t k = 0; k < u->g->n_nodes; k++) {
        lm_node n = u->g->node[k];
        const lm_update_tensor *t = u->of_node[k] < 0 ? NULL : &u->t[u->of_node[k]];
        const lm_store_own *own = t ? &u->own[t->index] : NULL;
        if (own && !own->rows)
            continue;
        for (int i = 0; own && own->rows < t->shape.dim[0] && i < n.n_in + n.n_out; i++)
            if (narrow(u, t, made, i < n.n_in ? &n.in[i] : &n.out[i - n.n_in], e))
                return e->code;
        u->g->node[left++] = n;
    }
    u->g->n_nodes = left;
    return LM_OK;
}

lm_code update_share(lm_update *u, lm_err *e)
{
    lm_vid *made = NULL;
    const size_t n = u->g->n_values;
    if (!u->o.zero)
        return LM_OK;
    if (deal(u, e) || find_own(u, e) || lm_alloc_n(&made, n, sizeof *made, "values", e))
        return e->code;
    for (size_t v = 0; v < n; v++)
        made[v] = LM_NONE;
    lm_code rc = keep_own(u, made, e);
    lm_free(made);
    return rc;
}

/* ---- for the program that runs it ---- */

const int64_t *lm_update_bounds(const lm_update *u)
{
    return u->bound;
}

const lm_store_own *lm_update_own(const lm_update *u)
{
    return u->own;
}

int64_t lm_update_first_sample(const lm_update *u, int r)
{
    const int64_t stride = u->o.sample_stride, first = (u->bound[r] + stride - 1) / stride;
    return r < u->o.mesh->size[LM_AXIS_DP] && first < u->o.samples ? first : u->o.samples;
}
