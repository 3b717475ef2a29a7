/* SPDX-License-Identifier: Apache-2.0 */
/* reference_model.c -- an evaluation graph with weights of its own, or with those that an adapter leaves frozen. */
#include "tune/align/reference_model.h"

#include <inttypes.h>

#include "text/tokenizer_source.h"

/* Without the adapter; weights that are shared are kept as the training keeps them. */
static lm_build build_of(const lm_model *train, bool shares)
{
    const lm_build *t = &train->build;
    return (lm_build){ .mode = LM_MODE_EVAL,
                       .batch = t->batch,
                       .seq = t->seq,
                       .precision = t->precision,
                       .documents = true,
                       .backend = t->backend,
                       .like = shares ? train : NULL };
}

static lm_code build(lm_reference_model *r, const lm_objective_site *site, lm_err *e)
{
    lm_scorer *s = &r->scorer;
    lm_build how = build_of(site->model, r->shares);
    how.backend = site->backend;
    how.codes = r->weights.src;
    if (lm_model_build(&r->weights.config, &how, &s->model, e) ||
        lm_plan_make(s->model->graph, site->backend, &s->model->loss, 1, &s->plan, e) ||
        lm_evaluator_of(s->model, &s->plan, site->backend, site->exec, &s->eval, e))
        return e->code;
    s->made = true;
    r->weights.base = r->shares ? site->store : NULL;
    if (lm_loaded_weights(&r->weights, s->model, site->backend, e))
        return e->code;
    lm_store_bind(r->weights.store, s->model, s->eval.exec);
    return LM_OK;
}

lm_code lm_reference_model_check(const lm_loaded *w, const char *path, const lm_config *config,
                                 const lm_tokenizer *tok, lm_err *e)
{
    const lm_config *c = &w->config;
    bool same = true;
    if (c->scores)
        return lm_fail(e, LM_EUSAGE, path, "use a language model",
                       "gives scores to texts: it is no reference");
    if (c->vocab != config->vocab)
        return lm_fail(e, LM_EUSAGE, path, "use a reference with the same tokenizer",
                       "its vocabulary has %" PRId64 " tokens, that of the model %" PRId64,
                       c->vocab, config->vocab);
    if ((tok && lm_tokenizer_is_of(w->src, tok, &same, e)) || same)
        return e->code;
    return lm_fail(e, LM_EUSAGE, path, "use a reference with the same tokenizer",
                   "its tokens are not those of the model");
}

lm_code lm_reference_model_open(lm_reference_model *r, const char *path, const lm_tokenizer *tok,
                                const lm_objective_site *site, lm_err *e)
{
    if (lm_loaded_open(path, NULL, &r->weights, e))
        return e->code;
    r->weights.par = site->par;
    if (lm_reference_model_check(&r->weights, path, site->config, tok, e) || build(r, site, e))
        lm_reference_model_close(r);
    return e->code;
}

void lm_reference_model_close(lm_reference_model *r)
{
    lm_scorer_close(&r->scorer);
    lm_loaded_fini(&r->weights);
}

/* ---- memory ---- */

size_t lm_reference_model_bytes(const lm_reference_model *r)
{
    const lm_store *s = r->weights.store;
    size_t bytes = 0;
    for (int k = 0; s && k < s->n_blocks; k++)
        bytes += s->block[k].borrowed ? 0 : s->block[k].bytes;
    return bytes;
}

/* True if the training has all tensors of the reference, frozen, where one store can serve both. */
static bool has_all(const lm_model *train, const lm_model *m)
{
    for (int i = 0; i < m->n_slices; i++) {
        const int k = lm_model_slice(train, m->slice[i].name);
        if (k < 0 || train->slice[k].trains)
            return false;
        const lm_param *p = &m->param[m->slice[i].param], *q = &train->param[train->slice[k].param];
        const bool coded = train->graph->value[q->value].t.codes;
        if (p->count != q->count && (coded || lm_slice_count(&m->slice[i]) % 64))
            return false;
    }
    return true;
}

lm_code lm_reference_model_outlook(const lm_config *c, const lm_model *train,
                                   const lm_model_source *src, bool shares, size_t arena,
                                   size_t *bytes, lm_err *e)
{
    lm_build how = build_of(train, shares);
    lm_model *m = NULL;
    how.codes = src;
    if (!lm_model_build(c, &how, &m, e))
        lm_scorer_beside(m, !(shares && has_all(train, m)), arena, bytes, e);
    lm_model_free(m);
    return e->code;
}
