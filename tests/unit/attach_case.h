/* SPDX-License-Identifier: Apache-2.0 */
/* attach_case.h -- for tests of adapters in a graph: tiny bases, random weights and tokens, and an
 * adapter beside them. */
#ifndef LM_TESTS_ATTACH_CASE_H
#define LM_TESTS_ATTACH_CASE_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/json.h"
#include "base/rng.h"
#include "model/arch.h"
#include "model_run.h"
#include "tune/attach.h"

static const char *const models[] = {
    "{\"model_type\":\"gpt2\",\"vocab_size\":23,\"n_embd\":16,\"n_layer\":2,\"n_head\":4,"
    "\"n_positions\":16}",
    "{\"model_type\":\"llama\",\"vocab_size\":23,\"hidden_size\":16,\"intermediate_size\":24,"
    "\"num_hidden_layers\":2,\"num_attention_heads\":4,\"max_position_embeddings\":32,"
    "\"num_key_value_heads\":2}",
    "{\"model_type\":\"gemma2\",\"vocab_size\":23,\"hidden_size\":16,\"intermediate_size\":24,"
    "\"num_hidden_layers\":2,\"num_attention_heads\":4,\"max_position_embeddings\":32,"
    "\"num_key_value_heads\":2,\"head_dim\":4}",
    "{\"model_type\":\"t5\",\"vocab_size\":23,\"d_model\":16,\"d_kv\":4,\"d_ff\":24,"
    "\"num_layers\":1,\"num_decoder_layers\":2,\"num_heads\":4,\"feed_forward_proj\":\"relu\"}",
};
enum {
    GPT2,
    LLAMA,
    N_MODELS,
    GEMMA2 = N_MODELS, /* whose embedding is scaled */
    T5,                /* whose sources are as long as its targets */
    BATCH = 2,
    SEQ = 6
};

/* ---- the base ---- */

typedef struct {
    lm_config config;
    lm_tune_base base[64];
    char name[64][LM_TENSOR_NAME];
    lm_tune_bases bases;
    json_t *json;
} tiny;

static inline lm_code see(void *ctx, const lm_model_tensor *t)
{
    tiny *y = ctx;
    lm_tune_base *b = &y->base[y->bases.n];
    char *name = y->name[y->bases.n];
    bool turned = t->order == LM_ORDER_CONV1D;
    if (t->bias) {
        b[-1].bias = "bias";
        return LM_OK;
    }
    memcpy(name, t->hf, sizeof y->name[0]);
    name[strlen(name) - strlen(".weight")] = 0;
    *b = (lm_tune_base){ .name = name,
                         .weight = name,
                         .kind = t->ndim == 1 ? LM_TUNE_NORM
                                 : t->part == LM_PART_EMBED || t->part == LM_PART_POSITION
                                     ? LM_TUNE_EMBEDDING
                                     : LM_TUNE_LINEAR_LAYER,
                         .head = t->part == LM_PART_OUTPUT,
                         .turned = turned,
                         .out = t->dim[turned],
                         .in = t->ndim == 1 ? 0 : t->dim[!turned],
                         .layer = t->layer };
    if (b->kind == LM_TUNE_EMBEDDING) {
        b->out = t->dim[1];
        b->in = t->dim[0];
    }
    y->bases.n++;
    return LM_OK;
}

static inline void tiny_begin(tiny *t, int i)
{
    lm_err e = { 0 };
    memset(t, 0, sizeof *t);
    must(lm_json_parse(models[i], strlen(models[i]), "config", &t->json, &e), &e);
    must(lm_config_read(t->json, "config", &t->config, &e), &e);
    t->bases = (lm_tune_bases){ .at = t->base, .config = t->json, .path = "m" };
    must(lm_model_tensors_walk(&t->config, see, t), &e);
}

static inline void tiny_end(tiny *t)
{
    lm_config_fini(&t->config);
    json_decref(t->json);
}

/* ---- runs ---- */

/* Random numbers everywhere, which depend on the name of the tensor's parameter alone. */
static inline float *random_block(const lm_model *m)
{
    float *block = room((size_t)m->block, sizeof *block);
    for (int i = 0; i < m->n_slices; i++) {
        const lm_slice *s = &m->slice[i];
        const lm_param *p = &m->param[s->param];
        int64_t row = p->count / m->graph->value[p->value].t.dim[0];
        lm_rng r = lm_rng_make(9, s->name, 0);
        for (int64_t k = 0; k < s->rows * row; k++)
            block[p->offset + s->row * row + k] = (float)(0.3 * lm_rng_normal(r, (uint64_t)k));
    }
    return block;
}

/* Sources of an encoder: the same texts in another order, with virtual tokens, and padding in the last one. */
static inline void feed_sources(runner *r, int64_t virtual)
{
    const lm_model *m = r->model;
    lm_rng rng = lm_rng_make(5, "tokens", 0);
    for (int64_t i = 0; i < BATCH * SEQ; i++) {
        ids_of(r, m->source)[i] = i % SEQ < virtual ? (int32_t)(23 + i % SEQ)
                                                    : (int32_t)lm_rng_below(rng, (uint64_t)i, 23);
        ids_of(r, m->source_hi)[i] = i < (BATCH - 1) * SEQ ? SEQ : SEQ - 1;
    }
    for (int64_t i = 0; i < BATCH * 2 * SEQ; i++)
        ids_of(r, m->cross_hi)[i] = i % (2 * SEQ) < SEQ         ? 0
                                    : i < (BATCH - 1) * 2 * SEQ ? SEQ
                                                                : SEQ - 1;
}

static inline void feed(runner *r, int64_t virtual)
{
    const lm_model *m = r->model;
    lm_rng rng = lm_rng_make(4, "tokens", 0);
    if (m->config.encoder)
        feed_sources(r, virtual);
    for (int64_t i = 0; i < BATCH * SEQ; i++) {
        bool is_virtual = i % SEQ < virtual;
        ids_of(r, m->tokens)[i] =
            is_virtual ? (int32_t)(23 + i % SEQ) : (int32_t)lm_rng_below(rng, (uint64_t)i * 2, 23);
        if (m->targets != LM_NONE)
            ids_of(r, m->targets)[i] =
                is_virtual || i % 5 == 3 ? -1 : (int32_t)lm_rng_below(rng, (uint64_t)i * 2 + 1, 23);
    }
}

static inline lm_build build_of(lm_mode mode, lm_attach *a)
{
    return (lm_build){ .mode = mode,
                       .batch = BATCH,
                       .seq = SEQ,
                       .cache = SEQ,
                       .precision = { .low = LM_DTYPE_F64 },
                       .adapt = a ? lm_attach_adapt(a) : NULL,
                       .trainable = a ? lm_attach_trains : NULL,
                       .ctx = a };
}

/* Numbers of the slice `name` as doubles; NULL: there is none. */
static inline double *numbers_of(const lm_model *m, const float *block, const char *name)
{
    int i = lm_model_slice(m, name);
    if (i < 0)
        return NULL;
    const lm_slice *s = &m->slice[i];
    const lm_param *p = &m->param[s->param];
    int64_t row = p->count / m->graph->value[p->value].t.dim[0];
    double *out = room((size_t)(s->rows * row) + 1, sizeof *out);
    for (int64_t k = 0; k < s->rows * row; k++)
        out[k] = (double)block[p->offset + s->row * row + k];
    return out;
}

static inline void put_numbers(const lm_model *m, float *block, const char *name, const double *v)
{
    const lm_slice *s = &m->slice[lm_model_slice(m, name)];
    const lm_param *p = &m->param[s->param];
    int64_t row = p->count / m->graph->value[p->value].t.dim[0];
    for (int64_t k = 0; k < s->rows * row; k++)
        block[p->offset + s->row * row + k] = (float)v[k];
}

static inline json_t *adapter_of(const char *text)
{
    lm_err e = { 0 };
    json_t *o = NULL;
    must(lm_json_parse(text, strlen(text), "adapter", &o, &e), &e);
    return o;
}

#endif
