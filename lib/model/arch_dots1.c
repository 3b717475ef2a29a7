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
    const lm_scored_defaults m = { .groups = 1, .kept_groups = 1, .scale = 1 };
    int64_t window, from;

    if (lm_read_decoder(o, where, &d, c, e) || lm_read_attention_bias(o, where, c, e) ||
        lm_read_window(o, where, 4096, &window, e) ||
        lm_json_i64_or(o, "max_window_layers", 62, 0, LM_MOST_LAYERS, &from, where, e) ||
        lm_read_layer_types(o, where, c, window, slides, from, e) ||
        lm_read_scored_experts(o, where, &m, c, e))
        return e->code;
    for (int64_t l = 0; l < c->layers; l++)
        c->layer[l].qk_norm = LM_QK_NORM_HEAD;
    return lm_read_rope(o, where, 10000, c, e);
}

static const lm_gguf_key gguf_keys[] = {
    LM_GGUF_DECODER_KEYS, LM_GGUF_SCORED_KEY, LM_GGUF_SILU_KEYS, LM_GGUF_WINDOW_KEY,
    LM_GGUF_BIAS_KEY,     LM_GGUF_ROPE_KEY,   { .hf = NULL },
};

const lm_arch lm_arch_dots1 = {
    .name = "dots1",
    .class_name = "Dots1ForCausalLM",
    .gguf = "dots1",
    .keys = keys,
    .read = read,
    .root = "model.",
    .layers = "model.layers.",
    .tensors = lm_deepseek_tensors,
    .fused = lm_fused_experts,
    .gguf_keys = gguf_keys,
    .gguf_head_dim = true,
    .gguf_head = true,
};
