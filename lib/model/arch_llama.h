/* SPDX-License-Identifier: Apache-2.0 */
/* arch_llama.h -- common parts of Llama and its successors.  Private to lib/model. */
#ifndef LM_MODEL_ARCH_LLAMA_H
#define LM_MODEL_ARCH_LLAMA_H

#include "model/arch_read.h"

/* The first also names the experts of Qwen's mixtures.  The second is for norms behind the branches, with or without one
 * before them. */
extern const lm_tensor_name lm_llama_tensors[], lm_branch_norm_tensors[];

/* Rows of tables that several architectures share. */
#define LM_ROWS_START                                     \
    { LM_PART_EMBED, "embed_tokens", "token_embd" },      \
    {                                                     \
        LM_PART_ATTN_NORM, "input_layernorm", "attn_norm" \
    }
#define LM_ROWS_HEADS                                                                         \
    { LM_PART_Q, "self_attn.q_proj", "attn_q" }, { LM_PART_K, "self_attn.k_proj", "attn_k" }, \
        { LM_PART_V, "self_attn.v_proj", "attn_v" },                                          \
        { LM_PART_Q_NORM, "self_attn.q_norm", "attn_q_norm" },                                \
    {                                                                                         \
        LM_PART_K_NORM, "self_attn.k_norm", "attn_k_norm"                                     \
    }
#define LM_ROWS_OUT                                         \
    {                                                       \
        LM_PART_ATTN_OUT, "self_attn.o_proj", "attn_output" \
    }
#define LM_ROWS_MLP                                                                         \
    { LM_PART_GATE, "mlp.gate_proj", "ffn_gate" }, { LM_PART_UP, "mlp.up_proj", "ffn_up" }, \
    {                                                                                       \
        LM_PART_DOWN, "mlp.down_proj", "ffn_down"                                           \
    }
#define LM_ROWS_EXPERTS                                                  \
    { LM_PART_EXPERT_GATE, "mlp.experts.#.gate_proj", "ffn_gate_exps" }, \
        { LM_PART_EXPERT_UP, "mlp.experts.#.up_proj", "ffn_up_exps" },   \
    {                                                                    \
        LM_PART_EXPERT_DOWN, "mlp.experts.#.down_proj", "ffn_down_exps"  \
    }
/* The module of the shared expert. */
#define LM_ROWS_SHARED(module)                                      \
    { LM_PART_SHARED_GATE, module ".gate_proj", "ffn_gate_shexp" }, \
        { LM_PART_SHARED_UP, module ".up_proj", "ffn_up_shexp" },   \
    {                                                               \
        LM_PART_SHARED_DOWN, module ".down_proj", "ffn_down_shexp"  \
    }
/* A module that predicts a token further on: llama.cpp's names are those of its tensors nextn. */
#define LM_ROWS_AHEAD                                                         \
    { LM_PART_AHEAD_EMBED, "embed_tokens", "nextn.embed_tokens" },            \
        { LM_PART_AHEAD_TOKEN_NORM, "enorm", "nextn.enorm" },                 \
        { LM_PART_AHEAD_STATE_NORM, "hnorm", "nextn.hnorm" },                 \
        { LM_PART_AHEAD_JOIN, "eh_proj", "nextn.eh_proj" },                   \
        { LM_PART_AHEAD_NORM, "shared_head.norm", "nextn.shared_head_norm" }, \
    {                                                                         \
        LM_PART_AHEAD_HEAD, "shared_head.head", "nextn.shared_head_head"      \
    }
#define LM_ROWS_END                                                                          \
    { LM_PART_OUTPUT_NORM, "norm", "output_norm" }, { LM_PART_OUTPUT, "lm_head", "output" }, \
    {                                                                                        \
        0, NULL, NULL                                                                        \
    }

/* DeepSeek's, and those of models that took its experts alone. */
extern const lm_tensor_name lm_deepseek_tensors[];
extern const lm_gguf_key lm_deepseek_gguf_keys[];

/* What transformers 5 has for the experts of a layer. */
extern const lm_tensor_name lm_fused_experts[];

/* Sizes and epsilon. */
#define LM_GGUF_DECODER_KEYS                                                 \
    { .hf = "hidden_size", "embedding_length", LM_KEY_INT },                 \
        { .hf = "intermediate_size", "feed_forward_length", LM_KEY_INT },    \
        { .hf = "num_hidden_layers", "block_count", LM_KEY_INT },            \
        { .hf = "num_attention_heads", "attention.head_count", LM_KEY_INT }, \
        { .hf = "num_key_value_heads",                                       \
          "attention.head_count_kv",                                         \
          LM_KEY_INT,                                                        \
          .optional = true,                                                  \
          .like = "num_attention_heads",                                     \
          .times = 1 },                                                      \
        { .hf = "head_dim", "attention.key_length", LM_KEY_HEAD_DIM },       \
    {                                                                        \
        .hf = "max_position_embeddings", "context_length", LM_KEY_INT        \
    }
#define LM_GGUF_SILU_KEYS                                                                        \
    { .hf = "hidden_act", "silu", LM_KEY_TEXT },                                                 \
    {                                                                                            \
        .hf = "rms_norm_eps", "attention.layer_norm_rms_epsilon", LM_KEY_REAL, .optional = true, \
        .times = 1e-6                                                                            \
    }
#define LM_GGUF_WINDOW_KEY                                                \
    {                                                                     \
        .hf = "sliding_window", "attention.sliding_window", LM_KEY_WINDOW \
    }
#define LM_GGUF_BIAS_KEY                                        \
    {                                                           \
        .hf = "attention_bias", "blk.0.attn_q.bias", LM_KEY_HAS \
    }
/* Experts, under the name that the architecture has for their number. */
#define LM_GGUF_EXPERT_KEYS(number)                                  \
    { .hf = number, "expert_count", LM_KEY_INT },                    \
    {                                                                \
        .hf = "num_experts_per_tok", "expert_used_count", LM_KEY_INT \
    }
#define LM_GGUF_EXPERT_FFN_KEY                                                         \
    {                                                                                  \
        .hf = "moe_intermediate_size", "expert_feed_forward_length", LM_KEY_EXPERT_FFN \
    }
#define LM_GGUF_SCORED_KEY                                             \
    { .hf = "n_routed_experts", "expert_gating_func", LM_KEY_SCORED }, \
    {                                                                  \
        .hf = "n_routed_experts", "expert_count", LM_KEY_INT           \
    }
#define LM_GGUF_ROPE_KEY                                  \
    {                                                     \
        .hf = "rope_theta", "rope.freq_base", LM_KEY_ROPE \
    }

#endif
