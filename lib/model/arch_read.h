/* SPDX-License-Identifier: Apache-2.0 */
/* arch_read.h -- shared by the readers of the architectures.  Private to lib/model. */
#ifndef LM_MODEL_ARCH_READ_H
#define LM_MODEL_ARCH_READ_H

#include "model/arch.h"

enum { LM_MOST_WIDTH = 1 << 24, LM_MOST_LAYERS = 1 << 16 };

/* Keys of every config, and of configs with Llama's names of sizes. */
#define LM_KEYS_COMMON                                                                        \
    "vocab_size", "initializer_range", "tie_word_embeddings", "bos_token_id", "eos_token_id", \
        "pad_token_id", "use_cache"
#define LM_KEYS_DECODER                                                                      \
    LM_KEYS_COMMON, "hidden_size", "intermediate_size", "num_hidden_layers",                 \
        "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings", \
        "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "attention_dropout"

/* Of mixtures whose routers can learn noise. */
#define LM_KEYS_NOISE "gate_add_noise", "gate_noise_epsilon"

lm_code lm_read_bad(const char *where, const char *key, lm_err *e, const char *what);

/* Defaults of the published class for absent keys. */
typedef struct {
    int64_t positions, head_dim; /* head_dim 0: width / heads */
    int64_t kv_heads;            /* 0: heads, as with null */
    double norm_eps;             /* 0: 1e-6 */
    const char *act_key;         /* NULL: "hidden_act" */
    const char *act;             /* NULL: "silu" */
} lm_decoder_defaults;

/* A decoder with RMSNorm, rotary positions and a gated MLP: the core, and layers that are all
 * equal: no bias, no norm of queries and keys, no window, rotary table 0, scores scaled by
 * 1/sqrt(head_dim), norms before the branches.  lm_read_rope reads the rotary table. */
lm_code lm_read_decoder(const json_t *o, const char *where, const lm_decoder_defaults *d,
                        lm_config *c, lm_err *e);
/* Allocate c->layer, each a copy of `all`; c->layers and c->ahead are set. */
lm_code lm_read_layers(lm_config *c, const lm_layer *all, lm_err *e);
/* num_nextn_predict_layers, which says how many layers lm_read_decoder allocates behind those of the model. */
lm_code lm_read_ahead(const json_t *o, const char *where, lm_config *c, lm_err *e);
/* attention_bias (of q, k, v and the output). */
lm_code lm_read_attention_bias(const json_t *o, const char *where, lm_config *c, lm_err *e);

/* sliding_window, `absent` without the key; 0: null. */
lm_code lm_read_window(const json_t *o, const char *where, int64_t absent, int64_t *window,
                       lm_err *e);
/* layer_types, if given: layers of the type sliding_attention have `window`, the others none.
 * Otherwise layers for which `slides` is true have it. */
lm_code lm_read_layer_types(const json_t *o, const char *where, lm_config *c, int64_t window,
                            bool (*slides)(const lm_config *c, int64_t layer, int64_t by),
                            int64_t by, lm_err *e);
/* For `slides`: all layers do; layer i does unless `pattern` divides i + 1. */
bool lm_slides_always(const lm_config *c, int64_t layer, int64_t by);
bool lm_slides_by_pattern(const lm_config *c, int64_t layer, int64_t pattern);
/* The window of Qwen2 and Qwen3: use_sliding_window, sliding_window, max_window_layers, layer_types. */
lm_code lm_read_window_from(const json_t *o, const char *where, lm_config *c, lm_err *e);

/* Names of a mixture's keys, and what holds where they are absent. */
typedef struct {
    const char *experts_key, *other_key; /* other_key: another name that files have, or NULL */
    const char *ffn_key;
    int64_t experts, chosen, ffn, shared; /* shared 0: the architecture has no shared expert */
    /* weights of the chosen experts always add up to 1; otherwise norm_topk_prob says so */
    bool normalise;
    bool some_dense; /* decoder_sparse_step and mlp_only_layers say which layers have one MLP */
} lm_moe_defaults;

/* Experts of the layers, which have been read. */
lm_code lm_read_experts(const json_t *o, const char *where, const lm_moe_defaults *d, lm_config *c,
                        lm_err *e);

/* What holds where keys of DeepSeek's experts are absent. */
typedef struct {
    /* false: sigmoids, choices by score and a bias, a group's value is that of its two best (arXiv:2412.19437, section
     * 2.1.2).  true: softmax, no bias, a group is as good as its best expert (arXiv:2405.04434, section 2.2.2) */
    bool softmax;
    bool normalise;
    int64_t shared, groups, kept_groups, dense; /* dense: first layers without experts */
    double scale;
} lm_scored_defaults;

/* The same with DeepSeek's keys: n_routed_experts, n_shared_experts, n_group, topk_group, topk_method, scoring_func,
 * routed_scaling_factor, first_k_dense_replace, moe_layer_freq. */
lm_code lm_read_scored_experts(const json_t *o, const char *where, const lm_scored_defaults *d,
                               lm_config *c, lm_err *e);

/* A decoder of DeepSeek-V2 or V3 without its experts: latent attention with its rotary table, and the factor of YaRN in the
 * scale of scores.  pairs: rope_interleave where it is absent. */
lm_code lm_read_latent_decoder(const json_t *o, const char *where, const lm_decoder_defaults *d,
                               bool pairs, lm_config *c, lm_err *e);
#define LM_KEYS_LATENT                                                                          \
    LM_KEYS_DECODER, "hidden_act", "attention_bias", "q_lora_rank", "kv_lora_rank",             \
        "qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim", "v_head_dim", "rope_interleave", \
        "n_routed_experts", "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size", \
        "n_group", "topk_group", "topk_method", "scoring_func", "first_k_dense_replace",        \
        "moe_layer_freq", "norm_topk_prob", "routed_scaling_factor", "output_router_logits",    \
        "num_nextn_predict_layers"

/* Rotary table 0: rope_theta, and rope_scaling or rope_parameters. */
lm_code lm_read_rope(const json_t *o, const char *where, double theta, lm_config *c, lm_err *e);
/* The same for heads of which partial_rotary_factor, `absent` without the key, says how much is rotated. */
lm_code lm_read_partial_rope(const json_t *o, const char *where, double theta, double absent,
                             lm_config *c, lm_err *e);
/* Tables 0 for layers without a window and 1 for those with one; windows are read.  Newer files have
 * rope_parameters with an object for each, older rope_theta and rope_scaling for the first and
 * `near_key` for the second, which is not scaled. */
lm_code lm_read_two_ropes(const json_t *o, const char *where, double theta, const char *near_key,
                          double near_theta, lm_config *c, lm_err *e);

#endif
