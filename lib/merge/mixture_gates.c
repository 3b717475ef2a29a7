/* SPDX-License-Identifier: Apache-2.0 */
/* mixture_gates.c -- see mixture_gates.h.  Hidden states are those that enter a layer: the embedding for the first, as
 * transformers counts them; the base runs in F32, one prompt after another. */
#include "merge/mixture_gates.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "base/mem.h"
#include "base/rng.h"
#include "base/stop.h"
#include "model/arch.h"
#include "model/rotary.h"
#include "model/store.h"
#include "op/ops.h"
#include "text/tokenizer_source.h"
#include "train/batch.h"

typedef struct {
    const lm_gates_spec *s;
    lm_tokenizer *tok;
    lm_tok_scratch *scratch;
    lm_ids *ids;    /* of each prompt, in the order of experts: positive, then negative ones */
    double *vector; /* [layers, width], of one expert */
    /* hidden states */
    lm_model *model;
    lm_exec *exec;
    lm_store *weights;
    lm_batch batch;
    lm_rotary rope;
    lm_vid *keep; /* of each layer, and the loss */
    int64_t seq;
    float *embed; /* cheap_embed: [vocab, width] */
} maker;

static int prompts_of(const lm_recipe_expert *x)
{
    return x->n_positive + x->n_negative;
}

static int experts_of(const lm_mixture_recipe *r)
{
    return r->n + (r->shared != NULL);
}

/* ---- Prompts ---- */

static lm_code encode(maker *m, const char *text, lm_ids *out, lm_err *e)
{
    const int64_t bos = lm_tokenizer_bos(m->tok);
    const int64_t vocab = m->s->config->vocab;

    if (bos >= 0) {
        if (lm_grow(&out->v, &out->cap, 1, sizeof *out->v, "tokens of a prompt", e))
            return e->code;
        out->v[out->n++] = (uint32_t)bos;
    }
    if (lm_tokenizer_encode(m->tok, m->scratch, text, strlen(text), false, out, e))
        return e->code;
    for (size_t i = 0; i < out->n; i++)
        if (out->v[i] >= (uint64_t)vocab)
            return lm_fail(e, LM_EFORMAT, lm_model_source_path(m->s->base), NULL,
                           "token %" PRIu32 " of a prompt is not in the vocabulary of %" PRId64,
                           out->v[i], vocab);
    if (!out->n || (int64_t)out->n > m->s->config->max_positions)
        return lm_fail(e, LM_EUSAGE, m->s->recipe->base, "give other prompts",
                       "a prompt of %zu tokens, where the model has %" PRId64 " positions", out->n,
                       m->s->config->max_positions);
    m->seq = (int64_t)out->n > m->seq ? (int64_t)out->n : m->seq;
    return LM_OK;
}

static lm_code encode_all(maker *m, lm_err *e)
{
    const lm_mixture_recipe *r = m->s->recipe;
    size_t n = 0, at = 0;
    lm_code rc = lm_tokenizer_of(m->s->base, &m->tok, e);

    if (!rc && !m->tok)
        rc = lm_fail(e, LM_EUSAGE, r->base, "copy one to it, or set gate_mode to random",
                     "it has no tokenizer for the prompts");
    if (!rc)
        rc = lm_tok_scratch_new(m->tok, &m->scratch, e);
    for (int i = 0; i < experts_of(r); i++)
        n += (size_t)prompts_of(&r->expert[i]);
    if (!rc)
        rc = lm_alloc_n(&m->ids, n + 1, sizeof *m->ids, "prompts", e);
    for (int i = 0; !rc && i < experts_of(r); i++)
        for (int k = 0; !rc && k < prompts_of(&r->expert[i]); k++) {
            const lm_recipe_expert *x = &r->expert[i];
            rc = encode(m, k < x->n_positive ? x->positive[k] : x->negative[k - x->n_positive],
                        &m->ids[at++], e);
        }
    return rc;
}

/* ---- Hidden states ---- */

/* What enters each layer: the residual stream that its first norm reads. */
static lm_code find_states(maker *m, lm_err *e)
{
    const lm_graph *g = m->model->graph;
    const int64_t layers = m->s->config->layers;

    if (lm_alloc_n(&m->keep, (size_t)layers + 1, sizeof *m->keep, "layers", e))
        return e->code;
    for (int64_t l = 0; l <= layers; l++)
        m->keep[l] = l < layers ? LM_NONE : m->model->loss;
    for (size_t k = 0; k < g->n_nodes; k++) {
        const lm_node *n = &g->node[k];
        if (n->op == &lm_op_norm && n->layer < layers && m->keep[n->layer] == LM_NONE)
            m->keep[n->layer] = n->out[2] >= 0 ? n->out[2] : n->in[0];
    }
    for (int64_t l = 0; l < layers; l++)
        if (m->keep[l] == LM_NONE)
            return lm_fail(e, LM_EBUG, "layers", NULL, "layer %" PRId64 " has no norm", l);
    return LM_OK;
}

static lm_code open_model(maker *m, lm_err *e)
{
    const lm_build build = {
        .mode = LM_MODE_EVAL, .batch = 1, .seq = m->seq, .precision = { .low = LM_DTYPE_F32 }
    };
    const lm_gates_spec *s = m->s;

    if (lm_model_build(s->config, &build, &m->model, e) || find_states(m, e) ||
        lm_exec_new(m->model->graph, s->backend, m->keep, (int)s->config->layers + 1, &m->exec,
                    e) ||
        lm_batch_new(&m->batch, s->backend, 1, m->seq, 0, e) ||
        lm_rotary_new(m->model, s->backend, &m->rope, e) ||
        lm_store_new(m->model, s->backend, &(lm_store_opts){ .par = s->par }, &m->weights, e) ||
        lm_store_load(m->weights, s->base, e))
        return e->code;
    lm_batch_bind(&m->batch, m->model, m->exec);
    lm_rotary_bind(&m->rope, m->model, m->exec);
    lm_store_bind(m->weights, m->model, m->exec);
    return LM_OK;
}

/* Causal attention does not see what follows the prompt. */
static lm_code run_prompt(maker *m, const lm_ids *ids, lm_err *e)
{
    const int64_t n = (int64_t)ids->n;
    lm_step step = { 0 };

    for (int64_t t = 0; t < m->seq; t++) {
        m->batch.tokens[t] = t < n ? (int32_t)ids->v[t] : 0;
        m->batch.targets[t] = 0;
        m->batch.pos[t] = (int32_t)t;
        m->batch.lo[t] = 0;
    }
    return lm_batch_push(&m->batch, NULL, e) || lm_exec_run(m->exec, &step, e) ||
                   m->s->backend->sync(m->s->backend, m->s->backend->main, e)
               ? e->code
               : LM_OK;
}

/* Add `share` times the states of the prompt that ran. */
static void add_states(maker *m, int64_t tokens, double share)
{
    const int64_t width = m->s->config->width;
    const bool mean = m->s->recipe->mode == LM_GATE_HIDDEN_AVG;
    const int64_t from = mean ? 0 : tokens - 1;

    for (int64_t l = 0; l < m->s->config->layers; l++) {
        const float *x = lm_exec_data(m->exec, m->keep[l]);
        for (int64_t t = from; t < tokens; t++)
            for (int64_t k = 0; k < width; k++)
                m->vector[l * width + k] +=
                    share / (double)(tokens - from) * (double)x[t * width + k];
    }
}

static void normalise(double *v, int64_t n)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++)
        sum += v[i] * v[i];
    sum = fmax(sqrt(sum), 1e-8);
    for (int64_t i = 0; i < n; i++)
        v[i] /= sum;
}

/* The difference of the means over positive and negative prompts. */
static lm_code hidden_of(maker *m, const lm_recipe_expert *x, const lm_ids *ids, lm_err *e)
{
    const int64_t width = m->s->config->width;
    lm_code rc = LM_OK;

    memset(m->vector, 0, (size_t)(m->s->config->layers * width) * sizeof *m->vector);
    for (int k = 0; !rc && !lm_stopping() && k < prompts_of(x); k++) {
        rc = run_prompt(m, &ids[k], e);
        if (!rc)
            add_states(m, (int64_t)ids[k].n,
                       k < x->n_positive ? 1.0 / x->n_positive : -1.0 / x->n_negative);
    }
    for (int64_t l = 0; l < m->s->config->layers; l++)
        normalise(m->vector + l * width, width);
    return rc;
}

/* ---- Embeddings ---- */

static lm_code open_embed(maker *m, lm_err *e)
{
    const lm_config *c = m->s->config;
    char name[LM_TENSOR_NAME];
    lm_tensor_hf_name(c->arch, LM_PART_EMBED, -1, false, name);
    const lm_st_tensor *t = lm_model_source_find(m->s->base, name);

    if (!t)
        t = lm_model_source_find(m->s->base, lm_arch_rootless(name));
    if (!t || t->count != c->vocab * c->width)
        return lm_fail(e, LM_EUSAGE, m->s->recipe->base, NULL, "tensor \"%s\" is missing", name);
    return lm_alloc_n(&m->embed, (size_t)t->count, sizeof *m->embed, "an embedding", e)
               ? e->code
               : lm_model_source_load(m->s->base, t, LM_DTYPE_F32, m->embed, e);
}

/* A unit vector of the positive prompts minus one of the negative ones. */
static lm_code embed_of(maker *m, const lm_recipe_expert *x, const lm_ids *ids, lm_err *e)
{
    const int64_t width = m->s->config->width;
    double *sum = NULL;

    if (lm_alloc_n(&sum, (size_t)(2 * width), sizeof *sum, "sums of embeddings", e))
        return e->code;
    for (int k = 0; k < prompts_of(x); k++)
        for (size_t t = 0; t < ids[k].n; t++)
            for (int64_t i = 0; i < width; i++)
                sum[(k < x->n_positive ? 0 : width) + i] +=
                    (double)m->embed[(int64_t)ids[k].v[t] * width + i];
    normalise(sum, width);
    if (x->n_negative)
        normalise(sum + width, width);
    for (int64_t i = 0; i < width; i++)
        sum[i] -= sum[width + i];
    normalise(sum, width);
    for (int64_t l = 0; l < m->s->config->layers; l++)
        memcpy(m->vector + l * width, sum, (size_t)width * sizeof *sum);
    lm_free(sum);
    return LM_OK;
}

/* ---- Random ---- */

static void random_of(maker *m, int expert)
{
    const lm_config *c = m->s->config;
    const lm_rng r = lm_rng_make(m->s->seed, "gates", (uint64_t)expert);
    const double most = sqrt(1 / (double)c->width);

    for (int64_t i = 0; i < c->layers * c->width; i++)
        m->vector[i] = m->s->recipe->mode == LM_GATE_RANDOM
                           ? lm_rng_normal(r, (uint64_t)i)
                           : most * (2 * lm_rng_uniform(r, (uint64_t)i) - 1);
}

/* ---- All experts ---- */

static lm_code make(maker *m, float *gates, float *switches, lm_err *e)
{
    const lm_mixture_recipe *r = m->s->recipe;
    const int64_t width = m->s->config->width, layers = m->s->config->layers;
    const bool hidden = r->mode <= LM_GATE_HIDDEN_AVG, embed = r->mode == LM_GATE_EMBED;
    const lm_ids *ids = m->ids;
    lm_code rc = LM_OK;

    for (int i = 0; !rc && !lm_stopping() && i < experts_of(r); i++) {
        const lm_recipe_expert *x = &r->expert[i];
        if (hidden)
            rc = hidden_of(m, x, ids, e);
        else if (embed)
            rc = embed_of(m, x, ids, e);
        else
            random_of(m, i);
        ids += hidden || embed ? prompts_of(x) : 0;
        for (int64_t l = 0; !rc && l < layers; l++)
            for (int64_t k = 0; k < width; k++) {
                float *to = i < r->n ? gates + (l * r->n + i) * width : switches + l * width;
                to[k] = (float)m->vector[l * width + k];
            }
        lm_progress(m->s->sink, "gates", (double)(i + 1), (double)experts_of(r), "experts", NULL);
    }
    return rc;
}

/* Experts whose rows are nearly the same are chosen together, or one of them never. */
static void warn_alike(const lm_gates_spec *s, const float *gates)
{
    const int64_t width = s->config->width, n = s->recipe->n;
    double worst = 0;
    int64_t at[3] = { 0 };

    for (int64_t l = 0; l < s->config->layers; l++)
        for (int64_t a = 0; a < n; a++)
            for (int64_t b = 0; b < a; b++) {
                double dot = 0;
                for (int64_t k = 0; k < width; k++)
                    dot += (double)gates[(l * n + a) * width + k] *
                           (double)gates[(l * n + b) * width + k];
                if (dot > worst) {
                    worst = dot;
                    at[0] = l;
                    at[1] = b;
                    at[2] = a;
                }
            }
    if (worst > 0.98)
        lm_log(s->sink, LM_LOG_WARN,
               "layer %" PRId64 ": the gates of experts %" PRId64 " and %" PRId64
               " have a cosine of %.3f: their prompts may be too similar",
               at[0], at[1], at[2], worst);
}

static void finish(maker *m, size_t prompts)
{
    lm_exec_free(m->exec);
    lm_store_free(m->weights);
    lm_model_free(m->model);
    lm_batch_fini(&m->batch);
    lm_rotary_fini(&m->rope);
    for (size_t i = 0; m->ids && i < prompts; i++)
        lm_ids_fini(&m->ids[i]);
    lm_free(m->ids);
    lm_free(m->keep);
    lm_free(m->embed);
    lm_free(m->vector);
    lm_tok_scratch_free(m->scratch);
    lm_tokenizer_free(m->tok);
}

lm_code lm_mixture_gates(const lm_gates_spec *s, float *gates, float *switches, lm_err *e)
{
    const lm_mixture_recipe *r = s->recipe;
    const bool hidden = r->mode <= LM_GATE_HIDDEN_AVG, embed = r->mode == LM_GATE_EMBED;
    maker m = { .s = s };
    size_t prompts = 0;
    lm_code rc = lm_alloc_n(&m.vector, (size_t)(s->config->layers * s->config->width),
                            sizeof *m.vector, "gates", e);

    for (int i = 0; i < experts_of(r); i++)
        prompts += (size_t)prompts_of(&r->expert[i]);
    if (!rc && (hidden || embed))
        rc = encode_all(&m, e);
    if (!rc && hidden)
        rc = open_model(&m, e);
    else if (!rc && embed)
        rc = open_embed(&m, e);
    if (!rc)
        rc = make(&m, gates, switches, e);
    if (!rc && (hidden || embed))
        warn_alike(s, gates);
    finish(&m, prompts);
    return rc;
}
