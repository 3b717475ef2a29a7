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
    { LM_PART_EXPERT_GATE, "mlp.experts.#.gate_proj", "ffn_gate_exps" },
    { LM_PART_EXPERT_UP, "mlp.experts.#.up_proj", "ffn_up_exps" },
    { LM_PART_EXPERT_DOWN, "mlp.experts.#.down_proj", "ffn_down_exps" },
    { LM_PART_SHARED_GATE, "mlp.shared_expert.gate_proj", "ffn_gate_shexp" },
    { LM_PART_SHARED_UP, "mlp.shared_expert.up_proj", "ffn_up_shexp" },
    { LM_PART_SHARED_DOWN, "mlp.shared_expert.down_proj", "ffn_down_shexp" },
    { LM_PART_SHARED_SWITCH, "mlp.shared_expert_gate", "ffn_gate_inp_shexp" },
    { LM_PART_OUTPUT_NORM, "norm", "output_norm" },
    { LM_PART_OUTPUT, "lm_head", "output" },
    { 0, NULL, NULL },
};

const lm_tensor_name lm_fused_experts[] = {
    { LM_PART_EXPERT_GATE, "mlp.experts.gate_up_proj", NULL },
    { LM_PART_EXPERT_DOWN, "mlp.experts.down_proj", NULL },
    { LM_PART_ROUTER, "mlp.gate.weight", NULL }, /* Mixtral's has another name in published files */
    { 0, NULL, NULL },
};

const lm_tensor_name lm_branch_norm_tensors[] = {
    { LM_PART_EMBED, "embed_tokens", "token_embd" },
    { LM_PART_ATTN_NORM, "input_layernorm", "attn_norm" },
    { LM_PART_Q, "self_attn.q_proj", "attn_q" },
    { LM_PART_K, "self_attn.k_proj", "attn_k" },
    { LM_PART_V, "self_attn.v_proj", "attn_v" },
    { LM_PART_Q_NORM, "self_attn.q_norm", "attn_q_norm" },
    { LM_PART_K_NORM, "self_attn.k_norm", "attn_k_norm" },
    { LM_PART_ATTN_OUT, "self_attn.o_proj", "attn_output" },
    { LM_PART_ATTN_POST_NORM, "post_attention_layernorm", "post_attention_norm" },
    { LM_PART_MLP_NORM, "pre_feedforward_layernorm", "ffn_norm" },
    { LM_PART_GATE, "mlp.gate_proj", "ffn_gate" },
    { LM_PART_UP, "mlp.up_proj", "ffn_up" },
    { LM_PART_DOWN, "mlp.down_proj", "ffn_down" },
    { LM_PART_MLP_POST_NORM, "post_feedforward_layernorm", "post_ffw_norm" },
    { LM_PART_OUTPUT_NORM, "norm", "output_norm" },
    { LM_PART_OUTPUT, "lm_head", "output" },
    { 0, NULL, NULL },
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
