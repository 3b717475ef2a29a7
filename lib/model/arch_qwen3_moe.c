/* SPDX-License-Identifier: Apache-2.0 */
/* arch_qwen3_moe.c -- Qwen3's mixtures of experts (arXiv:2505.09388): Qwen3 with experts in all layers but those that the
 * config names. */
#include "model/arch_llama.h"

static const char *const keys[] = {
    LM_KEYS_DECODER,         "hidden_act",           "attention_bias",      "use_sliding_window",
    "sliding_window",        "max_window_layers",    "num_experts",         "num_experts_per_tok",
    "moe_intermediate_size", "norm_topk_prob",       "decoder_sparse_step", "mlp_only_layers",
    "router_aux_loss_coef",  "output_router_logits", LM_KEYS_NOISE,         NULL
};

static lm_code read(const json_t *o, const char *where, lm_config *c, lm_err *e)
{
    const lm_decoder_defaults d = { .positions = 32768, .kv_heads = 4 };
    const lm_moe_defaults m = { .experts_key = "num_experts",
                                .other_key = "num_local_experts",
                                .ffn_key = "moe_intermediate_size",
                                .experts = 128,
                                .chosen = 8,
                                .ffn = 768,
                                .some_dense = true };
    int64_t window = 0;
    bool use;

    /* Unlike Qwen3, a window is one of all layers (transformers, modeling_qwen3_moe.py). */
    if (lm_read_decoder(o, where, &d, c, e) || lm_read_attention_bias(o, where, c, e) ||
        lm_json_bool_or(o, "use_sliding_window", false, &use, where, e) ||
        (use && lm_read_window(o, where, 4096, &window, e)) ||
        lm_read_layer_types(o, where, c, window, lm_slides_always, 0, e) ||
        lm_read_experts(o, where, &m, c, e))
        return e->code;
    for (int64_t l = 0; l < c->layers; l++)
        c->layer[l].qk_norm = LM_QK_NORM_HEAD;
    return lm_read_rope(o, where, 10000, c, e);
}

static const lm_gguf_key gguf_keys[] = {
    LM_GGUF_DECODER_KEYS,   LM_GGUF_EXPERT_KEYS("num_experts"),
    LM_GGUF_EXPERT_FFN_KEY, { .hf = "norm_topk_prob", "", LM_KEY_TRUE },
    LM_GGUF_SILU_KEYS,      LM_GGUF_WINDOW_KEY,
    LM_GGUF_BIAS_KEY,       LM_GGUF_ROPE_KEY,
    { .hf = NULL },
};

const lm_arch lm_arch_qwen3_moe = {
    .name = "qwen3_moe",
    .class_name = "Qwen3MoeForCausalLM",
    .gguf = "qwen3moe",
    .keys = keys,
    .read = read,
    .root = "model.",
    .layers = "model.layers.",
    .tensors = lm_llama_tensors,
    .fused = lm_fused_experts,
    .gguf_keys = gguf_keys,
    .gguf_head_dim = true,
    .gguf_normalise = true,
};
