/* SPDX-License-Identifier: Apache-2.0 */
/* arch_mixtral.c -- Mixtral (arXiv:2401.04088): Mistral whose MLPs are mixtures of experts; the weights of the two that
 * are chosen add up to 1. */
#include "model/arch_llama.h"

static const char *const keys[] = { LM_KEYS_DECODER,        "hidden_act",
                                    "sliding_window",       "num_local_experts",
                                    "num_experts_per_tok",  "router_aux_loss_coef",
                                    "output_router_logits", "router_jitter_noise",
                                    LM_KEYS_NOISE,          NULL };

static lm_code read(const json_t *o, const char *where, lm_config *c, lm_err *e)
{
    const lm_decoder_defaults d = { .positions = 131072, .kv_heads = 8, .norm_eps = 1e-5 };
    const lm_moe_defaults m = { .experts_key = "num_local_experts",
                                .ffn_key = "intermediate_size",
                                .experts = 8,
                                .chosen = 2,
                                .ffn = 14336,
                                .normalise = true };
    int64_t window;

    if (lm_read_decoder(o, where, &d, c, e) || lm_read_window(o, where, 0, &window, e) ||
        lm_read_layer_types(o, where, c, window, lm_slides_always, 0, e) ||
        lm_read_experts(o, where, &m, c, e))
        return e->code;
    return lm_read_rope(o, where, 1e6, c, e);
}

static const lm_tensor_name tensors[] = {
    { LM_PART_EMBED, "embed_tokens", "token_embd" },
    { LM_PART_ATTN_NORM, "input_layernorm", "attn_norm" },
    { LM_PART_Q, "self_attn.q_proj", "attn_q" },
    { LM_PART_K, "self_attn.k_proj", "attn_k" },
    { LM_PART_V, "self_attn.v_proj", "attn_v" },
    { LM_PART_ATTN_OUT, "self_attn.o_proj", "attn_output" },
    { LM_PART_MLP_NORM, "post_attention_layernorm", "ffn_norm" },
    { LM_PART_ROUTER, "block_sparse_moe.gate", "ffn_gate_inp" },
    { LM_PART_ROUTER_NOISE, "block_sparse_moe.gate.weight_noise", "" },
    { LM_PART_EXPERT_GATE, "block_sparse_moe.experts.#.w1", "ffn_gate_exps" },
    { LM_PART_EXPERT_UP, "block_sparse_moe.experts.#.w3", "ffn_up_exps" },
    { LM_PART_EXPERT_DOWN, "block_sparse_moe.experts.#.w2", "ffn_down_exps" },
    { LM_PART_OUTPUT_NORM, "norm", "output_norm" },
    { LM_PART_OUTPUT, "lm_head", "output" },
    { 0, NULL, NULL },
};

static const lm_gguf_key gguf_keys[] = {
    LM_GGUF_DECODER_KEYS, LM_GGUF_EXPERT_KEYS("num_local_experts"),
    LM_GGUF_SILU_KEYS,    LM_GGUF_WINDOW_KEY,
    LM_GGUF_ROPE_KEY,     { .hf = NULL },
};

const lm_arch lm_arch_mixtral = {
    .name = "mixtral",
    .class_name = "MixtralForCausalLM",
    .gguf = "llama",
    .keys = keys,
    .read = read,
    .root = "model.",
    .layers = "model.layers.",
    .tensors = tensors,
    .fused = lm_fused_experts,
    .gguf_keys = gguf_keys,
    .gguf_pairs = true,
    .gguf_normalise = true,
};
