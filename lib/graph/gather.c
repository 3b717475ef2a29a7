/* SPDX-License-Identifier: Apache-2.0 */
/* gather.c -- see gather.h. */
#include "graph/gather.h"

#include <string.h>

#include "kernels/comm.h"

/* The copy of a parameter that a group reads. */
typedef struct {
    lm_vid param, sent, whole; /* the result of gather_begin, and of gather_end */
    size_t first;              /* its first reader */
    size_t group;
} copy;

typedef struct {
    size_t first; /* its first reader of any parameter */
    size_t run;   /* number of the run of the list that it stands in */
} group;

typedef struct {
    lm_graph *g;
    const lm_gather_opts *o;
    lm_node *node; /* the list on entry */
    size_t n_nodes, n_values;
    int64_t **part; /* by value: the graph's own sizes */
    group *group;
    size_t n_groups, cap_groups;
    copy *copy; /* in the order in which they are read */
    size_t n_copies, cap_copies;
    size_t *last_copy; /* by value: 1 + number of its newest copy */
    size_t *
        moved; /* by node on entry, and behind the last one: where it, and what stands in front of it, is now */
} pass;

static bool is_border(const pass *p, size_t k)
{
    for (size_t i = 0; i < p->o->n_borders; i++)
        if (*p->o->border[i] == k)
            return true;
    return false;
}

static bool is_shared(const pass *p, lm_vid v)
{
    return v >= 0 && (size_t)v < p->n_values && p->part[v]; /* copies are not */
}

static lm_code keep_parts(pass *p, lm_err *e)
{
    const size_t ranks = (size_t)p->o->ranks;
    for (size_t v = 0; v < p->n_values; v++) {
        if (!p->o->part[v])
            continue;
        if (lm_arena_alloc(p->g->arena, &p->part[v], ranks, sizeof **p->part, e))
            return e->code;
        memcpy(p->part[v], p->o->part[v], ranks * sizeof **p->part);
    }
    return LM_OK;
}

/* ---- groups and copies ---- */

static lm_code add_copy(pass *p, lm_vid v, size_t k, lm_err *e)
{
    lm_graph *g = p->g;
    copy c = { .param = v, .first = k, .group = p->n_groups - 1 };
    const lm_value like = g->value[v];
    if (lm_grow(&p->copy, &p->cap_copies, p->n_copies + 1, sizeof *p->copy, "copies", e) ||
        lm_graph_value(g, LM_ROLE_ACT, like.t, like.name, &c.sent, e) ||
        lm_graph_value(g, LM_ROLE_ACT, like.t, like.name, &c.whole, e))
        return e->code;
    p->copy[p->n_copies++] = c;
    p->last_copy[v] = p->n_copies;
    return LM_OK;
}

/* Node k reads shared parameters: those that its group has no copy of get one. */
static lm_code see_reader(pass *p, size_t k, lm_err *e)
{
    lm_node *n = &p->node[k];
    for (int i = 0; i < n->n_in; i++) {
        const lm_vid v = n->in[i];
        if (!is_shared(p, v))
            continue;
        const size_t at = p->last_copy[v];
        if ((!at || p->copy[at - 1].group != p->n_groups - 1) && add_copy(p, v, k, e))
            return e->code;
        n->in[i] = p->copy[p->last_copy[v] - 1].whole;
    }
    return LM_OK;
}

static bool reads(const pass *p, const lm_node *n)
{
    bool any = false;
    for (int i = 0; i < n->n_in; i++)
        any |= is_shared(p, n->in[i]);
    return any;
}

static lm_code find_groups(pass *p, lm_err *e)
{
    size_t run = 0;
    int layer = 0;
    for (size_t k = 0; k < p->n_nodes; k++) {
        run += is_border(p, k);
        if (!reads(p, &p->node[k]))
            continue;
        const group *last = p->n_groups ? &p->group[p->n_groups - 1] : NULL;
        if (!last || last->run != run || layer != p->node[k].layer) {
            if (lm_grow(&p->group, &p->cap_groups, p->n_groups + 1, sizeof *p->group, "groups", e))
                return e->code;
            p->group[p->n_groups++] = (group){ k, run };
        }
        layer = p->node[k].layer;
        if (see_reader(p, k, e))
            return e->code;
    }
    return LM_OK;
}

/* The group at whose start the gathers of another begin. */
static size_t starts_at(const pass *p, size_t at)
{
    for (int64_t d = 0; d < p->o->distance && at > 0 && p->group[at - 1].run == p->group[at].run;
         d++)
        at--;
    return at;
}

/* ---- the list ---- */

static lm_code add(pass *p, const lm_node *n, lm_err *e)
{
    lm_graph *g = p->g;
    if (lm_grow(&g->node, &g->cap_nodes, g->n_nodes + 1, sizeof *n, "nodes of a graph", e))
        return e->code;
    g->node[g->n_nodes++] = *n;
    return LM_OK;
}

/* Beside node `by` of the list, so that it belongs to the same section. */
static lm_code append(pass *p, const lm_op *op, const copy *c, const lm_node *by, lm_err *e)
{
    const bool begins = op == &lm_op_gather_begin;
    const lm_gather_attr a = {
        .axis = (int)p->o->axis, .ranks = p->o->ranks, .rank = p->o->rank, .part = p->part[c->param]
    };
    const lm_vid in = begins ? c->param : c->sent;
    lm_vid out = begins ? c->sent : c->whole;
    p->g->phase = by->phase;
    p->g->layer = by->layer;
    p->g->when = by->when;
    return lm_graph_append(p->g, op, &a, &in, &out, e);
}

static lm_code rewrite(pass *p, lm_err *e)
{
    size_t next = 0, begun = 0, ended = 0; /* group; copies */
    p->g->n_nodes = 0;
    for (size_t k = 0; k < p->n_nodes; k++) {
        const lm_node *n = &p->node[k];
        p->moved[k] = p->g->n_nodes;
        if (next < p->n_groups && p->group[next].first == k) {
            for (; begun < p->n_copies && starts_at(p, p->copy[begun].group) <= next; begun++)
                if (append(p, &lm_op_gather_begin, &p->copy[begun], n, e))
                    return e->code;
            next++;
        }
        for (; ended < p->n_copies && p->copy[ended].first == k; ended++)
            if (append(p, &lm_op_gather_end, &p->copy[ended], n, e))
                return e->code;
        if (add(p, n, e))
            return e->code;
    }
    p->moved[p->n_nodes] = p->g->n_nodes;
    for (size_t i = 0; i < p->o->n_borders; i++)
        *p->o->border[i] = p->moved[*p->o->border[i]];
    return LM_OK;
}

static lm_code run(pass *p, lm_err *e)
{
    const char *why = "a pass";
    if (lm_alloc_n(&p->node, p->n_nodes + 1, sizeof *p->node, why, e) ||
        lm_alloc_n(&p->moved, p->n_nodes + 1, sizeof *p->moved, why, e) ||
        lm_alloc_n(&p->last_copy, p->g->n_values, sizeof *p->last_copy, why, e) ||
        lm_alloc_n(&p->part, p->g->n_values, sizeof *p->part, why, e) || keep_parts(p, e))
        return e->code;
    memcpy(p->node, p->g->node, p->n_nodes * sizeof *p->node);
    return find_groups(p, e) || rewrite(p, e) ? e->code : LM_OK;
}

lm_code lm_pass_gather(lm_graph *g, const lm_gather_opts *o, lm_err *e)
{
    pass p = { .g = g, .o = o, .n_nodes = g->n_nodes, .n_values = g->n_values };
    const lm_phase phase = g->phase;
    const int layer = g->layer, when = g->when;
    lm_code rc = run(&p, e);
    g->phase = phase;
    g->layer = layer;
    g->when = when;
    lm_free(p.node);
    lm_free(p.moved);
    lm_free(p.last_copy);
    lm_free(p.part);
    lm_free(p.group);
    lm_free(p.copy);
    return rc;
}
