/* SPDX-License-Identifier: Apache-2.0 */
/* build_stage.c -- the stages of a model that one rank along pp has: their part of the list, and the tensors that it holds. */
#include "model/build.h"

/* The stages whose nodes read a parameter.  One that no node reads is the last one's; of an adapter, whose file has it for
 * what makes rows of tokens, the first one's. */
struct lm_b_holders {
    bool own; /* one of them is this rank's */
    int first;
};
typedef lm_b_holders holders;

static void hold(const lm_stages *s, int rank, int stage, holders *h)
{
    h->own |= lm_stage_is_on(s, stage, rank);
    h->first = h->first < 0 || stage < h->first ? stage : h->first;
}

lm_code lm_b_find_holders(const lm_model *m, lm_b_holders **out, lm_err *e)
{
    const lm_graph *g = m->graph;
    const lm_stages *s = m->build.stages;
    const int rank = s ? m->build.mesh->rank[LM_AXIS_PP] : 0;
    int *param = NULL;
    holders *of = NULL;
    *out = NULL;
    if (!s)
        return LM_OK;
    if (lm_alloc_n(&param, g->n_values, sizeof *param, "stages", e) ||
        lm_alloc_n(&of, (size_t)m->n_params + 1, sizeof *of, "stages", e)) {
        lm_free(param);
        return e->code;
    }
    *out = of;
    for (int i = 0; i < m->n_params; i++) {
        param[m->param[i].value] = 1 + i;
        of[i] = (holders){ .first = -1 };
    }
    for (size_t k = 0; k < g->n_nodes; k++)
        for (int i = 0; i < g->node[k].n_in; i++) {
            const lm_vid v = g->node[k].in[i];
            if (v >= 0 && param[v])
                hold(s, rank, lm_stage_of(s, g->node[k].layer), &of[param[v] - 1]);
        }
    for (int i = 0; i < m->n_slices; i++)
        if (of[m->slice[i].param].first < 0)
            hold(s, rank, m->slice[i].of_adapter ? 0 : s->n - 1, &of[m->slice[i].param]);
    lm_free(param);
    return LM_OK;
}

/* Another rank has it: the part here has no rows. */
static void leave_slice(lm_slice *t)
{
    const int64_t rows = t->cut.ranks && t->cut.dim == 0 ? t->cut.whole : t->rows;
    if (t->stack > 1) /* of as many rows each as in the part */
        t->stack = rows / (t->rows / t->stack);
    t->cut = (lm_cut){ .ranks = 1, .axis = LM_AXIS_PP, .whole = rows, .none = true };
    t->row = t->rows = 0;
}

/* True if all coordinates but those along pp and `but` are 0. */
static bool is_first(const lm_mesh *mesh, lm_axis but)
{
    bool first = true;
    for (int i = 0; i < LM_AXES; i++)
        first &= i == LM_AXIS_PP || i == (int)but || mesh->rank[i] == 0;
    return first;
}

/* first: of the stages that hold it, the first one is this rank's. */
static void hold_slice(lm_slice *t, const lm_mesh *mesh, bool first)
{
    bool inner = true;
    for (int i = 0; i < LM_INNER_AXES; i++)
        inner &= mesh->rank[lm_inner_axes[i]] == 0;
    if (!t->cut.ranks)
        t->cut = (lm_cut){ .ranks = 1,
                           .axis = LM_AXIS_PP,
                           .whole = t->rows,
                           .pieces = { .n = 1, .run = { { 1, t->rows, 1 } } },
                           .counts = inner };
    t->cut.counts &= first;
    t->cut.writes = t->cut.counts && is_first(mesh, t->cut.axis);
}

/* The whole's shape, from which a tensor's follows that is sent to other ranks. */
static void leave_param(lm_model *m, int i)
{
    lm_tensor *t = &m->graph->value[m->param[i].value].t;
    m->param[i].count = 0;
    for (int k = 0; k < m->n_slices; k++)
        if (m->slice[k].param == i && m->slice[k].cut.ranks)
            t->dim[m->slice[k].cut.dim] = m->slice[k].cut.whole;
}

static void cut_params(lm_model *m, const holders *of)
{
    const lm_mesh *mesh = m->build.mesh;
    for (int i = 0; i < m->n_params; i++)
        if (!of[i].own)
            leave_param(m, i);
    for (int i = 0; i < m->n_slices; i++) {
        lm_slice *t = &m->slice[i];
        const holders *h = &of[t->param];
        if (h->own)
            hold_slice(t, mesh, m->build.stages->rank[h->first] == mesh->rank[LM_AXIS_PP]);
        else
            leave_slice(t);
    }
}

/* ---- results ---- */

static void forget_one(const bool *made, lm_vid *v)
{
    if (*v >= 0 && !made[*v])
        *v = LM_NONE;
}

/* Of what is read behind a run, this rank has what its nodes make. */
static lm_code forget_results(lm_model *m, lm_err *e)
{
    const lm_graph *g = m->graph;
    bool *made = NULL;
    if (lm_alloc_n(&made, g->n_values, sizeof *made, "stages", e))
        return e->code;
    for (size_t k = 0; k < g->n_nodes; k++)
        for (int i = 0; i < g->node[k].n_out; i++)
            if (g->node[k].out[i] >= 0)
                made[g->node[k].out[i]] = true;
    forget_one(made, &m->loss);
    forget_one(made, &m->aux);
    for (int k = 0; k < LM_MOST_AHEAD; k++)
        forget_one(made, &m->ahead_loss[k]);
    for (int64_t l = 0; m->routed && l < lm_config_depth(&m->config); l++) {
        lm_routed_layer *r = &m->routed[l];
        lm_vid *const all[] = { &r->z, &r->expert, &r->load, &r->mean, &r->dropped };
        for (size_t i = 0; i < sizeof all / sizeof *all; i++)
            forget_one(made, all[i]);
    }
    lm_free(made);
    return LM_OK;
}

/* ---- all of it ---- */

static lm_code check_kind(const lm_model *m, lm_err *e)
{
    const lm_build *b = &m->build;
    if (b->mode == LM_MODE_GENERATE || b->teacher || b->states || b->value || b->entropy ||
        b->codes || b->halves || m->config.scores)
        return lm_fail(e, LM_EUSAGE, "stages", "use dp or tp",
                       "are those of a whole model whose loss is that of its targets");
    if (m->config.tied && b->ahead == LM_AHEAD_RUNS)
        return lm_fail(
            e, LM_EUSAGE, "stages", "use dp or tp, or leave the modules as they are",
            "the last one would have the tied embedding for head and modules that predict "
            "further on");
    return LM_OK;
}

lm_code lm_b_take_stages(lm_model *m, const lm_b_holders *of, lm_err *e)
{
    const lm_stages *s = m->build.stages;
    if (!s)
        return LM_OK;
    if (check_kind(m, e) ||
        lm_pass_stage(m->graph, s, m->build.mesh->rank[LM_AXIS_PP], &m->stages, &m->addends, e))
        return e->code;
    cut_params(m, of);
    return forget_results(m, e);
}
