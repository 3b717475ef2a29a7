/* SPDX-License-Identifier: Apache-2.0 */
/* recompute.c -- activations of a layer are computed a second time before its backward, so that they
 * are not kept from its forward on (arXiv:1604.06174, section 4, with the layers as segments).
 *
 * A value of a layer that only the layer itself reads in its backward is not kept: the nodes that
 * make it are appended once more before the first node of that backward, which then reads the copies.
 * They have the attributes of the first ones, and so the same bits: random numbers are counted by
 * sites.  What these nodes read of other layers, and what the backward of other layers reads, is
 * kept as before. */
#include <string.h>

#include "graph/passes.h"

typedef struct {
    lm_graph *g;
    int64_t layers;
    lm_node *node; /* the list on entry */
    size_t n_nodes, n_values;
    size_t *maker; /* by value: 1 + the node that can make it again; 0: none can */
    bool *kept;    /* by value: read outside of its layer, after the forward */
    bool *wanted;  /* by value: read in the backward of its layer */
    bool *again;   /* by node */
    lm_vid *copy;  /* by value: its second computation, or LM_NONE */
    bool *begun;   /* by layer: its backward */
} pass;

static bool is_in_layer(const pass *p, const lm_node *n)
{
    return n->layer >= 0 && n->layer < p->layers;
}

static bool is_backward(const lm_node *n)
{
    return n->phase == LM_PHASE_BACKWARD_INPUT || n->phase == LM_PHASE_BACKWARD_WEIGHT;
}

/* A node that writes a value that is kept between runs would change it twice. */
static bool is_repeatable(const pass *p, const lm_node *n)
{
    bool pure = n->phase == LM_PHASE_FORWARD && is_in_layer(p, n);
    for (int i = 0; i < n->n_out; i++)
        pure = pure && (n->out[i] < 0 || p->g->value[n->out[i]].role == LM_ROLE_ACT);
    return pure;
}

/* A node of `layer` reads v after the forward. */
static void read_late(pass *p, lm_vid v, int layer)
{
    if (v < 0 || !p->maker[v])
        return;
    *(p->node[p->maker[v] - 1].layer == layer ? &p->wanted[v] : &p->kept[v]) = true;
}

/* Choose the nodes: in reverse order, so that all readers of a value are known before its maker is
 * reached. */
static void choose(pass *p)
{
    for (size_t k = 0; k < p->n_nodes; k++) {
        const lm_node *n = &p->node[k];
        for (int i = 0; i < n->n_out && is_repeatable(p, n); i++)
            if (n->out[i] >= 0)
                p->maker[n->out[i]] = k + 1;
    }
    for (size_t k = 0; k < p->n_nodes; k++)
        for (int i = 0; i < p->node[k].n_in && is_backward(&p->node[k]); i++)
            read_late(p, p->node[k].in[i], p->node[k].layer);
    for (size_t k = p->n_nodes; k-- > 0;) {
        const lm_node *n = &p->node[k];
        for (int i = 0; i < n->n_out; i++)
            if (n->out[i] >= 0 && p->maker[n->out[i]] == k + 1)
                p->again[k] |= p->wanted[n->out[i]] && !p->kept[n->out[i]];
        for (int i = 0; i < n->n_in && p->again[k]; i++)
            read_late(p, n->in[i], n->layer);
    }
}

/* The value to read for v after the forward. */
static lm_vid late(const pass *p, lm_vid v)
{
    return v >= 0 && p->copy[v] != LM_NONE && !p->kept[v] ? p->copy[v] : v;
}

static lm_code add(pass *p, const lm_node *n, lm_err *e)
{
    lm_graph *g = p->g;
    if (lm_grow(&g->node, &g->cap_nodes, g->n_nodes + 1, sizeof *n, "nodes of a graph", e))
        return e->code;
    g->node[g->n_nodes++] = *n;
    return LM_OK;
}

static lm_code repeat(pass *p, lm_node n, lm_err *e)
{
    lm_graph *g = p->g;
    void *attr = NULL;
    if (n.op->attr_size && lm_arena_alloc(g->arena, &attr, 1, n.op->attr_size, e))
        return e->code;
    if (attr)
        n.attr = memcpy(attr, n.attr, n.op->attr_size);
    for (int i = 0; i < n.n_in; i++)
        n.in[i] = late(p, n.in[i]);
    for (int i = 0; i < n.n_out; i++) {
        lm_vid v = n.out[i];
        if (v < 0)
            continue;
        const lm_value like = g->value[v];
        if (lm_graph_value(g, LM_ROLE_ACT, like.t, like.name, &n.out[i], e))
            return e->code;
        g->value[n.out[i]].layout = like.layout;
        p->copy[v] = n.out[i];
    }
    n.phase = LM_PHASE_RECOMPUTE;
    return add(p, &n, e);
}

static lm_code repeat_layer(pass *p, int layer, lm_err *e)
{
    for (size_t k = 0; k < p->n_nodes; k++)
        if (p->again[k] && p->node[k].layer == layer && repeat(p, p->node[k], e))
            return e->code;
    return LM_OK;
}

static lm_code rewrite(pass *p, lm_err *e)
{
    p->g->n_nodes = 0;
    for (size_t k = 0; k < p->n_nodes; k++) {
        lm_node n = p->node[k];
        if (is_backward(&n)) {
            if (is_in_layer(p, &n) && !p->begun[n.layer]) {
                p->begun[n.layer] = true;
                if (repeat_layer(p, n.layer, e))
                    return e->code;
            }
            for (int i = 0; i < n.n_in; i++)
                n.in[i] = late(p, n.in[i]);
        }
        if (add(p, &n, e))
            return e->code;
    }
    return LM_OK;
}

static lm_code run(pass *p, lm_err *e)
{
    const char *why = "a pass";
    if (lm_alloc_n(&p->node, p->n_nodes, sizeof *p->node, why, e) ||
        lm_alloc_n(&p->maker, p->n_values, sizeof *p->maker, why, e) ||
        lm_alloc_n(&p->kept, p->n_values, sizeof *p->kept, why, e) ||
        lm_alloc_n(&p->wanted, p->n_values, sizeof *p->wanted, why, e) ||
        lm_alloc_n(&p->copy, p->n_values, sizeof *p->copy, why, e) ||
        lm_alloc_n(&p->again, p->n_nodes, sizeof *p->again, why, e) ||
        lm_alloc_n(&p->begun, (size_t)p->layers, sizeof *p->begun, why, e))
        return e->code;
    memcpy(p->node, p->g->node, p->n_nodes * sizeof *p->node);
    for (size_t v = 0; v < p->n_values; v++)
        p->copy[v] = LM_NONE;
    choose(p);
    return rewrite(p, e);
}

lm_code lm_pass_recompute(lm_graph *g, int64_t layers, lm_err *e)
{
    pass p = { .g = g, .layers = layers, .n_nodes = g->n_nodes, .n_values = g->n_values };
    lm_code rc = run(&p, e);
    lm_free(p.node);
    lm_free(p.maker);
    lm_free(p.kept);
    lm_free(p.wanted);
    lm_free(p.copy);
    lm_free(p.again);
    lm_free(p.begun);
    return rc;
}
