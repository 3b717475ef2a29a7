/* SPDX-License-Identifier: Apache-2.0 */
/* arch_qwen3_5.c -- the text model of Qwen3.5's dense form (transformers, modeling_qwen3_5.py): Qwen3-Next without experts,
 * whose layers with a state have queries, keys and values, gates, corrections and decays in tensors of their own.  Of
 * positions on several axes, text has the same on all. */
#include "model/arch_qwen3_next.h"

static const char *const keys[] = { LM_KEYS_STATES, NULL };

static lm_code read(const json_t *o, const char *where, lm_config *c, lm_err *e)
{
    return lm_read_states(o, where, 4, c, e);
}

static const lm_tensor_name tensors[] = {
    { LM_PART_EMBED, "embed_tokens", "token_embd" },
    { LM_PART_ATTN_NORM, "input_layernorm", "attn_norm" },
    { LM_PART_Q, "self_attn.q_proj", "attn_q" },
    { LM_PART_K, "self_attn.k_proj", "attn_k" },
    { LM_PART_V, "self_attn.v_proj", "attn_v" },
    { LM_PART_Q_NORM, "self_attn.q_norm", "attn_q_norm" },
    { LM_PART_K_NORM, "self_attn.k_norm", "attn_k_norm" },
    { LM_PART_DELTA_QKV, "linear_attn.in_proj_qkv", "attn_qkv" },
    { LM_PART_DELTA_Z, "linear_attn.in_proj_z", "attn_gate" },
    { LM_PART_DELTA_B, "linear_attn.in_proj_b", "ssm_beta" },
    { LM_PART_DELTA_A, "linear_attn.in_proj_a", "ssm_alpha" },
    { LM_PART_DELTA_CONV, "linear_attn.conv1d", "ssm_conv1d" },
    { LM_PART_DELTA_LOG, "linear_attn.A_log", "ssm_a" },
    { LM_PART_DELTA_DT, "linear_attn.dt_bias", "ssm_dt" },
    { LM_PART_DELTA_NORM, "linear_attn.norm", "ssm_norm" },
    { LM_PART_DELTA_OUT, "linear_attn.out_proj", "ssm_out" },
    { LM_PART_ATTN_OUT, "self_attn.o_proj", "attn_output" },
    { LM_PART_MLP_NORM, "post_attention_layernorm", "post_attention_norm" },
    { LM_PART_GATE, "mlp.gate_proj", "ffn_gate" },
    { LM_PART_UP, "mlp.up_proj", "ffn_up" },
    { LM_PART_DOWN, "mlp.down_proj", "ffn_down" },
    { LM_PART_OUTPUT_NORM, "norm", "output_norm" },
    { LM_PART_OUTPUT, "lm_head", "output" },
    { 0, NULL, NULL },
};

static const lm_gguf_key gguf_keys[] = {
    LM_GGUF_DECODER_KEYS, LM_GGUF_SILU_KEYS,
    LM_GGUF_STATES_KEYS,  { .hf = "", LM_GGUF_SECTIONS, LM_KEY_SECTIONS },
    LM_GGUF_ROPE_KEY,     { .hf = NULL },
};

const lm_arch lm_arch_qwen3_5 = {
    .name = "qwen3_5_text",
    .class_name = "Qwen3_5ForCausalLM",
    .gguf = "qwen35",
    .keys = keys,
    .read = read,
    .root = "model.",
    .layers = "model.layers.",
    .passed_over = lm_mtp_passed_over,
    .tensors = tensors,
    .gguf_keys = gguf_keys,
    .gguf_head_dim = true,
    .gguf_tiled = true,
};
