/* SPDX-License-Identifier: Apache-2.0 */
/* scorer.c -- an evaluation graph beside the one that trains. */
#include "tune/align/scorer.h"

#include <string.h>

#include "model/loaded.h"

lm_code lm_scorer_open(lm_scorer *s, const lm_objective_site *site, lm_err *e)
{
    lm_build how = site->model->build;
    how.mode = LM_MODE_EVAL;
    how.halves = how.dropout = false;
    how.entropy = LM_ENTROPY_NONE;
    how.documents = true;
    how.teacher = NULL;
    how.like = site->model;
    lm_vid read[LM_MODEL_ROWS];
    if (lm_model_build(site->config, &how, &s->model, e) ||
        lm_plan_make(s->model->graph, site->backend, read, lm_model_rows(s->model, read), &s->plan,
                     e) ||
        lm_evaluator_of(s->model, &s->plan, site->backend, site->exec, &s->eval, e)) {
        lm_scorer_close(s);
        return e->code;
    }
    s->made = true;
    s->comm = site->comm;
    lm_store_bind(site->store, s->model, s->eval.exec);
    return LM_OK;
}

lm_code lm_scorer_beside(const lm_model *m, bool own, size_t arena, size_t *bytes, lm_err *e)
{
    lm_plan plan = { 0 };
    if (!lm_plan_make(m->graph, m->build.backend, &m->loss, 1, &plan, e))
        *bytes = (own ? lm_loaded_bytes(m) : 0) + (plan.bytes > arena ? plan.bytes : 0);
    lm_plan_fini(&plan);
    return e->code;
}

void lm_scorer_close(lm_scorer *s)
{
    if (s->made)
        lm_evaluator_fini(&s->eval);
    lm_plan_fini(&s->plan);
    lm_model_free(s->model);
    memset(s, 0, sizeof *s);
}
