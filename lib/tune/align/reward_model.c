/* SPDX-License-Identifier: Apache-2.0 */
/* reward_model.c -- scores of texts by a model that stays as it is. */
#include "tune/align/reward_model.h"

#include <math.h>
#include <string.h>

#include "base/file.h"
#include "base/mem.h"
#include "base/stop.h"
#include "text/tokenizer_source.h"
#include "tune/align/scorer.h"
#include "tune/use.h"

struct lm_reward_model {
    lm_loaded weights;
    lm_tune_use use; /* of an adapter */
    bool adapted;
    char *base, *adapter; /* paths; adapter NULL: none */
    lm_scorer scorer;
};

/* ---- opening ---- */

/* A path that exists is one model, whatever its name. */
static lm_code split(lm_reward_model *r, const char *spec, lm_err *e)
{
    const char *plus = lm_path_exists(spec) ? NULL : strrchr(spec, '+');
    if (lm_strdup(&r->base, spec, e) || !plus)
        return e->code;
    r->base[plus - spec] = '\0';
    return lm_strdup(&r->adapter, plus + 1, e);
}

/* The head of a language model that an adapter brings. */
static lm_code make_head(lm_reward_model *r, lm_err *e)
{
    json_t *config = json_deep_copy(lm_model_source_config(r->weights.src));
    if (!config)
        return lm_fail(e, LM_ELIMIT, "config.json", NULL, "no memory for a copy");
    lm_code rc = lm_config_make_scores(&r->weights.config, config, e);
    json_decref(config);
    return rc;
}

static bool has_head(const lm_tune_use *u)
{
    for (size_t i = 0; i < lm_st_count(u->adapter.tensors); i++)
        if (strstr(lm_st_at(u->adapter.tensors, i)->name, "score.weight"))
            return true;
    return false;
}

static lm_code fail_head(const char *path, lm_err *e)
{
    return lm_fail(e, LM_EUSAGE, path, "train one with the loss reward",
                   "gives no scores to texts: it is no reward model");
}

static lm_code open_model(lm_reward_model *r, const lm_tokenizer *tok, lm_err *e)
{
    bool same = false;
    if (lm_loaded_open(r->base, NULL, &r->weights, e))
        return e->code;
    if (!r->adapter && !r->weights.config.scores)
        return fail_head(r->base, e);
    if (lm_tokenizer_is_of(r->weights.src, tok, &same, e))
        return e->code;
    if (!same)
        return lm_fail(e, LM_EUSAGE, r->base, "use a reward model with the same tokenizer",
                       "its tokens are not those of the model");
    if (!r->adapter)
        return LM_OK;
    if (make_head(r, e) || lm_tune_use_open(r->adapter, NULL, &r->weights, &r->use, e))
        return e->code;
    r->adapted = true;
    return has_head(&r->use) ? LM_OK : fail_head(r->adapter, e);
}

lm_code lm_reward_model_open(const char *spec, const lm_tokenizer *tok, lm_reward_model **out,
                             lm_err *e)
{
    lm_reward_model *r = NULL;
    *out = NULL;
    if (!tok)
        return lm_fail(e, LM_EUSAGE, spec, NULL, "there are no tokens that it could read");
    if (lm_alloc_n(&r, 1, sizeof *r, "a reward model", e))
        return e->code;
    if (split(r, spec, e) || open_model(r, tok, e)) {
        lm_reward_model_close(r);
        return e->code;
    }
    *out = r;
    return LM_OK;
}

void lm_reward_model_close(lm_reward_model *r)
{
    if (!r)
        return;
    lm_scorer_close(&r->scorer);
    if (r->adapted)
        lm_tune_use_fini(&r->use);
    lm_loaded_fini(&r->weights);
    lm_free(r->base);
    lm_free(r->adapter);
    lm_free(r);
}

/* ---- its graph ---- */

static lm_code build(const lm_reward_model *r, const lm_model *train, lm_model **out, lm_err *e)
{
    const lm_build *t = &train->build;
    lm_build how = { .mode = LM_MODE_EVAL,
                     .batch = t->batch,
                     .seq = t->seq + 1, /* the last token of a text has a row, too */
                     .precision = t->precision,
                     .documents = true,
                     .backend = t->backend };
    lm_loaded_build(&r->weights, &how);
    return lm_model_build(&r->weights.config, &how, out, e);
}

lm_code lm_reward_model_bytes(const lm_reward_model *r, const lm_model *train, size_t arena,
                              size_t *bytes, lm_err *e)
{
    lm_model *m = NULL;
    if (!build(r, train, &m, e))
        lm_scorer_beside(m, true, arena, bytes, e);
    lm_model_free(m);
    return e->code;
}

lm_code lm_reward_model_load(lm_reward_model *r, const lm_objective_site *site, lm_err *e)
{
    lm_scorer *s = &r->scorer;
    r->weights.par = site->par;
    if (build(r, site->model, &s->model, e) ||
        lm_plan_make(s->model->graph, site->backend, &s->model->loss, 1, &s->plan, e) ||
        lm_evaluator_of(s->model, &s->plan, site->backend, site->exec, &s->eval, e))
        return e->code;
    s->made = true;
    s->comm = site->comm;
    if (lm_loaded_weights(&r->weights, s->model, site->backend, e))
        return e->code;
    lm_store_bind(r->weights.store, s->model, s->eval.exec);
    return LM_OK;
}

/* ---- scores ---- */

/* The text with one more id, whose row has the score: that of the last token that is not
 * padding. */
static int64_t extend(const lm_reward_item *x, int64_t pad, uint32_t *ids, lm_align_text *out)
{
    int64_t last = x->n_whole - 1;
    while (last > 0 && x->whole[last] == pad)
        last--;
    memcpy(ids, x->whole, (size_t)x->n_whole * sizeof *ids);
    ids[x->n_whole] = x->whole[x->n_whole - 1];
    *out = (lm_align_text){ ids, x->n_whole + 1, last + 1 };
    return x->n_whole + 1;
}

lm_code lm_reward_model_score(lm_reward_model *r, const lm_reward_item *item, int64_t n,
                              double *out, lm_err *e)
{
    uint32_t *ids = NULL;
    lm_align_text *text = NULL;
    double *number = NULL, **of = NULL;
    size_t all = 0;
    bool whole = false;
    for (int64_t i = 0; i < n; i++)
        all += (size_t)item[i].n_whole + 1;
    if (!lm_alloc_n(&ids, all, sizeof *ids, "texts", e) &&
        !lm_alloc_n(&text, (size_t)n, sizeof *text, "texts", e) &&
        !lm_alloc_n(&number, all, sizeof *number, "scores", e) &&
        !lm_alloc_n(&of, (size_t)n, sizeof *of, "scores", e)) {
        for (int64_t i = 0, at = 0; i < n; i++) {
            of[i] = number + at;
            *of[i] = NAN;
            at += extend(&item[i], r->weights.config.pad, ids + at, &text[i]);
        }
        lm_texts_score(&r->scorer.eval, r->scorer.comm, text, n, of, &whole, e);
        for (int64_t i = 0; i < n; i++)
            out[i] = -*of[i]; /* as losses are read: what a row gives, negated */
        for (int64_t i = 0; i < n && !e->code && whole; i++)
            if (!isfinite(out[i]))
                lm_fail(e, LM_ENUMERIC, r->base, "find its weights that are not finite",
                        "the reward of completion %lld is %g", (long long)i + 1, out[i]);
    }
    lm_free(ids);
    lm_free(text);
    lm_free(number);
    lm_free(of);
    return e->code;
}
