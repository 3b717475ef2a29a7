/* SPDX-License-Identifier: Apache-2.0 */
/* cached_case.h -- small models of every architecture that generates, and a text, for tests of generation over caches: some
 * hundred tokens, so that pages, windows and tails have borders inside the text. */
#ifndef LM_TESTS_CACHED_CASE_H
#define LM_TESTS_CACHED_CASE_H

#include <math.h>

#include "base/rng.h"
#include "cpu_case.h"
#include "loaded_case.h"

enum { V = 96, POSITIONS = 700 };
enum {
    GPT2,
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
    GEMMA2,
    GEMMA3,
    OLMO2,
    OLMO3,
    GPT_OSS,
    MIXTRAL,
    QWEN2_MOE,
    QWEN3_MOE,
    DOTS1,
    HYBRID,
    MODELS
};
/* Models whose layer 0 keeps something else: a state, a latent, keys with norms, keys and values that are never coded. */
enum { STATES = MODELS, LATENTS, GAUSSIAN, BLOCKS, LINEAR, KINDS };

/* All experts are chosen: errors of coded caches would change choices of some.  Heads of 32 numbers, two for keys and
 * values, apart from qwen2 (one of 32) and olmo's (two, as many as queries have). */
#define CACHED_SIZES  "\"vocab_size\":96,\"initializer_range\":0.3,\"max_position_embeddings\":700,"
#define CACHED_WIDTHS "\"hidden_size\":64,\"intermediate_size\":96,"
#define CACHED_LAYERS          \
    CACHED_SIZES CACHED_WIDTHS \
        "\"num_attention_heads\":4,\"num_key_value_heads\":2,\"head_dim\":32,"
#define CACHED_EXPERTS                                                     \
    "\"num_hidden_layers\":2,\"num_experts\":3,\"num_experts_per_tok\":3," \
    "\"moe_intermediate_size\":32,"
static const char *const configs[] = {
    [GPT2] = "{\"model_type\":\"gpt2\"," CACHED_SIZES
             "\"n_embd\":64,\"n_layer\":2,\"n_head\":2,\"n_positions\":700}",
    [LLAMA] = "{\"model_type\":\"llama\"," CACHED_LAYERS "\"num_hidden_layers\":3}",
    [MISTRAL] = "{\"model_type\":\"mistral\"," CACHED_LAYERS
                "\"num_hidden_layers\":2,\"sliding_window\":150}",
    [QWEN2] = "{\"model_type\":\"qwen2\"," CACHED_SIZES CACHED_WIDTHS "\"num_attention_heads\":2,"
              "\"num_key_value_heads\":1,\"num_hidden_layers\":2,\"tie_word_embeddings\":true}",
    [QWEN3] = "{\"model_type\":\"qwen3\"," CACHED_LAYERS "\"num_hidden_layers\":2}",
    [GEMMA2] = "{\"model_type\":\"gemma2\"," CACHED_LAYERS
               "\"num_hidden_layers\":2,\"sliding_window\":140,\"query_pre_attn_scalar\":32}",
    [GEMMA3] = "{\"model_type\":\"gemma3_text\"," CACHED_LAYERS
               "\"num_hidden_layers\":2,\"sliding_window\":140,\"sliding_window_pattern\":2,"
               "\"query_pre_attn_scalar\":32}",
    [OLMO2] = "{\"model_type\":\"olmo2\"," CACHED_SIZES CACHED_WIDTHS
              "\"num_attention_heads\":2,\"num_key_value_heads\":2,\"num_hidden_layers\":2}",
    [OLMO3] = "{\"model_type\":\"olmo3\"," CACHED_SIZES CACHED_WIDTHS
              "\"num_attention_heads\":2,\"num_key_value_heads\":2,\"num_hidden_layers\":2,"
              "\"sliding_window\":150}",
    [GPT_OSS] = "{\"model_type\":\"gpt_oss\"," CACHED_LAYERS
                "\"num_hidden_layers\":2,\"sliding_window\":140,\"num_local_experts\":4,"
                "\"num_experts_per_tok\":4,\"rope_parameters\":{\"rope_type\":\"default\"}}",
    [MIXTRAL] = "{\"model_type\":\"mixtral\"," CACHED_LAYERS
                "\"num_hidden_layers\":2,\"num_local_experts\":3,\"num_experts_per_tok\":3,"
                "\"sliding_window\":170}",
    [QWEN2_MOE] = "{\"model_type\":\"qwen2_moe\"," CACHED_LAYERS CACHED_EXPERTS
                  "\"shared_expert_intermediate_size\":48}",
    [QWEN3_MOE] =
        "{\"model_type\":\"qwen3_moe\"," CACHED_LAYERS CACHED_EXPERTS "\"norm_topk_prob\":true}",
    [DOTS1] = "{\"model_type\":\"dots1\"," CACHED_LAYERS "\"num_hidden_layers\":2,"
              "\"n_routed_experts\":4,\"num_experts_per_tok\":4,\"moe_intermediate_size\":32,"
              "\"n_shared_experts\":1,\"first_k_dense_replace\":1,\"sliding_window\":null}",
    [HYBRID] = "{\"model_type\":\"lm_hybrid\"," CACHED_LAYERS
               "\"num_hidden_layers\":2,\"sliding_window\":160,"
               "\"layer_types\":[\"full_attention\",\"sliding_attention\"]}",
    [STATES] = "{\"model_type\":\"qwen3_next\"," CACHED_LAYERS
               "\"num_hidden_layers\":2,\"full_attention_interval\":2,\"num_experts\":0,"
               "\"linear_num_key_heads\":2,\"linear_num_value_heads\":4,"
               "\"linear_key_head_dim\":16,\"linear_value_head_dim\":16}",
    [LATENTS] = "{\"model_type\":\"deepseek_v3\"," CACHED_SIZES CACHED_WIDTHS
                "\"num_hidden_layers\":2,\"num_attention_heads\":4,\"num_key_value_heads\":4,"
                "\"q_lora_rank\":24,\"kv_lora_rank\":32,\"qk_nope_head_dim\":24,"
                "\"qk_rope_head_dim\":8,\"v_head_dim\":16,\"n_routed_experts\":4,"
                "\"num_experts_per_tok\":4,\"moe_intermediate_size\":32,\"n_shared_experts\":1,"
                "\"first_k_dense_replace\":1,\"n_group\":1,\"topk_group\":1}",
    [GAUSSIAN] = "{\"model_type\":\"lm_hybrid\"," CACHED_LAYERS
                 "\"num_hidden_layers\":2,\"gaussian_window\":150,"
                 "\"layer_types\":[\"gaussian_norm_attention\",\"full_attention\"]}",
    [BLOCKS] = "{\"model_type\":\"lm_hybrid\"," CACHED_LAYERS "\"num_hidden_layers\":2,"
               "\"layer_types\":[\"block_sparse_attention\",\"full_attention\"],"
               "\"block_sparse_attention\":{\"block_size\":32,\"local_blocks\":2,"
               "\"global_blocks\":1,\"vert_stride\":3}}",
    [LINEAR] = "{\"model_type\":\"lm_hybrid\"," CACHED_LAYERS "\"num_hidden_layers\":2,"
               "\"layer_types\":[\"linear_attention\",\"full_attention\"]}",
};

/* Caches of such a model in codes, where it has any. */
static inline const char *kind_spec(int kind)
{
    return kind == STATES || kind == LATENTS ? "int8" : "layers.1=int8";
}

static uint32_t ids[POSITIONS];

/* The setup of a group of tests; close_cpu is its teardown. */
static inline int open_cached(void **state)
{
    for (int i = 0; i < POSITIONS; i++)
        ids[i] = (uint32_t)lm_rng_below(lm_rng_make(7, "test", 0), (uint64_t)i, V);
    return open_cpu(state);
}

/* Relative L2 difference of logits. */
static inline double apart(const float *x, const float *y)
{
    double d = 0, n = 0;
    for (int i = 0; i < V; i++) {
        d += (double)(x[i] - y[i]) * (double)(x[i] - y[i]);
        n += (double)y[i] * (double)y[i];
    }
    return sqrt(d / n);
}

#endif
