/* SPDX-License-Identifier: Apache-2.0 */
/* arch_dots1.c -- dots.llm1 (arXiv:2506.05767): Qwen3's attention with DeepSeek-V3's experts: sigmoid scores with a bias that
 * follows the load, groups, shared experts, first layers without experts. */
#include "model/arch_llama.h"

static const char *const keys[] = { LM_KEYS_DECODER,
                                    "hidden_act",
                                    "attention_bias",
                                    "sliding_window",
                                    "max_window_layers",
                                    "layer_types",
                                    "n_routed_experts",
                                    "n_shared_experts",
                                    "num_experts_per_tok",
                                    "moe_intermediate_size",
                                    "n_group",
                                    "topk_group",
                                    "first_k_dense_replace",
                                    "norm_topk_prob",
                                    "routed_scaling_factor",
                                    "output_router_logits",
                                    NULL };

/* Layers from max_window_layers on (transformers, configuration_dots1.py). */
static bool slides(const lm_config *c, int64_t layer, int64_t from)
{
    (void)c;
    return layer >= from;
}

static lm_code read(const json_t *o, const char *where, lm_config *c, lm_err *e)
{
    const lm_decoder_defaults d = { .positions = 2048 };
    int64_t window, from;

    if (lm_read_decoder(o, where, &d, c, e) || lm_read_attention_bias(o, where, c, e) ||
        lm_read_window(o, where, 4096, &window, e) ||
        lm_json_i64_or(o, "max_window_layers", 62, 0, LM_MOST_LAYERS, &from, where, e) ||
        lm_read_layer_types(o, where, c, window, slides, from, e) ||
        lm_read_scored_experts(o, where, c, e))
        return e->code;
    for (int64_t l = 0; l < c->layers; l++)
        c->layer[l].qk_norm = LM_QK_NORM_HEAD;
    return lm_read_rope(o, where, 10000, c, e);
}

static const lm_tensor_name tensors[] = {
    { LM_PART_EMBED, "embed_tokens", "token_embd" },
    { LM_PART_ATTN_NORM, "input_layernorm", "attn_norm" },
    { LM_PART_Q, "self_attn.q_proj", "attn_q" },
    { LM_PART_K, "self_attn.k_proj", "attn_k" },
    { LM_PART_V, "self_attn.v_proj", "attn_v" },
    { LM_PART_Q_NORM, "self_attn.q_norm", "attn_q_norm" },
    { LM_PART_K_NORM, "self_attn.k_norm", "attn_k_norm" },
    { LM_PART_ATTN_OUT, "self_attn.o_proj", "attn_output" },
    { LM_PART_MLP_NORM, "post_attention_layernorm", "ffn_norm" },
    { LM_PART_GATE, "mlp.gate_proj", "ffn_gate" },
    { LM_PART_UP, "mlp.up_proj", "ffn_up" },
    { LM_PART_DOWN, "mlp.down_proj", "ffn_down" },
    { LM_PART_ROUTER, "mlp.gate", "ffn_gate_inp" },
    { LM_PART_ROUTER_BIAS, "mlp.gate.e_score_correction_bias", "exp_probs_b" },
    { LM_PART_EXPERT_GATE, "mlp.experts.#.gate_proj", "ffn_gate_exps" },
    { LM_PART_EXPERT_UP, "mlp.experts.#.up_proj", "ffn_up_exps" },
    { LM_PART_EXPERT_DOWN, "mlp.experts.#.down_proj", "ffn_down_exps" },
    { LM_PART_SHARED_GATE, "mlp.shared_experts.gate_proj", "ffn_gate_shexp" },
    { LM_PART_SHARED_UP, "mlp.shared_experts.up_proj", "ffn_up_shexp" },
    { LM_PART_SHARED_DOWN, "mlp.shared_experts.down_proj", "ffn_down_shexp" },
    { LM_PART_OUTPUT_NORM, "norm", "output_norm" },
    { LM_PART_OUTPUT, "lm_head", "output" },
    { 0, NULL, NULL },
};

const lm_arch lm_arch_dots1 = {
    .name = "dots1",
    .class_name = "Dots1ForCausalLM",
    .gguf = "",
    .keys = keys,
    .read = read,
    .root = "model.",
    .layers = "model.layers.",
    .tensors = tensors,
    .fused = lm_fused_experts,
};
