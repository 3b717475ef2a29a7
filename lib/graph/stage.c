/* SPDX-License-Identifier: Apache-2.0 */
/* stage.c -- the nodes of a rank's stages, and what crosses their borders. */
#include "graph/stage_impl.h"

#include <stdio.h>
#include <string.h>

int lm_stage_of(const lm_stages *s, int64_t layer)
{
    int k = 0;
    while (k + 1 < s->n && layer >= s->first[k + 1])
        k++;
    return k;
}

/* Where an activation of the whole list is made and read. */
typedef struct {
    int made; /* its stage; -1: no node makes it */
    bool forward;
    int least, most; /* stages that read it, its own included */
} route;

typedef struct {
    lm_graph *g;
    const lm_stages *s;
    lm_stage_list *l;
    lm_addends *addends;
    int rank;
    route *of;   /* by value of the whole list */
    lm_vid *now; /* [stages]: the value in each stage, of the one that is being sent */
} pass;

static bool is_own(const pass *p, int stage)
{
    return lm_stage_is_on(p->s, stage, p->rank);
}

static lm_code find_routes(pass *p, lm_err *e)
{
    const lm_graph *g = p->g;
    for (size_t v = 0; v < g->n_values; v++)
        p->of[v] = (route){ .made = -1 };
    for (size_t k = 0; k < g->n_nodes; k++) {
        const lm_node *n = &g->node[k];
        const int at = lm_stage_of(p->s, n->layer);
        const bool forward = n->phase == LM_PHASE_FORWARD;
        for (int i = 0; i < n->n_in; i++) {
            route *r = n->in[i] >= 0 ? &p->of[n->in[i]] : NULL;
            if (!r || r->made < 0)
                continue;
            if (r->forward && forward ? at < r->made : !r->forward && at > r->made)
                return lm_fail(e, LM_EUSAGE, n->op->name, "use dp or tp",
                               "stage %d needs it of a stage that runs later, %d", at + 1,
                               r->made + 1);
            r->least = at < r->least ? at : r->least;
            r->most = at > r->most ? at : r->most;
        }
        for (int i = 0; i < n->n_out; i++)
            if (n->out[i] >= 0 && g->value[n->out[i]].role == LM_ROLE_ACT)
                p->of[n->out[i]] = (route){ at, forward, at, at };
    }
    return LM_OK;
}

/* ---- crossings ---- */

/* The value that stage `at` receives v as. */
static lm_code receive(pass *p, lm_vid v, int at, lm_err *e)
{
    char name[64];
    const lm_value like = p->g->value[v];
    if (!is_own(p, at))
        return LM_OK;
    snprintf(name, sizeof name, "%d for stage %d", (int)v, at + 1);
    if (lm_graph_value(p->g, LM_ROLE_INPUT, like.t, name, &p->now[at], e))
        return e->code;
    p->g->value[p->now[at]].layout = like.layout;
    return LM_OK;
}

/* From one stage to its neighbour. */
static lm_code cross(pass *p, int from, int to, lm_err *e)
{
    lm_stage *s = &p->l->stage[from < to ? from : to];
    lm_stage_border *b = from < to ? &s->down : &s->up;
    if (!is_own(p, from) && !is_own(p, to))
        return LM_OK;
    if (lm_grow(&b->value, &b->cap, b->n + 1, sizeof *b->value, "stages", e))
        return e->code;
    b->value[b->n++] = (lm_stage_crossing){ p->now[from], p->now[to] };
    return LM_OK;
}

/* The nodes of the stage read what it received. */
static void read_received(pass *p, lm_vid v, int at)
{
    for (size_t k = 0; k < p->g->n_nodes; k++) {
        lm_node *n = &p->g->node[k];
        for (int i = 0; i < n->n_in && lm_stage_of(p->s, n->layer) == at; i++)
            if (n->in[i] == v)
                n->in[i] = p->now[at];
    }
}

static lm_code send_along(pass *p, lm_vid v, int step, int until, lm_err *e)
{
    for (int at = p->of[v].made; at != until; at += step) {
        if (receive(p, v, at + step, e) || cross(p, at, at + step, e))
            return e->code;
        if (is_own(p, at + step))
            read_received(p, v, at + step);
    }
    return LM_OK;
}

static lm_code send_all(pass *p, lm_err *e)
{
    const size_t n = p->g->n_values;
    for (size_t v = 0; v < n; v++) {
        const route *r = &p->of[v];
        if (r->made < 0 || (r->most == r->made && r->least == r->made))
            continue;
        for (int k = 0; k < p->s->n; k++)
            p->now[k] = LM_NONE;
        p->now[r->made] = is_own(p, r->made) ? (lm_vid)v : LM_NONE;
        if (send_along(p, (lm_vid)v, 1, r->most, e) || send_along(p, (lm_vid)v, -1, r->least, e))
            return e->code;
    }
    return LM_OK;
}

/* ---- the list ---- */

static void keep_own(pass *p)
{
    size_t left = 0;
    for (size_t k = 0; k < p->g->n_nodes; k++)
        if (is_own(p, lm_stage_of(p->s, p->g->node[k].layer)))
            p->g->node[left++] = p->g->node[k];
    p->g->n_nodes = left;
}

static lm_code run(pass *p, lm_err *e)
{
    const size_t n = p->g->n_values;
    if (lm_alloc_n(&p->l->stage, (size_t)p->s->n, sizeof *p->l->stage, "stages", e) ||
        lm_alloc_n(&p->now, (size_t)p->s->n, sizeof *p->now, "stages", e) ||
        lm_alloc_n(&p->of, n, sizeof *p->of, "stages", e))
        return e->code;
    for (int k = 0; k < p->s->n; k++)
        p->l->stage[k].own = is_own(p, k);
    if (find_routes(p, e) || send_all(p, e) ||
        lm_split_gradients(p->g, p->s, p->rank, p->addends, e))
        return e->code;
    keep_own(p);
    return LM_OK;
}

lm_code lm_pass_stage(lm_graph *g, const lm_stages *s, int rank, lm_stage_list **out,
                      lm_addends *addends, lm_err *e)
{
    pass p = { .g = g, .s = s, .rank = rank, .addends = addends };
    *out = NULL;
    if (lm_alloc_n(&p.l, 1, sizeof *p.l, "stages", e))
        return e->code;
    p.l->n = s->n;
    p.l->apart = s->apart;
    run(&p, e);
    lm_free(p.now);
    lm_free(p.of);
    if (e->code)
        lm_stage_list_free(p.l);
    else
        *out = p.l;
    return e->code;
}

void lm_stage_list_free(lm_stage_list *l)
{
    if (!l)
        return;
    for (int k = 0; l->stage && k < l->n; k++) {
        lm_free(l->stage[k].down.value);
        lm_free(l->stage[k].up.value);
    }
    lm_free(l->stage);
    lm_free(l->slot);
    lm_free(l);
}

bool lm_stage_sends(const lm_stage_list *l, lm_vid v)
{
    for (int k = 0; k < l->n; k++) {
        const lm_stage_border *both[] = { &l->stage[k].down, &l->stage[k].up };
        for (int b = 0; b < 2; b++)
            for (size_t i = 0; i < both[b]->n; i++)
                if (both[b]->value[i].from == v)
                    return true;
    }
    return false;
}
