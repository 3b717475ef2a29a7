/* SPDX-License-Identifier: Apache-2.0 */
/* arch_llama.c -- Llama 1 to 3 (arXiv:2302.13971, 2407.21783; tensor names of Hugging Face's
 * modeling_llama.py): RMSNorm before each branch, rotary positions, grouped-query attention, SwiGLU. */
#include "model/arch_llama.h"

static const char *const keys[] = { LM_KEYS_DECODER, "hidden_act", "attention_bias", "mlp_bias",
                                    NULL };

static lm_code read(const json_t *o, const char *where, lm_config *c, lm_err *e)
{
    bool bias = false;

    if (lm_read_decoder(o, where, &(lm_decoder_defaults){ .positions = 2048 }, c, e) ||
        lm_read_attention_bias(o, where, c, e) ||
        lm_json_bool_or(o, "mlp_bias", false, &bias, where, e))
        return e->code;
    for (int64_t l = 0; l < c->layers; l++)
        c->layer[l].mlp_bias = bias;
    return lm_read_rope(o, where, 10000, c, e);
}

const lm_tensor_name lm_llama_tensors[] = {
    LM_ROWS_START,
    LM_ROWS_HEADS,
    LM_ROWS_OUT,
    { LM_PART_MLP_NORM, "post_attention_layernorm", "ffn_norm" },
    LM_ROWS_MLP,
    { LM_PART_ROUTER, "mlp.gate", "ffn_gate_inp" },
    { LM_PART_ROUTER_NOISE, "mlp.gate.weight_noise", "" },
    LM_ROWS_EXPERTS,
    LM_ROWS_SHARED("mlp.shared_expert"),
    { LM_PART_SHARED_SWITCH, "mlp.shared_expert_gate", "ffn_gate_inp_shexp" },
    LM_ROWS_END,
};

const lm_tensor_name lm_deepseek_tensors[] = {
    LM_ROWS_START,
    LM_ROWS_HEADS,
    { LM_PART_Q_A, "self_attn.q_a_proj", "attn_q_a" },
    { LM_PART_Q_A_NORM, "self_attn.q_a_layernorm", "attn_q_a_norm" },
    { LM_PART_Q_B, "self_attn.q_b_proj", "attn_q_b" },
    { LM_PART_KV_A, "self_attn.kv_a_proj_with_mqa", "attn_kv_a_mqa" },
    { LM_PART_KV_A_NORM, "self_attn.kv_a_layernorm", "attn_kv_a_norm" },
    { LM_PART_KV_B, "self_attn.kv_b_proj", "attn_k_b,attn_v_b" },
    LM_ROWS_OUT,
    { LM_PART_MLP_NORM, "post_attention_layernorm", "ffn_norm" },
    LM_ROWS_MLP,
    { LM_PART_ROUTER, "mlp.gate", "ffn_gate_inp" },
    { LM_PART_ROUTER_BIAS, "mlp.gate.e_score_correction_bias", "exp_probs_b" },
    LM_ROWS_EXPERTS,
    LM_ROWS_SHARED("mlp.shared_experts"),
    LM_ROWS_AHEAD,
    LM_ROWS_END,
};

const lm_gguf_key lm_deepseek_gguf_keys[] = {
    { .hf = "hidden_size", "embedding_length", LM_KEY_INT },
    { .hf = "intermediate_size", "feed_forward_length", LM_KEY_INT },
    { .hf = "num_hidden_layers", "block_count", LM_KEY_INT },
    { .hf = "num_attention_heads", "attention.head_count", LM_KEY_INT },
    { .hf = "max_position_embeddings", "context_length", LM_KEY_INT },
    { .hf = "kv_lora_rank", "attention.kv_lora_rank", LM_KEY_LATENT },
    LM_GGUF_SCORED_KEY,
    LM_GGUF_SILU_KEYS,
    LM_GGUF_ROPE_KEY,
    { .hf = NULL },
};

const lm_tensor_name lm_fused_experts[] = {
    { LM_PART_EXPERT_GATE, "mlp.experts.gate_up_proj", "" },
    { LM_PART_EXPERT_DOWN, "mlp.experts.down_proj", "" },
    { LM_PART_ROUTER, "mlp.gate.weight", "" }, /* Mixtral's has another name in published files */
    { 0, NULL, NULL },
};

const lm_tensor_name lm_branch_norm_tensors[] = {
    LM_ROWS_START,
    LM_ROWS_HEADS,
    LM_ROWS_OUT,
    { LM_PART_ATTN_POST_NORM, "post_attention_layernorm", "post_attention_norm" },
    { LM_PART_MLP_NORM, "pre_feedforward_layernorm", "ffn_norm" },
    LM_ROWS_MLP,
    { LM_PART_MLP_POST_NORM, "post_feedforward_layernorm", "post_ffw_norm" },
    LM_ROWS_END,
};

static const lm_gguf_key gguf_keys[] = {
    LM_GGUF_DECODER_KEYS, LM_GGUF_SILU_KEYS,
    LM_GGUF_BIAS_KEY,     { .hf = "mlp_bias", "blk.0.ffn_up.bias", LM_KEY_HAS },
    LM_GGUF_ROPE_KEY,     { .hf = NULL },
};

const lm_arch lm_arch_llama = {
    .name = "llama",
    .class_name = "LlamaForCausalLM",
    .gguf = "llama",
    .keys = keys,
    .read = read,
    .root = "model.",
    .layers = "model.layers.",
    .tensors = lm_llama_tensors,
    .mixture = &lm_arch_mixtral,
    .gguf_keys = gguf_keys,
    .gguf_pairs = true,
    .gguf_windowed = &lm_arch_mistral,
};
