/* SPDX-License-Identifier: Apache-2.0 */
/* memory_pipe.c -- the memory and messages of ranks along pp. */
#include "parallel/pipeline_run.h"
#include "train/memory_impl.h"

static int rank_of(const lm_program *p)
{
    return p->o.build.mesh->rank[LM_AXIS_PP];
}

/* What crosses the border behind a stage from this rank.  With copies neighbours are on different ranks in either way. */
static double given_over(const lm_program *p, const lm_stage_border *b)
{
    const lm_graph *g = p->train->graph;
    const bool twins = p->o.build.stages->twin;
    double sum = 0;
    for (size_t i = 0; i < b->n; i++)
        sum += b->value[i].from >= 0 && (twins || b->value[i].to < 0)
                   ? memory_value_bytes(g, b->value[i].from)
                   : 0;
    return sum;
}

static double given_of_micro(const lm_program *p)
{
    const lm_stage_list *l = p->train->stages;
    double sum = 0;
    for (int k = 0; k < l->n; k++)
        sum += given_over(p, &l->stage[k].down) + given_over(p, &l->stage[k].up);
    return sum;
}

double memory_of_slots(const lm_program *p, const lm_train_pipe *pipe)
{
    double sum = 0;
    lm_err unseen = { 0 };
    for (int k = 0; pipe && k < pipe->stages.n; k++) {
        int n = 0;
        if (lm_pipeline_slots(&pipe->rows, k, rank_of(p), &n, &unseen) || !n)
            continue;
        sum += (double)n * (double)p->train_plan.slot_bytes[k];
        sum += p->eval ? (double)p->eval_plan.slot_bytes[k] : 0;
    }
    return pipe ? sum + 2 * given_of_micro(p) : 0;
}

/* Of an addend the rank gives its part to one that has the other, in each leaf. */
static double given_of_addends(const lm_program *p)
{
    const lm_model *m = p->train;
    const bool twins = p->o.build.stages->twin;
    double sum = 0;
    for (size_t i = 0; i < m->addends.n; i++) {
        const bool own = m->addends.of[i].own >= 0, other = m->addends.of[i ^ 1].own >= 0;
        if (own && (!other || (twins && i % 2)))
            sum += memory_value_bytes(m->graph, m->addends.of[i].grad);
    }
    return sum;
}

/* All gradients, to the rank that has the copies. */
static double given_of_twins(const lm_program *p)
{
    const lm_model *m = p->train;
    double n = 0;
    for (int i = 0; i < m->n_params; i++)
        n += m->grad[i] >= 0 ? (double)m->param[i].count : 0;
    return p->o.build.stages->twin ? n * sizeof(float) : 0;
}

double memory_given_to_stages(const lm_program *p, const lm_memory_ask *ask)
{
    if (!p->train->stages)
        return 0;
    const int ways = ask->pipe ? ask->pipe->ways : 1, dp = ask->sharing > 1 ? ask->sharing : 1;
    return given_of_micro(p) * (double)(ask->accumulate / dp / ways) +
           given_of_addends(p) * (double)memory_leaves(ask) + given_of_twins(p);
}

double memory_of_addends(const lm_program *p)
{
    const lm_addends *l = &p->train->addends;
    double sum = 0;
    for (size_t i = 0; i + 1 < l->n; i += 2)
        sum += l->of[i].own >= 0 || l->of[i + 1].own >= 0
                   ? memory_value_bytes(p->train->graph, l->of[i].grad)
                   : 0;
    return sum;
}
