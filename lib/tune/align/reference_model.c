/* SPDX-License-Identifier: Apache-2.0 */
/* reference_model.c -- an evaluation graph with weights of its own. */
#include "tune/align/reference_model.h"

#include <inttypes.h>

static lm_code build(lm_reference_model *r, const lm_objective_site *site, lm_err *e)
{
    lm_scorer *s = &r->scorer;
    const lm_build how = { .mode = LM_MODE_EVAL,
                           .batch = site->batch,
                           .seq = site->seq,
                           .precision = site->precision,
                           .documents = true,
                           .backend = site->backend,
                           .codes = r->weights.src };
    if (lm_model_build(&r->weights.config, &how, &s->model, e) ||
        lm_plan_make(s->model->graph, site->backend, &s->model->loss, 1, &s->plan, e) ||
        lm_evaluator_of(s->model, &s->plan, site->backend, site->exec, &s->eval, e))
        return e->code;
    s->made = true;
    if (lm_loaded_weights(&r->weights, s->model, site->backend, e))
        return e->code;
    lm_store_bind(r->weights.store, s->model, s->eval.exec);
    return LM_OK;
}

lm_code lm_reference_model_open(lm_reference_model *r, const char *path,
                                const lm_objective_site *site, lm_err *e)
{
    if (lm_loaded_open(path, NULL, &r->weights, e))
        return e->code;
    r->weights.par = site->par;
    if (r->weights.config.vocab != site->config->vocab)
        lm_fail(e, LM_EUSAGE, path, "use a reference with the same tokenizer",
                "its vocabulary has %" PRId64 " tokens, that of the model %" PRId64,
                r->weights.config.vocab, site->config->vocab);
    else
        build(r, site, e);
    if (e->code)
        lm_reference_model_close(r);
    return e->code;
}

void lm_reference_model_close(lm_reference_model *r)
{
    lm_scorer_close(&r->scorer);
    lm_loaded_fini(&r->weights);
}

size_t lm_reference_model_bytes(const lm_reference_model *r)
{
    size_t bytes[LM_KEPT_ROLES] = { 0 };
    if (r->weights.store)
        lm_store_bytes(r->weights.store, bytes);
    return bytes[LM_KEPT_PARAM];
}
