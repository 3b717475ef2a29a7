/* SPDX-License-Identifier: Apache-2.0 */
/* reference_model.c -- an evaluation graph with weights of its own, or with those that an adapter
 * leaves frozen. */
#include "tune/align/reference_model.h"

#include <inttypes.h>
#include <string.h>

#include "base/hash.h"
#include "base/mem.h"
#include "text/tokenizer_source.h"

/* Without an adapter; weights that are shared are kept as the training keeps them. */
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

static lm_build adapted_build(const lm_reference_model *r, const lm_model *train)
{
    lm_build how = build_of(train, r->shares);
    lm_loaded_build(&r->weights, &how);
    return how;
}

static lm_code build(lm_reference_model *r, const lm_objective_site *site, lm_err *e)
{
    lm_scorer *s = &r->scorer;
    lm_build how = adapted_build(r, site->model);
    how.backend = site->backend;
    if (lm_model_build(&r->weights.config, &how, &s->model, e) ||
        lm_plan_make(s->model->graph, site->backend, &s->model->loss, 1, &s->plan, e) ||
        lm_evaluator_of(s->model, &s->plan, site->backend, site->exec, &s->eval, e))
        return e->code;
    s->made = true;
    s->comm = site->comm;
    r->weights.base = r->shares ? site->store : NULL;
    if (lm_loaded_weights(&r->weights, s->model, site->backend, e))
        return e->code;
    lm_store_bind(r->weights.store, s->model, s->eval.exec);
    return LM_OK;
}

static lm_code check(const lm_loaded *w, const char *path, const lm_config *config,
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

static lm_code attach(lm_reference_model *r, const char *adapter, lm_err *e)
{
    if (lm_tune_use_open(adapter, NULL, &r->weights, &r->use, e))
        return e->code;
    r->adapted = true;
    return r->use.adapter.virtual_tokens
               ? lm_fail(e, LM_EUSAGE, adapter, "use a reference without it",
                         "has virtual tokens in front of texts")
               : LM_OK;
}

lm_code lm_reference_model_read(lm_reference_model *r, const char *path, const char *adapter,
                                const lm_config *config, const lm_tokenizer *tok, lm_err *e)
{
    return lm_loaded_open(path, NULL, &r->weights, e) || check(&r->weights, path, config, tok, e) ||
                   (adapter && attach(r, adapter, e))
               ? e->code
               : LM_OK;
}

lm_code lm_reference_model_open(lm_reference_model *r, const char *path, const char *adapter,
                                const lm_tokenizer *tok, const lm_objective_site *site, lm_err *e)
{
    if (!lm_reference_model_read(r, path, adapter, site->config, tok, e)) {
        r->weights.par = site->par;
        build(r, site, e);
    }
    if (e->code)
        lm_reference_model_close(r);
    return e->code;
}

void lm_reference_model_close(lm_reference_model *r)
{
    lm_scorer_close(&r->scorer);
    if (r->adapted)
        lm_tune_use_fini(&r->use);
    r->adapted = false;
    lm_loaded_fini(&r->weights);
}

/* Append to `to` what of `from` has an effect without training, also of objects in it: those of bottleneck adapters have
 * their own "config".  Nonzero: no memory. */
static int keep_lasting(json_t *to, const json_t *from)
{
    json_t *v, *inner;
    const char *key;
    int bad = 0;
    json_object_foreach((json_t *)(uintptr_t)from, key, v)
    {
        if (strstr(key, "dropout"))
            continue;
        inner = json_is_object(v) ? json_object() : json_incref(v);
        bad |= json_object_set_new(to, key, inner) || (inner != v && keep_lasting(inner, v));
    }
    return bad;
}

/* The adapter's configuration without what changes no number of a model that does not train: names and places,
 * notes for other programs, and what is dropped in training. */
static lm_code add_config(lm_hash128 *hash, const json_t *config, lm_err *e)
{
    static const char *const other[] = { "auto_mapping",
                                         "base_model_name_or_path",
                                         "inference_mode",
                                         "model_name",
                                         "name",
                                         "peft_version",
                                         "revision",
                                         "task_type",
                                         "tokenizer_kwargs",
                                         "tokenizer_name_or_path" };
    lm_buf text = { 0 };
    json_t *rest = json_object();
    int bad = !rest || keep_lasting(rest, config);
    for (size_t i = 0; i < sizeof other / sizeof *other; i++)
        json_object_del(rest, other[i]);
    lm_code rc = bad ? lm_fail(e, LM_ELIMIT, "adapter_config.json", NULL, "no memory")
                     : lm_tune_config_text(rest, &text, e);
    if (!rc)
        lm_hash128_add(hash, text.data, text.len);
    lm_buf_fini(&text);
    json_decref(rest);
    return rc;
}

lm_code lm_reference_model_digest(lm_reference_model *r, uint8_t digest[16], lm_err *e)
{
    const lm_st *st = r->adapted ? r->use.adapter.tensors : NULL;
    lm_hash128 hash;
    char *data = NULL;
    if (lm_model_source_weights_digest(r->weights.src, digest, e) || !st)
        return e->code;
    lm_hash128_init(&hash);
    lm_hash128_add(&hash, digest, 16);
    if (add_config(&hash, lm_tune_folder_config(r->use.folder), e))
        return e->code;
    for (size_t k = 0; k < lm_st_count(st) && !e->code; k++) {
        const lm_st_tensor *t = lm_st_at(st, k);
        if (!lm_alloc_n(&data, (size_t)t->bytes + 1, 1, "a tensor", e) &&
            !lm_st_read(st, t, 0, data, (size_t)t->bytes, e)) {
            lm_hash128_add(&hash, t->name, strlen(t->name) + 1);
            lm_hash128_add(&hash, data, (size_t)t->bytes);
        }
        lm_free(data);
        data = NULL;
    }
    lm_hash128_end(&hash, digest);
    return e->code;
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

/* A tensor that an adapter brings. */
static bool is_own(const lm_model *m, int i)
{
    return m->slice[i].of_adapter || (m->build.trainable && m->slice[i].trains);
}

/* True if the training has all tensors of the reference but its adapter's, frozen, where one store
 * can serve both. */
static bool has_all(const lm_model *train, const lm_model *m)
{
    for (int i = 0; i < m->n_slices; i++) {
        const int k = lm_model_slice(train, m->slice[i].name);
        if (is_own(m, i))
            continue;
        if (k < 0 || train->slice[k].trains)
            return false;
        const lm_param *p = &m->param[m->slice[i].param], *q = &train->param[train->slice[k].param];
        const bool coded = train->graph->value[q->value].t.codes;
        if (p->count != q->count && (coded || lm_slice_count(&m->slice[i]) % 64))
            return false;
    }
    return true;
}

lm_code lm_reference_model_outlook(const lm_reference_model *r, const lm_model *train, size_t arena,
                                   size_t *bytes, lm_err *e)
{
    const lm_build how = adapted_build(r, train);
    lm_model *m = NULL;
    if (lm_model_build(&r->weights.config, &how, &m, e))
        return e->code;
    const bool borrows = r->shares && has_all(train, m);
    lm_scorer_beside(m, !borrows, arena, bytes, e);
    for (int i = 0; borrows && i < m->n_slices; i++)
        *bytes +=
            is_own(m, i) ? lm_plain_bytes(how.precision.low, lm_slice_count(&m->slice[i])) : 0;
    lm_model_free(m);
    return e->code;
}
