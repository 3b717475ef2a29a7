/* SPDX-License-Identifier: Apache-2.0 */
/* stage_addends.c -- gradients to which several stages add. */
#include <stdio.h>
#include <string.h>

#include "graph/stage_impl.h"

static bool adds_to(const lm_node *n, lm_vid grad)
{
    bool adds = false;
    for (int i = 0; i < n->n_out; i++)
        adds |= n->out[i] == grad;
    return adds;
}

/* The nodes of stage `at` add to `own` in place of `grad`. */
static void add_apart(lm_graph *g, const lm_stages *s, lm_vid grad, int at, lm_vid own)
{
    for (size_t k = 0; k < g->n_nodes; k++) {
        lm_node *n = &g->node[k];
        for (int i = 0; i < n->n_out && lm_stage_of(s, n->layer) == at; i++)
            if (n->out[i] == grad)
                n->out[i] = own;
    }
}

/* own, last: the stage is this rank's, and the last that adds. */
static lm_code add_addend(lm_graph *g, const lm_stages *s, lm_vid grad, int at, bool own, bool last,
                          lm_addends *out, lm_err *e)
{
    char name[64];
    lm_vid v = own && last ? grad : LM_NONE;
    if (own && !last) {
        const lm_value like = g->value[grad];
        snprintf(name, sizeof name, "%d of stage %d", (int)grad, at + 1);
        if (lm_graph_value(g, LM_ROLE_GRAD, like.t, name, &v, e))
            return e->code;
        g->value[v].layout = like.layout;
        g->value[v].grad_of = LM_NONE;
        add_apart(g, s, grad, at, v);
    }
    if (lm_grow(&out->of, &out->cap, out->n + 1, sizeof *out->of, "stages", e))
        return e->code;
    out->of[out->n++] = (lm_addend){ grad, at, v };
    return LM_OK;
}

/* adds: room for a flag of each stage. */
static lm_code split_gradient(lm_graph *g, const lm_stages *s, int rank, lm_vid grad, bool *adds,
                              lm_addends *out, lm_err *e)
{
    int stages = 0;
    bool last = true;
    memset(adds, 0, (size_t)s->n * sizeof *adds);
    for (size_t k = 0; k < g->n_nodes; k++)
        if (adds_to(&g->node[k], grad))
            adds[lm_stage_of(s, g->node[k].layer)] = true;
    for (int k = 0; k < s->n; k++)
        stages += adds[k];
    for (int k = s->n; stages > 1 && k-- > 0;) {
        if (adds[k] && add_addend(g, s, grad, k, lm_stage_is_on(s, k, rank), last, out, e))
            return e->code;
        last &= !adds[k];
    }
    return LM_OK;
}

lm_code lm_split_gradients(lm_graph *g, const lm_stages *s, int rank, lm_addends *out, lm_err *e)
{
    const size_t n = g->n_values;
    bool *adds = NULL;
    lm_code rc = lm_alloc_n(&adds, (size_t)s->n, sizeof *adds, "stages", e);
    for (size_t v = 0; !rc && v < n; v++)
        if (g->value[v].role == LM_ROLE_GRAD)
            rc = split_gradient(g, s, rank, (lm_vid)v, adds, out, e);
    lm_free(adds);
    return rc;
}

/* What stands before the layers is the first of two stages. */
lm_code lm_pass_apart(lm_graph *g, lm_addends *out, lm_err *e)
{
    const int64_t first[2] = { -1, 0 };
    const int rank[2] = { 0, 0 };
    const lm_stages s = { .n = 2, .first = first, .rank = rank };
    return lm_split_gradients(g, &s, 0, out, e);
}
