/* SPDX-License-Identifier: Apache-2.0 */
/* validate.c -- held-out sets, opened once and scored repeatedly. */
#include "merge/validate.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "base/file.h"
#include "base/mem.h"
#include "base/stop.h"
#include "format/input.h"
#include "format/tokens.h"
#include "model/store.h"
#include "text/tokenizer_match.h"
#include "train/score.h"

/* A document of a set: ids [at, at + n). */
typedef struct {
    int64_t at, n;
} span;

typedef struct {
    const char *path;
    lm_tokens *shards; /* NULL: text, in ids */
    lm_ids ids;
    span *doc;
    size_t n_docs, cap_docs;
    int64_t tokens; /* targets */
} set;

struct lm_validator {
    lm_validator_opts o;
    const lm_config *config;
    lm_backend *b;
    lm_evaluator eval;
    lm_store *weights;
    bool *have; /* by slice: it was set */
    lm_scorer *scorer;
    set *sets;
};

/* ---- sets ---- */

/* Add a document of n ids, up to the limit; *full: it is reached. */
static lm_code add_doc(const lm_validator *v, set *s, int64_t at, int64_t n, bool *full, lm_err *e)
{
    int64_t left = v->o.max_tokens ? v->o.max_tokens - s->tokens : INT64_MAX - 1;
    if (n > left + 1)
        n = left + 1;
    *full = n - 1 >= left;
    if (n < 2)
        return LM_OK;
    if (lm_grow(&s->doc, &s->cap_docs, s->n_docs + 1, sizeof *s->doc, "documents", e))
        return e->code;
    s->doc[s->n_docs++] = (span){ at, n };
    s->tokens += n - 1;
    return LM_OK;
}

static lm_code open_shards(lm_validator *v, set *s, lm_err *e)
{
    bool full = false;
    int64_t eos = v->o.tok ? lm_tokenizer_eos(v->o.tok) : -1;
    const lm_token_reader r = { "the merged model", v->config->vocab, v->o.tok };
    lm_code rc = lm_tokens_open(s->path, LM_TOKENS_AUTO, eos, &s->shards, e);
    if (!rc && v->o.check_tokenizer)
        rc = lm_token_reader_check(&r, s->shards, e);
    if (!rc)
        rc = lm_tokens_index(s->shards, v->o.par, e);
    for (int64_t d = 0; !rc && !full && d < lm_tokens_docs(s->shards); d++) {
        int64_t at = lm_tokens_doc_start(s->shards, d);
        rc = add_doc(v, s, at, lm_tokens_doc_start(s->shards, d + 1) - at, &full, e);
    }
    return rc;
}

static lm_code read_text(lm_validator *v, set *s, lm_input *in, lm_tok_scratch *scratch, lm_err *e)
{
    lm_doc doc = { 0 };
    bool got = true, full = false;
    lm_code rc = LM_OK;
    while (!rc && !full && !lm_stopping() && !(rc = lm_input_read(in, &doc, &got, e)) && got) {
        int64_t at = (int64_t)s->ids.n;
        rc = lm_tokenizer_encode(v->o.tok, scratch, doc.text, doc.len, true, &s->ids, e);
        if (!rc)
            rc = add_doc(v, s, at, (int64_t)s->ids.n - at, &full, e);
    }
    lm_doc_fini(&doc);
    return rc;
}

static lm_code open_text(lm_validator *v, set *s, lm_err *e)
{
    lm_input *in = NULL;
    lm_tok_scratch *scratch = NULL;
    const lm_input_opts usual = { 0 };
    if (!v->o.tok)
        return lm_fail(e, LM_EUSAGE, s->path, "give shards made by shard-data",
                       "text needs a tokenizer, but the models have none");
    lm_code rc = lm_input_open(&usual, &s->path, 1, &in, e);
    if (!rc)
        rc = lm_tok_scratch_new(v->o.tok, &scratch, e);
    if (!rc)
        rc = read_text(v, s, in, scratch, e);
    lm_tok_scratch_free(scratch);
    lm_input_close(in);
    return rc;
}

static lm_code open_set(lm_validator *v, set *s, lm_err *e)
{
    if (lm_input_is_text(s->path) ? open_text(v, s, e) : open_shards(v, s, e))
        return e->code;
    if (!s->tokens && !lm_stopping())
        return lm_fail(e, LM_EFORMAT, s->path, "give more text",
                       "no data for validation: no document has two tokens");
    return LM_OK;
}

/* ---- life ---- */

static lm_code build(lm_validator *v, lm_err *e)
{
    const lm_config *c = v->config;
    lm_validator_opts *o = &v->o;
    if (!o->seq)
        o->seq = c->max_positions < 1024 ? c->max_positions : 1024;
    if (!o->stride)
        o->stride = (o->seq + 1) / 2;
    if (o->stride > o->seq)
        return lm_fail(e, LM_EUSAGE, "stride", "give at most the window's length",
                       "%" PRId64 " is more than the window of %" PRId64, o->stride, o->seq);
    const lm_build b = { .batch = o->batch ? o->batch : 8,
                         .seq = o->seq,
                         .documents = true,
                         .precision = { .low = o->dtype } };
    if (lm_alloc_n(&v->sets, (size_t)o->sets, sizeof *v->sets, "validation sets", e))
        return e->code;
    for (int i = 0; i < o->sets; i++) {
        v->sets[i].path = o->path[i];
        if (open_set(v, &v->sets[i], e))
            return e->code;
    }
    if (lm_evaluator_new(c, &b, v->b, &v->eval, e) ||
        lm_store_new(v->eval.model, v->b, &(lm_store_opts){ .par = v->o.par }, &v->weights, e) ||
        lm_alloc_n(&v->have, (size_t)v->eval.model->n_slices, sizeof *v->have, "a list of tensors",
                   e))
        return e->code;
    lm_store_bind(v->weights, v->eval.model, v->eval.exec);
    return lm_scorer_new(&v->eval, o->stride, NULL, &v->scorer, e);
}

lm_code lm_validator_new(const lm_validator_opts *o, const lm_config *c, lm_backend *b,
                         lm_validator **out, lm_err *e)
{
    lm_validator *v = NULL;
    *out = NULL;
    if (lm_alloc_n(&v, 1, sizeof *v, "a validator", e))
        return e->code;
    v->o = *o;
    if (!v->o.par)
        v->o.par = b->par;
    v->config = c;
    v->b = b;
    if (build(v, e)) {
        lm_validator_free(v);
        return e->code;
    }
    *out = v;
    return LM_OK;
}

void lm_validator_free(lm_validator *v)
{
    if (!v)
        return;
    lm_scorer_free(v->scorer);
    lm_store_free(v->weights);
    lm_evaluator_fini(&v->eval);
    for (int i = 0; v->sets && i < v->o.sets; i++) {
        lm_tokens_close(v->sets[i].shards);
        lm_ids_fini(&v->sets[i].ids);
        lm_free(v->sets[i].doc);
    }
    lm_free(v->sets);
    lm_free(v->have);
    lm_free(v);
}

int64_t lm_validator_tokens(const lm_validator *v, int i)
{
    return v->sets[i].tokens;
}

int64_t lm_validator_seq(const lm_validator *v)
{
    return v->o.seq;
}

int64_t lm_validator_stride(const lm_validator *v)
{
    return v->o.stride;
}

/* ---- weights ---- */

bool lm_validator_wants(const lm_validator *v, const char *name)
{
    return lm_model_slice(v->eval.model, name) >= 0;
}

lm_code lm_validator_put(lm_validator *v, const char *name, int ndim, const int64_t *dim,
                         lm_dtype dtype, const void *data, lm_err *e)
{
    const lm_model *m = v->eval.model;
    int i = lm_model_slice(m, name);
    if (i < 0 && lm_model_ignores(m, name))
        return LM_OK;
    if (i < 0)
        return lm_fail(e, LM_EUSAGE, name, NULL, "is not a tensor of a %s model",
                       lm_arch_name(m->config.arch));
    bool same = ndim == m->slice[i].ndim;
    for (int k = 0; same && k < ndim; k++)
        same = dim[k] == m->slice[i].dim[k];
    if (!same)
        return lm_fail(e, LM_EUSAGE, name, NULL, "has another shape than config.json requires");
    v->have[i] = true;
    return lm_store_put(v->weights, i, dtype, data, e);
}

/* ---- losses ---- */

static lm_code score_set(lm_validator *v, const set *s, double *loss, lm_err *e)
{
    lm_score sum = { 0 };
    lm_code rc = LM_OK;
    for (size_t d = 0; !rc && d < s->n_docs && !lm_stopping(); d++)
        rc = s->shards
                 ? lm_scorer_add_tokens(v->scorer, s->shards, s->doc[d].at, s->doc[d].n, &sum, e)
                 : lm_scorer_add(v->scorer, s->ids.v + s->doc[d].at, s->doc[d].n, 1, &sum, e);
    if (!rc)
        rc = lm_scorer_flush(v->scorer, e);
    lm_err_in(e, "%s", s->path);
    *loss = sum.nll / (double)sum.tokens;
    return rc;
}

lm_code lm_validator_run(lm_validator *v, double *loss, lm_sink *sink, lm_err *e)
{
    const lm_model *m = v->eval.model;
    for (int i = 0; i < m->n_slices; i++)
        if (!v->have[i])
            return lm_fail(e, LM_EUSAGE, m->slice[i].name, NULL, "is missing among the weights");
    for (int i = 0; i < v->o.sets && !lm_stopping(); i++) {
        if (score_set(v, &v->sets[i], &loss[i], e))
            return e->code;
        lm_progress(sink, "validate", i + 1, v->o.sets, "sets", NULL);
    }
    return LM_OK;
}

double lm_validator_mean(const lm_validator *v, const double *loss, bool equal)
{
    double sum = 0, weight = 0;
    for (int i = 0; i < v->o.sets; i++) {
        double w = equal ? 1 : (double)v->sets[i].tokens;
        sum += w * loss[i];
        weight += w;
    }
    return sum / weight;
}
