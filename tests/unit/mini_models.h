/* SPDX-License-Identifier: Apache-2.0 */
/* mini_models.h -- a small model of each architecture, with its weights and inputs; for tests that run all
 * of them. */
#ifndef LM_TESTS_MINI_MODELS_H
#define LM_TESTS_MINI_MODELS_H

#include "base/rng.h"
#include "model_run.h"

#define ALIKE                                                        \
    "\"vocab_size\":23,\"hidden_size\":16,\"intermediate_size\":20," \
    "\"num_attention_heads\":4,\"num_hidden_layers\":%d,\"max_position_embeddings\":32"
#define SMALL ALIKE ",\"num_key_value_heads\":2"
#define GPT2  "\"vocab_size\":23,\"n_embd\":16,\"n_head\":4,\"n_positions\":16,\"n_layer\":%d"

enum {
    TIED,
    EXACT,
    LLAMA,
    LLAMA_BIAS,
    MISTRAL,
    QWEN3,
    OLMO2,
    GEMMA2,
    GEMMA3,
    QWEN3_NEXT,
    BERT,
    BLOOM,
    HYBRID,
    GAUSSIAN,
    LINEAR,
    RETENTION,
    N_MODELS
};
static const char *const models[N_MODELS] = {
    "{\"model_type\":\"gpt2\"," GPT2 "}",
    "{\"model_type\":\"gpt2\"," GPT2 ",\"tie_word_embeddings\":false,"
    "\"activation_function\":\"gelu\",\"n_inner\":24}",
    "{\"model_type\":\"llama\"," SMALL "}",
    "{\"model_type\":\"llama\"," SMALL ",\"tie_word_embeddings\":true,\"attention_bias\":true,"
    "\"mlp_bias\":true}",
    "{\"model_type\":\"mistral\"," SMALL ",\"sliding_window\":3}",
    "{\"model_type\":\"qwen3\"," SMALL ",\"head_dim\":6,\"tie_word_embeddings\":true}",
    "{\"model_type\":\"olmo2\"," ALIKE "}",
    "{\"model_type\":\"gemma2\"," SMALL ",\"head_dim\":6,\"sliding_window\":3,"
    "\"attn_logit_softcapping\":2,\"final_logit_softcapping\":3}",
    "{\"model_type\":\"gemma3_text\"," SMALL ",\"head_dim\":6,\"sliding_window\":3,"
    "\"sliding_window_pattern\":2}",
    "{\"model_type\":\"qwen3_next\"," SMALL ",\"head_dim\":8,\"partial_rotary_factor\":0.5,"
    "\"num_experts\":0,\"full_attention_interval\":2,\"linear_num_key_heads\":2,"
    "\"linear_num_value_heads\":4,\"linear_key_head_dim\":6,\"linear_value_head_dim\":4}",
    "{\"model_type\":\"bert\"," ALIKE "}",
    "{\"model_type\":\"bloom\",\"vocab_size\":23,\"hidden_size\":24,\"n_layer\":%d,\"n_head\":6}",
    "{\"model_type\":\"lm_hybrid\"," SMALL ",\"sliding_window\":3,\"block_sparse_attention\":"
    "{\"block_size\":16,\"local_blocks\":1,\"global_blocks\":1,\"vert_stride\":3}}",
    "{\"model_type\":\"lm_hybrid\"," SMALL ",\"gaussian_window\":9}",
    "{\"model_type\":\"lm_hybrid\"," SMALL "}",
    "{\"model_type\":\"lm_hybrid\"," SMALL ",\"head_dim\":6,\"linear_attention\":"
    "{\"feature\":\"identity\",\"decay\":true}}",
};

/* layer_types of HYBRID, GAUSSIAN, LINEAR and RETENTION: kinds of attention by turns. */
static inline json_t *hybrid_types(int i, int layers)
{
    static const char *const kinds[] = { "block_sparse_attention", "sliding_attention",
                                         "full_attention" };
    static const char *const gaussian[] = { "gaussian_attention", "gaussian_norm_attention" };
    static const char *const linear[] = { "linear_attention", "full_attention" };
    json_t *list = json_array();
    for (int l = 0; l < layers; l++)
        json_array_append_new(list, json_string(i == HYBRID     ? kinds[l % 3]
                                                : i == GAUSSIAN ? gaussian[l % 2]
                                                                : linear[l % 2]));
    return list;
}

static inline void read_model(int i, int layers, lm_config *c)
{
    lm_err e = { 0 };
    json_t *o;
    char text[512];
    int n = snprintf(text, sizeof text, models[i], layers);
    must(lm_json_parse(text, (size_t)n, "config", &o, &e), &e);
    if (i >= HYBRID)
        json_object_set_new(o, "layer_types", hybrid_types(i, layers));
    must(lm_config_read(o, "config", c, &e), &e);
    for (int64_t l = 0; l < c->layers; l++)
        if (c->layer[l].blocks.size) /* so small that the few tokens of tests are in several */
            c->layer[l].blocks.size = 2;
    json_decref(o);
}

static inline lm_build build_of(lm_mode mode, lm_dtype low, int64_t batch, int64_t seq)
{
    return (lm_build){
        .mode = mode, .batch = batch, .seq = seq, .cache = 14, .precision = { .low = low }
    };
}

/* Random numbers everywhere: norms of 1 and biases of 0, as in a new model, would hide mistakes. */
static inline float *random_block(const lm_model *m)
{
    float *block = room((size_t)m->block, sizeof *block);
    for (int i = 0; i < m->n_params; i++) {
        const lm_param *p = &m->param[i];
        lm_rng r = lm_rng_make(9, "weights", (uint64_t)i);
        for (int64_t k = 0; k < p->count; k++)
            block[p->offset + k] = (float)(0.3 * lm_rng_normal(r, (uint64_t)k));
    }
    return block;
}

static inline void feed(runner *r)
{
    const lm_model *m = r->model;
    lm_rng rng = lm_rng_make(5, "tokens", 0);
    for (int64_t i = 0; i < m->build.batch * m->build.seq; i++) {
        ids_of(r, m->tokens)[i] = (int32_t)lm_rng_below(rng, (uint64_t)i * 2, 23);
        ids_of(r, m->targets)[i] =
            i % 5 == 3 ? -1 : (int32_t)lm_rng_below(rng, (uint64_t)i * 2 + 1, 23);
    }
}

static inline bool whole_model(void *ctx, const char *name)
{
    (void)ctx, (void)name;
    return true;
}

static inline bool no_vectors(void *ctx, const char *name)
{
    (void)ctx;
    return !strstr(name, "norm") && !strstr(name, "ln_") && !strstr(name, "bias");
}

static inline bool no_matrices(void *ctx, const char *name)
{
    return !no_vectors(ctx, name);
}

static inline bool second_layer(void *ctx, const char *name)
{
    (void)ctx;
    return strstr(name, ".1.") != NULL;
}

enum { N_TRAINABLE = 4 };
static bool (*const trainable[N_TRAINABLE])(void *, const char *) = { whole_model, no_vectors,
                                                                      no_matrices, second_layer };

static const lm_dtype types[3] = { LM_DTYPE_F64, LM_DTYPE_F32, LM_DTYPE_BF16 };

#endif
