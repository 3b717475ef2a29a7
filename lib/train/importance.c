/* SPDX-License-Identifier: Apache-2.0 */
/* importance.c -- see importance.h. */
#include "train/importance.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/file.h"
#include "base/mem.h"
#include "base/stop.h"
#include "base/text.h"
#include "format/input.h"
#include "format/input_files.h"
#include "format/tokens.h"
#include "model/rotary.h"
#include "model/store.h"
#include "op/ops.h"
#include "text/tokenizer.h"
#include "text/tokenizer_match.h"
#include "train/batch.h"

enum { USUAL_SEQ = 512 };

/* One linear layer: its input, and the sums of squares of the input's columns. */
typedef struct {
    lm_vid x;
    int param; /* index of the weight's parameter in the model */
    int64_t cols;
    double *sum;
} probe;

typedef struct {
    lm_import *m;
    lm_backend *b;
    int64_t seq;
    lm_model *model;
    lm_exec *exec;
    lm_store *weights;
    lm_batch batch;
    lm_rotary rope;
    probe *probe;
    size_t n, cap;
    lm_vid *keep; /* the inputs and the loss */
    int64_t rows; /* added so far */
} collector;

/* ---- The tokens ---- */

static lm_code open_tokenizer(const lm_import *m, lm_tokenizer **out, lm_err *e)
{
    const lm_side_file *json = lm_import_side(m, "tokenizer.json");
    const lm_side_file *config = lm_import_side(m, "tokenizer_config.json");

    if (!json)
        return lm_fail(e, LM_EUSAGE, m->path, "name a tokenizer, or give token shards",
                       "it has no tokenizer for the calibration text");
    return lm_tokenizer_from_json(json->data.data, json->data.len,
                                  config ? config->data.data : NULL, config ? config->data.len : 0,
                                  m->path, out, e);
}

static lm_code read_text(const lm_import *m, const char *path, size_t most, lm_ids *ids, lm_err *e)
{
    const lm_input_opts o = { 0 };
    lm_tokenizer *tok = NULL;
    lm_tok_scratch *scratch = NULL;
    lm_input *in = NULL;
    lm_doc doc = { 0 };
    bool got = true;
    lm_code rc = open_tokenizer(m, &tok, e);

    if (!rc)
        rc = lm_tok_scratch_new(tok, &scratch, e);
    if (!rc)
        rc = lm_input_open(&o, &path, 1, &in, e);
    while (!rc && ids->n < most && !lm_stopping()) {
        rc = lm_input_read(in, &doc, &got, e);
        if (rc || !got)
            break;
        rc = lm_tokenizer_encode(tok, scratch, doc.text, doc.len, true, ids, e);
    }
    lm_doc_fini(&doc);
    lm_input_close(in);
    lm_tok_scratch_free(scratch);
    lm_tokenizer_free(tok);
    return rc;
}

/* Check that the tokens were made for this model. */
static lm_code check_shards(const lm_import *m, const lm_tokens *t, lm_err *e)
{
    lm_token_reader r = { .name = m->path, .vocab = m->config.vocab };
    lm_tokenizer *tok = NULL;
    lm_code rc = lm_import_side(m, "tokenizer.json") ? open_tokenizer(m, &tok, e) : LM_OK;

    r.tok = tok;
    if (!rc)
        rc = lm_token_reader_check(&r, t, e);
    lm_tokenizer_free(tok);
    return rc;
}

static lm_code read_shards(const lm_import *m, const char *path, bool check, size_t most,
                           lm_ids *ids, lm_err *e)
{
    lm_tokens *t = NULL;
    lm_code rc = lm_tokens_open(path, LM_TOKENS_AUTO, -1, &t, e);

    if (!rc && check)
        rc = check_shards(m, t, e);
    if (!rc) {
        size_t n = (size_t)lm_tokens_count(t);
        n = n < most ? n : most;
        rc = lm_grow(&ids->v, &ids->cap, n, sizeof *ids->v, "calibration tokens", e);
        ids->n = rc ? 0 : n;
    }
    if (!rc)
        rc = lm_tokens_read(t, 0, (int64_t)ids->n, m->config.vocab, ids->v, e);
    lm_tokens_close(t);
    return rc;
}

static lm_code read_ids(const collector *c, const char *data, const lm_importance_opts *o,
                        lm_ids *ids, lm_err *e)
{
    bool few = o->chunks > 0 && o->chunks < INT64_MAX / c->seq;
    size_t most = few ? (size_t)(o->chunks * c->seq) : SIZE_MAX;
    lm_code rc = lm_input_is_text(data) ? read_text(c->m, data, most, ids, e)
                                        : read_shards(c->m, data, o->check_tokenizer, most, ids, e);

    for (size_t i = 0; !rc && i < ids->n; i++)
        if (ids->v[i] >= (uint64_t)c->m->config.vocab)
            rc = lm_fail(e, LM_EFORMAT, data, "give the model's own tokenizer",
                         "token %" PRIu32 " is not in the model's vocabulary of %" PRId64,
                         ids->v[i], c->m->config.vocab);
    if (!rc && ids->n < 2 && !lm_stopping())
        rc = lm_fail(e, LM_EUSAGE, data, "give more text",
                     "%zu tokens are too few for an importance matrix", ids->n);
    if (!rc && ids->n > most)
        ids->n = most;
    return rc;
}

/* ---- The graph ---- */

static int param_of(const lm_model *m, lm_vid v)
{
    for (int i = 0; i < m->n_params; i++)
        if (m->param[i].value == v)
            return i;
    return -1;
}

static lm_code find_probes(collector *c, lm_err *e)
{
    const lm_graph *g = c->model->graph;
    lm_code rc = LM_OK;

    for (size_t k = 0; !rc && k < g->n_nodes; k++) {
        const lm_node *n = &g->node[k];
        if (n->op != &lm_op_linear || n->phase != LM_PHASE_FORWARD)
            continue;
        rc = lm_grow(&c->probe, &c->cap, c->n + 1, sizeof *c->probe, "layers of a model", e);
        if (rc)
            break;
        probe *p = &c->probe[c->n++];
        *p = (probe){ .x = n->in[0],
                      .param = param_of(c->model, n->in[1]),
                      .cols = g->value[n->in[0]].t.dim[1] };
        rc = lm_alloc_n(&p->sum, (size_t)p->cols, sizeof *p->sum, "sums of squares", e);
    }
    if (!rc)
        rc = lm_alloc_n(&c->keep, c->n + 1, sizeof *c->keep, "layers of a model", e);
    for (size_t i = 0; !rc && i < c->n; i++)
        c->keep[i] = c->probe[i].x;
    if (!rc)
        c->keep[c->n] = c->model->loss;
    return rc;
}

static lm_code load_weights(collector *c, lm_err *e)
{
    lm_match s = { 0 };
    lm_code rc = lm_match_make(c->m, &s, e);

    if (!rc && c->m->spool)
        rc = c->m->spool(c->m, e); /* the conversion reads it again */
    if (!rc)
        rc = lm_store_new(c->model, c->b, &(lm_store_opts){ .par = c->m->par }, &c->weights, e);
    for (size_t i = 0; !rc && !lm_stopping() && i < lm_st_plan_count(c->m->plan); i++) {
        const lm_st_tensor *t = lm_st_plan_at(c->m->plan, i);
        int slice =
            s.wanted_of[i] >= 0 ? lm_model_slice(c->model, s.wanted[s.wanted_of[i]].hf) : -1;
        const void *data;
        if (slice < 0)
            continue;
        rc = c->m->load(c->m, t, &data, e);
        if (!rc)
            rc = lm_store_put(c->weights, slice, t->dtype, data, e);
    }
    lm_match_fini(&s);
    return rc;
}

/* Plain operators without joins, so that the input of every linear layer is a separate value. */
static lm_code open(collector *c, lm_err *e)
{
    const lm_build build = {
        .mode = LM_MODE_EVAL, .batch = 1, .seq = c->seq, .precision = { .low = LM_DTYPE_F32 }
    };
    lm_code rc = lm_model_build(&c->m->config, &build, &c->model, e);

    if (!rc)
        rc = find_probes(c, e);
    if (!rc)
        rc = lm_exec_new(c->model->graph, c->b, c->keep, (int)c->n + 1, &c->exec, e);
    if (!rc)
        rc = lm_batch_new(&c->batch, c->b, 1, c->seq, 0, e);
    if (!rc)
        rc = lm_rotary_new(c->model, c->b, &c->rope, e);
    if (!rc)
        rc = load_weights(c, e);
    if (rc)
        return rc;
    lm_batch_bind(&c->batch, c->model, c->exec);
    lm_rotary_bind(&c->rope, c->model, c->exec);
    lm_store_bind(c->weights, c->model, c->exec);
    return LM_OK;
}

static void shut(collector *c)
{
    lm_exec_free(c->exec);
    lm_store_free(c->weights);
    lm_model_free(c->model);
    lm_batch_fini(&c->batch);
    lm_rotary_fini(&c->rope);
    for (size_t i = 0; i < c->n; i++)
        lm_free(c->probe[i].sum);
    lm_free(c->probe);
    lm_free(c->keep);
}

/* ---- Running ---- */

typedef struct {
    const float *x;
    int64_t rows, cols;
    double *sum;
} squares;

/* Columns [begin, end) of all rows, in their order. */
static void add_squares(void *ctx, int64_t begin, int64_t end, int worker)
{
    const squares *s = ctx;

    (void)worker;
    for (int64_t r = 0; r < s->rows; r++)
        for (int64_t k = begin; k < end; k++)
            s->sum[k] += (double)s->x[r * s->cols + k] * (double)s->x[r * s->cols + k];
}

/* n ids, at most a chunk; the rest of the batch is not used. */
static lm_code run_chunk(collector *c, const uint32_t *ids, int64_t n, lm_err *e)
{
    lm_step step = { 0 };

    for (int64_t t = 0; t < c->seq; t++) {
        c->batch.tokens[t] = t < n ? (int32_t)ids[t] : 0;
        c->batch.targets[t] = t + 1 < n ? (int32_t)ids[t + 1] : -1;
        c->batch.pos[t] = (int32_t)t;
        c->batch.lo[t] = 0;
    }
    if (lm_batch_push(&c->batch, NULL, e) || lm_exec_run(c->exec, &step, e) ||
        c->b->sync(c->b, c->b->main, e))
        return e->code;
    for (size_t i = 0; i < c->n; i++) {
        probe *p = &c->probe[i];
        squares s = { lm_exec_data(c->exec, p->x), n, p->cols, p->sum };
        lm_par_for(c->m->par, p->cols, 64, add_squares, &s);
    }
    c->rows += n;
    return LM_OK;
}

static lm_code run_all(collector *c, const lm_ids *ids, int64_t *chunks, lm_err *e)
{
    int64_t n = (int64_t)ids->n, whole = n / c->seq;
    lm_code rc = LM_OK;

    *chunks = whole ? whole : 1;
    for (int64_t i = 0; !rc && i < *chunks && !lm_stopping(); i++) {
        rc = run_chunk(c, ids->v + i * c->seq, whole ? c->seq : n, e);
        lm_progress(c->m->sink, "importance", (double)(i + 1), (double)*chunks, "chunks", NULL);
    }
    return rc;
}

/* Sums of columns in GGUF's order. */
static lm_code add_entry(const collector *c, const probe *p, const lm_model_tensor *s,
                         const char *name, lm_imatrix *out, lm_err *e)
{
    double *sorted = NULL;
    if (s->order != LM_ORDER_TILED_COLS)
        return lm_imatrix_add(out, name, p->sum, (size_t)p->cols, c->rows, e);
    lm_code rc = lm_alloc_n(&sorted, (size_t)p->cols, sizeof *sorted, "sums of squares", e);
    for (int64_t k = 0; !rc && k < p->cols; k++)
        sorted[k] = p->sum[lm_model_tensor_hf_col(s, k)];
    rc = rc ? rc : lm_imatrix_add(out, name, sorted, (size_t)p->cols, c->rows, e);
    lm_free(sorted);
    return rc;
}

/* Those of all tensors that GGUF has of s, if they have its columns. */
static lm_code add_entries(const collector *c, const probe *p, const lm_model_tensor *s,
                           lm_imatrix *out, lm_err *e)
{
    char name[LM_TENSOR_NAME];
    lm_code rc = LM_OK;
    if (!strchr(s->gguf, ','))
        return add_entry(c, p, s, s->gguf, out, e);
    if (s->part != LM_PART_DELTA_IN) /* one is turned */
        return LM_OK;
    for (int k = 0; !rc && k < 2; k++)
        rc = add_entry(c, p, s, lm_model_tensor_gguf_piece(s, k, name), out, e);
    return rc;
}

/* An entry for each matrix that reads the input: q, k and v share one. */
static lm_code put_entries(const collector *c, const lm_model_tensor *wanted, size_t n_wanted,
                           lm_imatrix *out, lm_err *e)
{
    const lm_model *m = c->model;
    lm_code rc = LM_OK;

    for (size_t i = 0; i < c->n; i++)
        for (int k = 0; !rc && k < m->n_slices; k++) {
            if (m->slice[k].param != c->probe[i].param)
                continue;
            for (size_t s = 0; !rc && s < n_wanted; s++)
                if (lm_model_tensor_is(&wanted[s], m->slice[k].name))
                    rc = add_entries(c, &c->probe[i], &wanted[s], out, e);
        }
    return rc;
}

static lm_code check_finite(const collector *c, lm_err *e)
{
    for (size_t i = 0; i < c->n; i++)
        for (int64_t k = 0; k < c->probe[i].cols; k++)
            if (!isfinite(c->probe[i].sum[k]))
                return lm_fail(
                    e, LM_ENUMERIC,
                    c->model->graph->value[c->model->param[c->probe[i].param].value].name,
                    "find the weights that are not finite",
                    "column %" PRId64 " of its input is not finite", k);
    return LM_OK;
}

static lm_code give(const collector *c, const char *data, int64_t chunks, lm_imatrix **out,
                    lm_err *e)
{
    lm_model_tensor *wanted = NULL;
    size_t n = 0;
    lm_code rc = check_finite(c, e);

    if (!rc)
        rc = lm_model_tensors_make(&c->m->config, &wanted, &n, e);
    if (!rc)
        rc = lm_imatrix_new(data, c->seq, out, e);
    if (!rc)
        rc = put_entries(c, wanted, n, *out, e);
    if (!rc)
        lm_imatrix_set_chunks(*out, chunks);
    lm_free(wanted);
    return rc;
}

lm_code lm_importance_make(lm_import *m, const char *data, const lm_importance_opts *o,
                           lm_backend *b, lm_imatrix **out, lm_err *e)
{
    int64_t usual = m->config.max_positions < USUAL_SEQ ? m->config.max_positions : USUAL_SEQ;
    collector c = { .m = m, .b = b, .seq = o->seq ? o->seq : usual };
    lm_ids ids = { 0 };
    int64_t chunks = 0;
    lm_code rc = read_ids(&c, data, o, &ids, e);

    *out = NULL;
    if (!rc && !lm_stopping())
        rc = open(&c, e);
    if (!rc && !lm_stopping())
        rc = run_all(&c, &ids, &chunks, e);
    if (!rc && !lm_stopping())
        rc = give(&c, data, chunks, out, e);
    shut(&c);
    lm_ids_fini(&ids);
    if (rc) {
        lm_imatrix_free(*out);
        *out = NULL;
    }
    return rc;
}
