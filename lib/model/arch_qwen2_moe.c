/* SPDX-License-Identifier: Apache-2.0 */
/* arch_qwen2_moe.c -- Qwen2's mixtures of experts (arXiv:2407.10671): Qwen2 with experts in all layers but those that the
 * config names, and an expert beside them that all tokens go through, weighed by a gate of its own. */
#include "model/arch_llama.h"

static const char *const keys[] = {
    LM_KEYS_DECODER,
    "hidden_act",
    "qkv_bias",
    "use_sliding_window",
    "sliding_window",
    "max_window_layers",
    "layer_types",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "norm_topk_prob",
    "decoder_sparse_step",
    "mlp_only_layers",
    "router_aux_loss_coef",
    "output_router_logits",
    LM_KEYS_NOISE,
    NULL,
};

/* Every other layer below max_window_layers (transformers, configuration_qwen2_moe.py). */
static bool slides(const lm_config *c, int64_t layer, int64_t below)
{
    (void)c;
    return layer % 2 == 0 && layer < below;
}

static lm_code read(const json_t *o, const char *where, lm_config *c, lm_err *e)
{
    const lm_decoder_defaults d = { .positions = 32768, .kv_heads = 16 };
    const lm_moe_defaults m = { .experts_key = "num_experts",
                                .ffn_key = "moe_intermediate_size",
                                .experts = 60,
                                .chosen = 4,
                                .ffn = 1408,
                                .shared = 5632,
                                .some_dense = true };
    int64_t window = 0, below = 0;
    bool use, bias = true;

    if (lm_read_decoder(o, where, &d, c, e) ||
        lm_json_bool_or(o, "qkv_bias", true, &bias, where, e) ||
        lm_json_bool_or(o, "use_sliding_window", false, &use, where, e) ||
        (use && lm_read_window(o, where, 4096, &window, e)) ||
        (use && lm_json_i64_or(o, "max_window_layers", 28, 0, LM_MOST_LAYERS, &below, where, e)) ||
        lm_read_layer_types(o, where, c, window, slides, below, e) ||
        lm_read_experts(o, where, &m, c, e))
        return e->code;
    for (int64_t l = 0; l < c->layers; l++)
        c->layer[l].qkv_bias = bias;
    return lm_read_rope(o, where, 10000, c, e);
}

static const lm_gguf_key gguf_keys[] = {
    LM_GGUF_DECODER_KEYS,
    LM_GGUF_EXPERT_KEYS("num_experts"),
    LM_GGUF_EXPERT_FFN_KEY,
    { .hf = "shared_expert_intermediate_size",
      "expert_shared_feed_forward_length",
      LM_KEY_INT,
      .optional = true,
      .like = "intermediate_size",
      .times = 1 },
    LM_GGUF_SILU_KEYS,
    { .hf = "qkv_bias", "blk.0.attn_q.bias", LM_KEY_HAS },
    LM_GGUF_WINDOW_KEY,
    LM_GGUF_ROPE_KEY,
    { .hf = NULL },
};

const lm_arch lm_arch_qwen2_moe = {
    .name = "qwen2_moe",
    .class_name = "Qwen2MoeForCausalLM",
    .gguf = "qwen2moe",
    .keys = keys,
    .read = read,
    .root = "model.",
    .layers = "model.layers.",
    .tensors = lm_llama_tensors,
    .fused = lm_fused_experts,
    .gguf_keys = gguf_keys,
    .gguf_head = true,
    .gguf_square = true,
};
