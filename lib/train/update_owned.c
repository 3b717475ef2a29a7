/* SPDX-License-Identifier: Apache-2.0 */
/* update_owned.c -- steps of tensors of which ranks have parts, by rules that read them whole: each such tensor is one rank's,
 * its owner, which has its states.  First all parameters and gradients go to their owners, then each rank steps what it owns,
 * then the parts go back, so that ranks compute at the same time.  Bits are those of one rank, for the same gradients. */
#include <string.h>

#include "base/mem.h"
#include "kernels/comm.h"
#include "op/ops.h"
#include "train/optim/rule.h"
#include "train/update_impl.h"

static void begin(lm_update *u, const lm_update_tensor *t)
{
    lm_update_always(u);
    u->at_work = &u->use[t->use];
    u->g->layer = (int)t->layer;
}

static lm_code call_rule(lm_update *u, const lm_update_tensor *t,
                         lm_code (*rule)(lm_update *, const lm_update_tensor *, lm_err *),
                         lm_err *e)
{
    if (rule(u, t, e))
        lm_err_in(e, "%s of %s", u->at_work->optim->name, t->name);
    return e->code;
}

/* ---- a tensor as if this rank had all of it ---- */

static void make_whole(lm_update_tensor *t)
{
    t->shape.dim[t->cut->dim] = t->cut->whole;
    if (t->heads)
        t->heads = t->shape.dim[0] / t->head_dim;
    t->cut = NULL;
}

/* Append the nodes of a rule for tensor i as if it was here and whole, and its states as another rank's. */
static lm_code imagine(lm_update *u, int i,
                       lm_code (*rule)(lm_update *, const lm_update_tensor *, lm_err *), lm_err *e)
{
    const lm_update_tensor here = u->t[i];
    lm_update_tensor *t = &u->t[i];
    begin(u, t);
    make_whole(t);
    lm_tensor low = t->shape;
    low.dtype = LM_DTYPE_BF16;
    u->elsewhere = true;
    if (!lm_graph_value(u->g, LM_ROLE_CONST, t->shape, t->name, &t->param, e) &&
        !lm_graph_value(u->g, LM_ROLE_CONST, t->shape, NULL, &t->grad, e) &&
        (u->v.low < 0 ||
         !lm_graph_value(u->g, LM_ROLE_CONST, low, NULL, t->panels ? &t->packed : &t->low, e)))
        call_rule(u, t, rule, e);
    u->elsewhere = false;
    u->t[i] = here;
    return e->code;
}

lm_code update_leave(lm_update *u, int i,
                     lm_code (*rule)(lm_update *, const lm_update_tensor *, lm_err *), lm_err *e)
{
    const size_t nodes = u->g->n_nodes;
    imagine(u, i, rule, e);
    u->g->n_nodes = nodes;
    return e->code;
}

/* ---- which rules read a tensor whole ---- */

/* True if the node only has numbers that belong to no element of the tensor, which may be several matrices. */
static bool is_beside(const lm_update *u, const lm_node *n, const lm_update_tensor *t)
{
    const int64_t least = update_count(t) / lm_rule_n_pieces(t);
    bool beside = true;
    for (int i = 0; i < n->n_in + n->n_out; i++) {
        const lm_vid v = i < n->n_in ? n->in[i] : n->out[i - n->n_in];
        beside &= v < 0 || lm_tensor_count(&u->g->value[v].t) < least;
    }
    return beside;
}

/* Whether nodes from number `from` on, and the states of t, are of single elements. */
static bool is_flat(const lm_update *u, size_t from, const lm_update_tensor *t)
{
    bool flat = true;
    for (size_t k = from; k < u->g->n_nodes; k++)
        flat &= u->g->node[k].op->flat || is_beside(u, &u->g->node[k], t);
    for (size_t k = 0; k < u->n_states; k++) {
        const lm_store_state *s = &u->state[k];
        const struct lm_state_part *last = s->n_parts ? &s->part[s->n_parts - 1] : NULL;
        flat &= !last || last->tensor != t->index || lm_tensor_count(&last->shape) == 1 ||
                lm_same_shape(&last->shape, &t->shape);
    }
    return flat;
}

/* Nodes of other parts of the list would need the whole tensor there. */
static bool is_in_step(const lm_update *u, size_t from)
{
    bool in = true;
    for (size_t k = from; k < u->g->n_nodes; k++)
        in &= u->g->node[k].when == LM_UPDATE_STEP || u->g->node[k].when >= LM_UPDATE_PARTS;
    return in;
}

/* What a list had before a rule was tried. */
typedef struct {
    size_t nodes, values, states, constants;
} mark;

static mark mark_of(const lm_update *u)
{
    return (mark){ u->g->n_nodes, u->g->n_values, u->n_states, u->n_constants };
}

static void go_back(lm_update *u, const mark *m, const lm_update_tensor *t)
{
    while (u->n_states > m->states) {
        lm_free(u->state[--u->n_states].part);
        u->state[u->n_states].part = NULL;
    }
    while (u->n_constants > m->constants)
        lm_free(u->constant[--u->n_constants].number);
    update_drop_states(u, t);
    u->g->n_nodes = m->nodes;
    u->g->n_values = m->values;
}

/* Of the whole tensor: what a rule does can depend on sizes. */
static lm_code try_rule(lm_update *u, int i, bool *flat, lm_err *e)
{
    const mark m = mark_of(u);
    const lm_update_tensor *t = &u->t[i];
    lm_update_tensor whole = *t;
    if (imagine(u, i, u->use[t->use].optim->update, e))
        return e->code;
    make_whole(&whole);
    *flat = is_flat(u, m.nodes, &whole);
    if (!*flat && (u->o.zero || u->o.beside || !is_in_step(u, m.nodes)))
        return lm_fail(e, LM_EUSAGE, u->at_work->optim->name,
                       u->o.zero
                           ? "choose an optimiser of single elements (adamw, lion), or no ZeRO"
                           : "choose an optimiser of single elements (adamw, lion), or one rank "
                             "along that axis",
                       "steps %s as a whole, and each rank along %s has a part of it", t->name,
                       lm_axis_names[t->cut->axis]);
    go_back(u, &m, t);
    return LM_OK;
}

/* ---- owners ---- */

static lm_exchange_attr attr_of(const lm_cut *c, int owner)
{
    lm_exchange_attr a;
    memset(&a, 0, sizeof a);
    a.axis = (int)c->axis;
    a.ranks = c->ranks;
    a.rank = c->rank;
    a.dim = c->dim;
    a.len = c->whole;
    a.pieces = c->pieces;
    a.owner = owner;
    return a;
}

/* The rank with the least so far; the first of ranks that hold the same parts, as that writes files. */
static int choose_owner(const lm_cut *c, double *load, double elements)
{
    int least = 0;
    if (!lm_portions_shared(&c->pieces, c->ranks))
        for (int r = 1; r < c->ranks; r++)
            least = load[r] < load[least] ? r : least;
    load[least] += elements;
    return least;
}

static lm_code collect_one(lm_update *u, const lm_update_tensor *t, update_owner *o, lm_err *e)
{
    const lm_exchange_attr a = attr_of(t->cut, o->owner);
    const lm_vid none = a.rank == a.owner ? LM_NONE : LM_SKIP;
    lm_tensor whole = t->shape;
    whole.dim[a.dim] = a.len;
    o->param = o->grad = none;
    begin(u, t);
    if (none == LM_NONE &&
        (update_scratch(u, whole, &o->param, e) || update_scratch(u, whole, &o->grad, e)))
        return e->code;
    return lm_graph_append(u->g, &lm_op_collect, &a, &t->param, &o->param, e) ||
                   lm_graph_append(u->g, &lm_op_collect, &a, &t->grad, &o->grad, e)
               ? e->code
               : LM_OK;
}

/* True for a tensor that several ranks have parts of. */
static bool is_shared(const lm_update_tensor *t)
{
    return t->cut && t->cut->ranks > 1 && !t->cut->on && !update_is_elsewhere(t);
}

lm_code update_collect(lm_update *u, update_owner *own, lm_err *e)
{
    double *load[LM_AXES] = { NULL };
    for (int i = 0; !e->code && i < u->n_tensors; i++) {
        const lm_update_tensor *t = &u->t[i];
        bool flat = true;
        if (!is_shared(t) || try_rule(u, i, &flat, e) || flat)
            continue;
        double **at = &load[t->cut->axis];
        if (!*at && lm_alloc_n(at, (size_t)t->cut->ranks, sizeof **at, "owners of tensors", e))
            break;
        own[i].owned = true;
        own[i].owner = choose_owner(t->cut, *at, (double)t->whole);
    }
    for (int i = 0; !e->code && i < u->n_tensors; i++)
        if (own[i].owned)
            collect_one(u, &u->t[i], &own[i], e);
    for (int i = 0; i < LM_AXES; i++)
        lm_free(load[i]);
    return e->code;
}

lm_code update_deal(lm_update *u, const update_owner *own, lm_err *e)
{
    for (int i = 0; i < u->n_tensors; i++) {
        if (!own[i].owned)
            continue;
        const lm_update_tensor *t = &u->t[i];
        const lm_exchange_attr a = attr_of(t->cut, own[i].owner);
        lm_vid part = t->param;
        begin(u, t);
        if (lm_graph_append(u->g, &lm_op_deal, &a, &own[i].param, &part, e))
            return e->code;
    }
    return LM_OK;
}

/* ---- rules ---- */

lm_code update_owned_rule(lm_update *u, int i, const update_owner *o, lm_err *e)
{
    const lm_update_tensor here = u->t[i];
    lm_update_tensor *t = &u->t[i];
    if (here.cut->rank != o->owner)
        return update_leave(u, i, u->use[here.use].optim->update, e);
    begin(u, t);
    make_whole(t);
    t->param = o->param;
    t->grad = o->grad;
    t->low = t->packed = LM_NONE;
    t->panels = false;
    call_rule(u, t, u->at_work->optim->update, e);
    u->t[i] = here;
    return e->code;
}
