/* SPDX-License-Identifier: Apache-2.0 */
/* stage_order.c -- the sections of a rank's stages, and the values that live from one to another. */
#include <string.h>

#include "graph/stage.h"

typedef struct {
    lm_graph *g;
    const lm_stages *s;
    lm_stage_list *l;
    uint8_t *kind; /* by node: lm_stage_kind */
    unsigned *use; /* by value: the kinds of sections whose nodes make, read or add to it */
    bool *sent;    /* by value */
} pass;

static bool is_act(const pass *p, lm_vid v)
{
    return v >= 0 && p->g->value[v].role == LM_ROLE_ACT;
}

static bool is_grad(const pass *p, lm_vid v)
{
    return v >= 0 && p->g->value[v].role == LM_ROLE_GRAD;
}

static void list_uses(pass *p, bool results)
{
    memset(p->use, 0, p->g->n_values * sizeof *p->use);
    for (size_t k = 0; k < p->g->n_nodes; k++) {
        const lm_node *n = &p->g->node[k];
        for (int i = 0; i < n->n_in; i++)
            if (n->in[i] >= 0)
                p->use[n->in[i]] |= 1u << p->kind[k];
        for (int i = 0; i < n->n_out; i++)
            if (n->out[i] >= 0 && (results || is_grad(p, n->out[i])))
                p->use[n->out[i]] |= 1u << p->kind[k];
    }
}

static lm_stage_kind first_kind(const pass *p, const lm_node *n)
{
    if (n->phase == LM_PHASE_FORWARD)
        return LM_STAGE_F;
    return p->l->apart && n->phase == LM_PHASE_BACKWARD_WEIGHT ? LM_STAGE_W : LM_STAGE_B;
}

/* True if something of the backward waits for a result of this node of the weights. */
static bool is_awaited(const pass *p, const lm_node *n)
{
    bool awaited = false;
    for (int i = 0; i < n->n_out; i++) {
        const lm_vid v = n->out[i];
        awaited |= (is_act(p, v) && (p->sent[v] || (p->use[v] & 1u << LM_STAGE_B))) ||
                   (is_grad(p, v) && (p->use[v] & 1u << LM_STAGE_B));
    }
    return awaited;
}

/* What a node of the forward reads is made there: a loss that was joined with its gradient reads the scale of that, which may
 * have been brought into another layout for the backward. */
static void pull_forward(pass *p)
{
    for (size_t k = p->g->n_nodes; k-- > 0;) {
        const lm_node *n = &p->g->node[k];
        for (int i = 0; i < n->n_out && p->kind[k] != LM_STAGE_F; i++)
            if (is_act(p, n->out[i]) && (p->use[n->out[i]] & 1u << LM_STAGE_F))
                p->kind[k] = LM_STAGE_F;
        for (int i = 0; i < n->n_in && p->kind[k] == LM_STAGE_F; i++)
            if (n->in[i] >= 0)
                p->use[n->in[i]] |= 1u << LM_STAGE_F;
    }
}

static void choose_kinds(pass *p)
{
    for (size_t k = 0; k < p->g->n_nodes; k++)
        p->kind[k] = (uint8_t)first_kind(p, &p->g->node[k]);
    list_uses(p, false);
    pull_forward(p);
    for (bool more = true; more;) {
        more = false;
        list_uses(p, false);
        for (size_t k = p->g->n_nodes; k-- > 0;)
            if (p->kind[k] == LM_STAGE_W && is_awaited(p, &p->g->node[k])) {
                p->kind[k] = LM_STAGE_B;
                more = true;
            }
    }
}

/* Micro-batches go through the sections of a stage in order, but not through several sections together. */
static lm_code check_gradients(const pass *p, lm_err *e)
{
    for (size_t v = 0; v < p->g->n_values; v++)
        if (is_grad(p, (lm_vid)v) && (p->use[v] & (p->use[v] - 1)))
            return lm_fail(e, LM_EUSAGE, "stages", "use dp or tp",
                           "forward and backward of one stage add to the same gradient: %s",
                           p->g->value[v].name ? p->g->value[v].name : "of a parameter");
    return LM_OK;
}

static lm_code sort_nodes(pass *p, lm_err *e)
{
    lm_graph *g = p->g;
    lm_node *list = NULL;
    size_t n = 0;
    if (lm_alloc_n(&list, g->n_nodes, sizeof *list, "nodes", e))
        return e->code;
    for (int kind = 0; kind < LM_STAGE_KINDS; kind++)
        for (int i = 0; i < p->s->n; i++) {
            const int at = kind == LM_STAGE_F ? i : p->s->n - 1 - i;
            p->l->stage[at].first[kind] = n;
            for (size_t k = 0; k < g->n_nodes; k++)
                if (p->kind[k] == kind && lm_stage_of(p->s, g->node[k].layer) == at)
                    list[n++] = g->node[k];
            p->l->stage[at].last[kind] = n;
        }
    memcpy(g->node, list, n * sizeof *list);
    lm_free(list);
    return LM_OK;
}

static void place_crossings(pass *p, const lm_stage_border *b, int from, int to)
{
    for (size_t i = 0; i < b->n; i++) {
        if (b->value[i].from >= 0)
            p->l->slot[b->value[i].from] = 1 + from;
        if (b->value[i].to >= 0)
            p->l->slot[b->value[i].to] = 1 + to;
    }
}

static lm_code place_values(pass *p, lm_err *e)
{
    lm_stage_list *l = p->l;
    const lm_graph *g = p->g;
    lm_free(l->slot);
    l->slot = NULL;
    l->n_values = g->n_values;
    if (lm_alloc_n(&l->slot, g->n_values, sizeof *l->slot, "stages", e))
        return e->code;
    for (size_t k = 0; k < g->n_nodes; k++)
        for (int i = 0; i < g->node[k].n_out; i++) {
            const lm_vid v = g->node[k].out[i];
            if (is_act(p, v) && (p->use[v] & (p->use[v] - 1)))
                l->slot[v] = 1 + lm_stage_of(p->s, g->node[k].layer);
        }
    for (int k = 0; k + 1 < l->n; k++)
        for (size_t i = 0; i < l->stage[k].up.n; i++) {
            const lm_vid v = l->stage[k].up.value[i].to;
            if (v >= 0 && (p->use[v] & 1u << LM_STAGE_F))
                return lm_fail(e, LM_EBUG, "stages", NULL,
                               "the forward of stage %d reads what comes with the backward", k + 1);
        }
    for (int k = 0; k + 1 < l->n; k++) {
        place_crossings(p, &l->stage[k].down, k, k + 1);
        place_crossings(p, &l->stage[k].up, k + 1, k);
    }
    return LM_OK;
}

static void find_sent(pass *p)
{
    for (int k = 0; k < p->l->n; k++) {
        const lm_stage_border *both[] = { &p->l->stage[k].down, &p->l->stage[k].up };
        for (int b = 0; b < 2; b++)
            for (size_t i = 0; i < both[b]->n; i++)
                if (both[b]->value[i].from >= 0)
                    p->sent[both[b]->value[i].from] = true;
    }
}

static lm_code run(pass *p, lm_err *e)
{
    if (lm_alloc_n(&p->kind, p->g->n_nodes, sizeof *p->kind, "stages", e) ||
        lm_alloc_n(&p->use, p->g->n_values, sizeof *p->use, "stages", e) ||
        lm_alloc_n(&p->sent, p->g->n_values, sizeof *p->sent, "stages", e))
        return e->code;
    find_sent(p);
    choose_kinds(p);
    list_uses(p, true);
    return check_gradients(p, e) || place_values(p, e) || sort_nodes(p, e) ? e->code : LM_OK;
}

lm_code lm_stage_order(lm_graph *g, const lm_stages *s, lm_stage_list *l, lm_err *e)
{
    pass p = { .g = g, .s = s, .l = l };
    run(&p, e);
    lm_free(p.kind);
    lm_free(p.use);
    lm_free(p.sent);
    return e->code;
}
