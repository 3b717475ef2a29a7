/* SPDX-License-Identifier: Apache-2.0 */
/* shard.c -- the sharding pass: choices node by node, in the order of the list. */
#include "graph/shard.h"

#include <math.h>
#include <string.h>

#include "kernels/arrange.h"
#include "numeric/code_rows.h"

/* The parts of the list between which gathered copies are not kept. */
typedef enum { SIDE_FORWARD, SIDE_BACKWARD, SIDE_UPDATE, SIDE_ALL } side;

/* A value of the list of this rank that holds a value of g in some placement. */
typedef struct {
    lm_vid local;
    lm_placement at;
    side side;
    lm_phase phase; /* of the exchange that makes it, */
    int when;       /* and its condition */
    int64_t next;   /* of the same value; -1: the last */
} version;

typedef struct {
    lm_graph *g, *to;
    lm_axis axis;
    bool splits; /* matrices, along tp */
    const lm_mesh *mesh;
    int ranks;
    lm_vid *place;    /* by value of g: its own version */
    bool *written;    /* by value of g: a node wrote it */
    int64_t *version; /* by value of g: its copies; -1: none */
    lm_phase *made;   /* by value of g: where */
    version *all;
    size_t n_all, cap_all;
    lm_err *e;
} sharder;

static lm_placement *placement(const sharder *s, lm_vid v)
{
    return &s->g->value[v].layout.axis[s->axis];
}

static side side_of(lm_phase p)
{
    return p == LM_PHASE_FORWARD  ? SIDE_FORWARD
           : p == LM_PHASE_UPDATE ? SIDE_UPDATE
                                  : SIDE_BACKWARD;
}

static lm_code refuse(const sharder *s, lm_vid v, const char *what)
{
    const char *name = s->g->value[v].name;
    return lm_fail(s->e, LM_EUSAGE, name ? name : "a value", NULL, "%s along %s", what,
                   lm_axis_names[s->axis]);
}

/* ---- pieces of packed weights ---- */

/* The pieces in which readers can split a dimension of a value. */
typedef struct {
    int dim;
    lm_portions pieces;
    int64_t next; /* of the same value; -1: the last */
} wanted;

typedef struct {
    const sharder *s;
    int64_t *first; /* by value; -1: its readers split each dimension in any way */
    wanted *all;
    size_t n, cap;
} wishes;

static wanted *find_wanted(const wishes *w, lm_vid v, int d)
{
    int64_t k = w->first[v];
    while (k >= 0 && w->all[k].dim != d)
        k = w->all[k].next;
    return k >= 0 ? &w->all[k] : NULL;
}

static lm_code add_wanted(wishes *w, lm_vid v, int d, const lm_portions *pieces)
{
    wanted x = { d, *pieces, w->first[v] }, *old = find_wanted(w, v, d);
    if (old) {
        old->pieces = x.pieces;
        return LM_OK;
    }
    if (lm_grow(&w->all, &w->cap, w->n + 1, sizeof *w->all, "the sharding pass", w->s->e))
        return w->s->e->code;
    w->first[v] = (int64_t)w->n;
    w->all[w->n++] = x;
    return LM_OK;
}

/* True for a form whose result is split in columns, as an operand is that has as many rows: a matrix that makes them. */
static bool splits_columns(const lm_node *n, const lm_split_form *f)
{
    return n->n_out == 1 && f->code[n->n_in] == '1' && strchr(f->code, '0');
}

/* Those of operand i of a form: a dimension that is more than a letter has pieces, another one those that readers of the
 * outputs want where these are split with it; NULL: any. */
static const lm_portions *pieces_of_form(const wishes *w, const lm_node *n, const lm_split_form *f,
                                         int i)
{
    const char *dims = n->op->in[i].dims;
    if (f->code && f->code[i] == 'e')
        return &f->in[i].pieces;
    if (f->code && !splits_columns(n, f))
        return NULL;
    if (!f->code && dims[0] != '*' && dims[0] != '~' && !lm_dim_letter(dims, f->in[i].at))
        return &f->in[i].pieces;
    for (int o = 0; o < n->n_out; o++) {
        const wanted *x = n->out[o] >= 0 && f->out[o].share == LM_SPLIT
                              ? find_wanted(w, n->out[o], f->out[o].at)
                              : NULL;
        if (x)
            return &x->pieces;
    }
    return NULL;
}

/* What the first reader wants counts, and of its forms the first: both are visited last. */
static lm_code find_pieces(wishes *w)
{
    const lm_graph *g = w->s->g;
    lm_split_form form[LM_SPLIT_FORMS];
    for (size_t k = g->n_nodes; k-- > 0;) {
        const lm_node *n = &g->node[k];
        for (int f = lm_split_forms(g, n, w->s->ranks, NULL, form) - 1; f > 0; f--)
            for (int i = n->n_in - 1; i >= 0; i--) {
                const lm_portions *x = n->in[i] >= 0 && form[f].in[i].share == LM_SPLIT
                                           ? pieces_of_form(w, n, &form[f], i)
                                           : NULL;
                lm_portions pieces;
                if (!x)
                    continue;
                pieces = *x; /* the list may move */
                if (add_wanted(w, n->in[i], form[f].in[i].at, &pieces))
                    return w->s->e->code;
            }
    }
    return LM_OK;
}

/* Gradients are split as their parameters. */
static void complete_gradients(const sharder *s)
{
    for (size_t v = 0; v < s->g->n_values; v++) {
        const lm_value *x = &s->g->value[v];
        lm_placement *p = placement(s, (lm_vid)v);
        if (x->role == LM_ROLE_GRAD && x->grad_of >= 0 && p->share == LM_SPLIT)
            *p = *placement(s, x->grad_of);
    }
}

/* Weights that are split without pieces get those of their readers. */
static lm_code complete_pieces(sharder *s)
{
    wishes w = { .s = s };
    if (s->axis == LM_AXIS_DP) /* any run of rows */
        return LM_OK;
    if (lm_alloc_n(&w.first, s->g->n_values, sizeof *w.first, "the sharding pass", s->e))
        return s->e->code;
    for (size_t v = 0; v < s->g->n_values; v++)
        w.first[v] = -1;
    find_pieces(&w);
    for (size_t v = 0; v < s->g->n_values && !s->e->code; v++) {
        const lm_value *x = &s->g->value[v];
        lm_placement *p = placement(s, (lm_vid)v);
        const wanted *pieces =
            p->share == LM_SPLIT && !p->pieces.n ? find_wanted(&w, (lm_vid)v, p->at) : NULL;
        if (pieces && (x->role == LM_ROLE_PARAM || x->role == LM_ROLE_DERIVED))
            p->pieces = pieces->pieces;
    }
    lm_free(w.first);
    lm_free(w.all);
    return s->e->code;
}

/* ---- the values that are there before the list ---- */

static lm_code check_placement(const sharder *s, lm_vid v)
{
    const lm_value *x = &s->g->value[v];
    const lm_placement *p = placement(s, v);
    if (x->of >= 0)
        return refuse(s, v, "is a view of another value, which is not divided");
    if (p->share == LM_ON)
        return refuse(s, v, "is on one rank alone");
    if (p->share != LM_SPLIT)
        return LM_OK;
    if (p->at >= x->t.ndim || !lm_portions_fit(&p->pieces, x->t.dim[p->at]))
        return refuse(s, v, "has other pieces than its layout");
    if (!lm_portions_serve(&p->pieces, x->t.dim[p->at], s->ranks, false, true))
        return refuse(s, v, "has fewer units than there are ranks");
    if (x->t.codes || x->t.panels || (x->t.kv && p->at != 1))
        return refuse(s, v, "has codes or panels, which are not divided");
    return LM_OK;
}

static bool is_made(const sharder *s, lm_vid v)
{
    return s->g->value[v].role == LM_ROLE_ACT;
}

/* Other axes of a value of this rank's list are those of the whole value. */
static void set_layout(sharder *s, lm_vid local, lm_vid v)
{
    lm_layout *l = &s->to->value[local].layout;
    *l = s->g->value[v].layout;
    l->axis[s->axis] = (lm_placement){ .share = LM_REPLICATED };
}

/* The value of this rank for value v, in the placement that v has. */
static lm_code make_place(sharder *s, lm_vid v)
{
    const lm_value x = s->g->value[v];
    lm_tensor part = lm_placement_part(&x.layout.axis[s->axis], s->axis, s->mesh, &x.t);
    s->to->space = x.space;
    if (lm_graph_value(s->to, x.role, part, x.name, &s->place[v], s->e))
        return s->e->code;
    lm_value *mine = &s->to->value[s->place[v]];
    set_layout(s, s->place[v], v);
    mine->grad_of = x.grad_of >= 0 ? s->place[x.grad_of] : LM_NONE;
    return LM_OK;
}

/* ---- costs ---- */

/* Bytes that each rank sends, and a little for what is only copied. */
static double exchange_cost(const sharder *s, lm_vid v, const lm_placement *from,
                            const lm_placement *to)
{
    const lm_tensor *t = &s->g->value[v].t;
    const lm_op *op = lm_exchange_of(from, to, t, s->ranks);
    double bytes = (double)lm_stored_bytes(t), n = s->ranks, share = (n - 1) / n;
    lm_role role = s->g->value[v].role;
    if (lm_placement_same(from, to, t, s->ranks))
        return 0;
    if (!op || t->codes || t->panels || t->kv)
        return INFINITY;
    /* A part of an activation is gathered later, and so is one of a sum: whether rows are split between layers depends on what
     * is in front of them, not on the first node that could split them. */
    if (op == &lm_op_part)
        return role == LM_ROLE_ACT ? share * bytes : 1e-3 * bytes;
    if (op == &lm_op_reduce_scatter)
        return 2 * share * bytes;
    /* What is added is not summed up later: no reason to make it an addend. */
    if (op == &lm_op_once)
        return 2 * share * bytes;
    /* Weights are gathered along dp alone, activations along all other axes. */
    bool weight = role == LM_ROLE_PARAM || role == LM_ROLE_DERIVED;
    if (role != LM_ROLE_GRAD && weight != (s->axis == LM_AXIS_DP))
        share *= 1e3;
    bool summed = op == &lm_op_all_reduce || op == &lm_op_sum_shared || from->sum;
    return summed ? 2 * share * bytes : op == &lm_op_all_to_all ? share / n * bytes : share * bytes;
}

/* Whether node n can read a copy.  Not one that is not always made; schedules may run the half of the weights after all input
 * halves. */
static bool serves(const version *x, const lm_node *n)
{
    bool late = x->phase == LM_PHASE_BACKWARD_WEIGHT && n->phase == LM_PHASE_BACKWARD_INPUT;
    bool there = x->when == 0 || x->when == n->when;
    return there && !late && (x->side == side_of(n->phase) || x->side == SIDE_ALL);
}

/* The cheapest version of v from which `want` can be made for node n; NULL: that of the value itself. */
static const version *best_version(const sharder *s, const lm_node *n, lm_vid v,
                                   const lm_placement *want, double *cost)
{
    const version *best = NULL;
    *cost = exchange_cost(s, v, placement(s, v), want);
    for (int64_t k = s->version[v]; k >= 0; k = s->all[k].next) {
        const version *x = &s->all[k];
        double one = exchange_cost(s, v, &x->at, want);
        if (serves(x, n) && one < *cost) {
            *cost = one;
            best = x;
        }
    }
    return best;
}

/* True if an operand in this form is left out on all ranks but one, and needs no copy. */
static bool is_left_out(const lm_node *n, int i, const lm_placement *want)
{
    unsigned both = LM_ADDEND | LM_OPTIONAL;
    return want->share == LM_PARTIAL && (n->op->in[i].is & both) == both;
}

/* Whether v can be written in the placement `at`.  A gradient that no node has written is an addend, in whole or in what
 * several ranks hold, if its first node makes it so. */
static bool takes(const sharder *s, lm_vid v, const lm_placement *at)
{
    lm_placement have = *placement(s, v);
    bool open = s->g->value[v].role == LM_ROLE_GRAD && !s->written[v];
    if (open && have.share == LM_REPLICATED)
        return at->share != LM_SPLIT;
    have.sum = open ? at->sum : have.sum;
    return lm_placement_same(at, &have, &s->g->value[v].t, s->ranks);
}

/* An activation whose layout was given is made in it; until then it has no version. */
static bool is_wished(const sharder *s, lm_vid v)
{
    return is_made(s, v) && s->place[v] < 0 && placement(s, v)->share != LM_REPLICATED;
}

/* How output i is added to what is there: a field of the attributes, by outputs if there are several; NULL: it is not. */
static const lm_field *acc_field(const lm_op *op, int i)
{
    const lm_field *last = NULL;
    for (const lm_field *f = op->fields; f && f->name; f++)
        if (f->word == lm_acc_words) {
            last = f;
            if (i-- == 0)
                break;
        }
    return last;
}

/* Whether output i, a gradient, can be made as a value of its own, and be brought to the placement of the gradient. */
static bool can_detour(const sharder *s, const lm_node *n, int i, const lm_placement *at)
{
    lm_vid v = n->out[i];
    return s->g->value[v].role == LM_ROLE_GRAD && acc_field(n->op, i) &&
           exchange_cost(s, v, at, placement(s, v)) < INFINITY;
}

/* Rows that are split stay so where no weights are: an addend of all rows would have to be summed up. */
static double addend_cost(const sharder *s, lm_vid v)
{
    const double n = s->ranks;
    return 2 * (n - 1) / n * (double)lm_stored_bytes(&s->g->value[v].t);
}

static double form_cost(const sharder *s, const lm_node *n, const lm_split_form *f)
{
    double sum = 0, one;
    for (int i = 0; i < n->n_in; i++) {
        if (n->in[i] < 0)
            continue;
        lm_placement want = f->in[i];
        if (is_left_out(n, i, &want) && placement(s, n->in[i])->share == LM_REPLICATED)
            continue;
        best_version(s, n, n->in[i], &want, &one);
        sum += one;
    }
    for (int i = 0; i < n->n_out; i++) {
        if (n->out[i] >= 0 && is_made(s, n->out[i]) && f->out[i].share == LM_PARTIAL && !s->splits)
            sum += addend_cost(s, n->out[i]);
        if (n->out[i] >= 0 && is_wished(s, n->out[i]))
            sum += exchange_cost(s, n->out[i], &f->out[i], placement(s, n->out[i]));
        if (n->out[i] < 0 || is_made(s, n->out[i]))
            continue;
        if (takes(s, n->out[i], &f->out[i]))
            continue;
        if (!can_detour(s, n, i, &f->out[i]))
            return INFINITY;
        sum += exchange_cost(s, n->out[i], &f->out[i], placement(s, n->out[i]));
    }
    return sum;
}

/* Whether all ranks have as much. */
static bool is_even(const sharder *s, const lm_node *n, const lm_split_form *f)
{
    bool even = true;
    for (int i = 0; i < n->n_in + n->n_out; i++) {
        const lm_vid v = i < n->n_in ? n->in[i] : n->out[i - n->n_in];
        const lm_placement *p = i < n->n_in ? &f->in[i] : &f->out[i - n->n_in];
        even &= v < 0 || p->share != LM_SPLIT ||
                lm_portions_serve(&p->pieces, s->g->value[v].t.dim[p->at], s->ranks, true, true);
    }
    return even;
}

static bool is_own(const lm_split_form *f)
{
    return f->code && strchr(f->code, 'o');
}

/* Rows go to the ranks of their experts by one plan of all tokens. */
static bool has_dispatch(const sharder *s)
{
    return lm_mesh_along(s->mesh, LM_AXIS_EP) > 1;
}

/* A form in which blocks travel around a ring, which this mesh does not have. */
static bool is_of_ring(const sharder *s, const lm_node *n, const lm_split_form *f)
{
    const bool has = s->axis == LM_AXIS_CP && s->mesh->context != LM_CONTEXT_HEADS;
    return n->op->around && !has && f->letters == 1U << (n->op->around - 'A');
}

static bool is_of_experts(const lm_split_form *f)
{
    return f->code && strpbrk(f->code, "se") && !is_own(f);
}

static const lm_split_form *choose(sharder *s, const lm_node *n, lm_split_form form[LM_SPLIT_FORMS])
{
    lm_placement have[LM_MAX_IN + LM_MAX_OUT] = { 0 };
    for (int i = 0; i < n->n_in + n->n_out; i++) {
        lm_vid v = i < n->n_in ? n->in[i] : n->out[i - n->n_in];
        if (v >= 0 && (i < n->n_in || !is_made(s, v) || is_wished(s, v)))
            have[i] = *placement(s, v);
    }
    int n_forms = lm_split_forms(s->g, n, s->ranks, have, form);
    const lm_split_form *best = NULL;
    double least = INFINITY;
    bool sorts = false; /* experts are split, and rows go to them */
    for (int f = 0; f < n_forms; f++)
        sorts |= s->axis == LM_AXIS_EP && is_of_experts(&form[f]);
    for (int f = 0; f < n_forms; f++) {
        if (is_of_experts(&form[f]) != sorts || (is_own(&form[f]) && has_dispatch(s)) ||
            is_of_ring(s, n, &form[f]) || (s->axis == LM_AXIS_CP && !is_even(s, n, &form[f])))
            continue;
        double cost = form_cost(s, n, &form[f]);
        if (cost < least) {
            least = cost;
            best = &form[f];
        }
    }
    return best;
}

/* ---- nodes ---- */

/* A sum that is first needed in the backward belongs to its input half, which comes first in every schedule. */
static lm_phase exchange_phase(const sharder *s, lm_vid v, const lm_node *reader)
{
    return s->made[v] == LM_PHASE_BACKWARD_INPUT ? LM_PHASE_BACKWARD_INPUT : reader->phase;
}

/* *out: v in the placement `want`, from a copy or by an exchange. */
static lm_code fetch(sharder *s, const lm_node *n, lm_vid v, const lm_placement *want, lm_vid *out)
{
    double cost;
    const version *from = best_version(s, n, v, want, &cost);
    const lm_placement *at = from ? &from->at : placement(s, v);
    const lm_tensor whole = s->g->value[v].t;
    *out = from ? from->local : s->place[v];
    if (cost == 0)
        return LM_OK;
    /* sums are what the value is; in other parts of it, ranks have no more than they had */
    bool sum = at->share == LM_PARTIAL || at->sum,
         parts = at->share == LM_SPLIT && want->share == LM_SPLIT;
    lm_phase phase = exchange_phase(s, v, n);
    version made = { .at = *want,
                     .side = sum || parts ? SIDE_ALL : side_of(phase),
                     .phase = phase,
                     .when = n->when,
                     .next = s->version[v] };
    s->to->phase = phase;
    lm_vid source = *out;
    if (lm_exchange_append(s->to, s->axis, s->mesh, source, &whole, at, want, &made.local, s->e) ||
        lm_grow(&s->all, &s->cap_all, s->n_all + 1, sizeof *s->all, "the sharding pass", s->e))
        return s->e->code;
    *out = made.local; /* along other axes it follows v, whose layout is no wish for a copy */
    s->version[v] = (int64_t)s->n_all;
    s->all[s->n_all++] = made;
    return LM_OK;
}

/* A node has written v in the placement `at`. */
static lm_code set_place(sharder *s, lm_vid v, const lm_placement *at, lm_vid local, lm_phase phase)
{
    const lm_placement wish = *placement(s, v);
    const lm_tensor whole = s->g->value[v].t;
    bool moves = is_wished(s, v) && !lm_placement_same(at, &wish, &whole, s->ranks);
    if (moves &&
        lm_exchange_append(s->to, s->axis, s->mesh, local, &whole, at, &wish, &local, s->e))
        return s->e->code;
    *placement(s, v) = moves ? wish : *at;
    set_layout(s, local, v);
    s->place[v] = local;
    s->written[v] = true;
    s->made[v] = phase;
    s->version[v] = -1; /* copies of what it was */
    return LM_OK;
}

/* ---- gradients in another placement than their node makes them ---- */

static bool is_gradient(const sharder *s, lm_vid v)
{
    return v >= 0 && s->g->value[v].role == LM_ROLE_GRAD;
}

/* Change a copy of node n so that it makes its gradients as values of their own; *n is not changed where they fit. */
static lm_code detour(sharder *s, lm_node *n, const lm_split_form *f, bool *made)
{
    char *attr = NULL;
    *made = false;
    for (int i = 0; i < n->n_out; i++)
        *made |= is_gradient(s, n->out[i]) && !takes(s, n->out[i], &f->out[i]);
    if (!*made)
        return LM_OK;
    if (lm_arena_alloc(s->to->arena, &attr, 1, n->op->attr_size, s->e))
        return s->e->code;
    memcpy(attr, n->attr, n->op->attr_size);
    for (const lm_field *field = n->op->fields; field->name; field++)
        if (field->word == lm_acc_words)
            *(lm_acc *)(void *)(attr + field->at) = LM_ACC_FRESH;
    n->attr = attr;
    return LM_OK;
}

/* Add d, which node n made as its output i in the placement `at`, to its gradient. */
static lm_code add_gradient(sharder *s, const lm_node *n, int i, const lm_placement *at, lm_vid d)
{
    lm_vid v = n->out[i];
    const lm_tensor whole = s->g->value[v].t;
    const lm_accumulate_attr attr = { *(const lm_acc *)(const void *)((const char *)n->attr +
                                                                      acc_field(n->op, i)->at) };
    bool fits = takes(s, v, at);
    if (!fits &&
        lm_exchange_append(s->to, s->axis, s->mesh, d, &whole, at, placement(s, v), &d, s->e))
        return s->e->code;
    if (fits)
        *placement(s, v) = *at;
    s->written[v] = true;
    s->made[v] = n->phase;
    s->version[v] = -1;
    return lm_graph_append(s->to, &lm_op_accumulate, &attr, &d, &s->place[v], s->e);
}

static lm_code shard_node(sharder *s, const lm_node *n)
{
    lm_split_form form[LM_SPLIT_FORMS];
    lm_vid in[LM_MAX_IN], out[LM_MAX_OUT];
    const lm_split_form *f = choose(s, n, form);
    s->to->layer = n->layer;
    s->to->when = n->when;
    if (!f) {
        refuse(s, n->out[0] >= 0 ? n->out[0] : n->in[0],
               "would be written in another layout than it has");
        lm_err_in(s->e, "%s", n->op->name);
        return s->e->code;
    }
    for (int i = 0; i < n->n_in; i++) {
        in[i] = LM_NONE;
        if (n->in[i] < 0)
            continue;
        if (is_left_out(n, i, &f->in[i]) && placement(s, n->in[i])->share == LM_REPLICATED)
            in[i] = s->mesh->rank[s->axis] ? LM_NONE : s->place[n->in[i]];
        else if (fetch(s, n, n->in[i], &f->in[i], &in[i]))
            return s->e->code;
    }
    lm_node copy = *n;
    bool apart;
    if (detour(s, &copy, f, &apart))
        return s->e->code;
    for (int i = 0; i < n->n_out; i++)
        out[i] =
            n->out[i] < 0 || (apart && is_gradient(s, n->out[i])) ? LM_NONE : s->place[n->out[i]];
    s->to->phase = n->phase;
    if (lm_split_form_append(s->g, &copy, f, s->axis, s->mesh, s->to, in, out, s->e))
        return s->e->code;
    for (int i = 0; i < n->n_out; i++) {
        if (n->out[i] < 0)
            continue;
        if (apart && is_gradient(s, n->out[i])
                ? add_gradient(s, n, i, &f->out[i], out[i])
                : set_place(s, n->out[i], &f->out[i], out[i], n->phase))
            return s->e->code;
    }
    return LM_OK;
}

static lm_code shard_all(sharder *s)
{
    lm_graph *g = s->g;
    if (complete_pieces(s))
        return s->e->code;
    complete_gradients(s);
    for (size_t v = 0; v < g->n_values; v++) {
        s->place[v] = LM_NONE;
        s->version[v] = -1;
        s->made[v] = LM_PHASE_FORWARD;
        if (check_placement(s, (lm_vid)v))
            return s->e->code;
    }
    for (size_t v = 0; v < g->n_values; v++)
        if (!is_made(s, (lm_vid)v) && make_place(s, (lm_vid)v))
            return s->e->code;
    s->to->space = g->space;
    for (size_t k = 0; k < g->n_nodes; k++)
        if (shard_node(s, &g->node[k]))
            return s->e->code;
    s->to->phase = g->phase;
    s->to->layer = g->layer;
    s->to->when = g->when;
    return LM_OK;
}

lm_code lm_shard_complete(lm_graph *g, lm_axis axis, const lm_mesh *mesh, lm_err *e)
{
    sharder s = { .g = g, .axis = axis, .mesh = mesh, .ranks = mesh->size[axis], .e = e };
    return complete_pieces(&s);
}

lm_code lm_pass_shard(lm_graph *g, lm_axis axis, const lm_mesh *mesh, lm_graph **out, lm_vid *place,
                      lm_err *e)
{
    sharder s = {
        .g = g, .axis = axis, .mesh = mesh, .ranks = mesh->size[axis], .place = place, .e = e
    };
    s.splits = axis != LM_AXIS_EP && axis != LM_AXIS_CP;
    const char *why = "the sharding pass";
    *out = NULL;
    if (lm_graph_new(&s.to, e) || lm_alloc_n(&s.written, g->n_values, sizeof *s.written, why, e) ||
        lm_alloc_n(&s.version, g->n_values, sizeof *s.version, why, e) ||
        lm_alloc_n(&s.made, g->n_values, sizeof *s.made, why, e) || shard_all(&s)) {
        lm_graph_free(s.to);
        s.to = NULL;
    }
    lm_free(s.written);
    lm_free(s.version);
    lm_free(s.made);
    lm_free(s.all);
    *out = s.to;
    return e->code;
}

/* The layer of the node that makes v. */
static int layer_of(const lm_graph *g, lm_vid v)
{
    int layer = g->layer;
    for (size_t k = 0; k < g->n_nodes; k++)
        for (int i = 0; i < g->node[k].n_out; i++)
            layer = g->node[k].out[i] == v ? g->node[k].layer : layer;
    return layer;
}

lm_code lm_shard_whole(const lm_graph *g, lm_axis axis, const lm_mesh *mesh, lm_graph *local,
                       lm_vid *place, lm_vid v, lm_err *e)
{
    static const lm_placement replicated;
    if (v < 0 || g->value[v].layout.axis[axis].share == LM_REPLICATED)
        return LM_OK;
    local->phase = LM_PHASE_FORWARD;
    local->layer = layer_of(local, place[v]);
    return lm_exchange_append(local, axis, mesh, place[v], &g->value[v].t,
                              &g->value[v].layout.axis[axis], &replicated, &place[v], e);
}
