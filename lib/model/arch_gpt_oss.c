/* SPDX-License-Identifier: Apache-2.0 */
/* arch_gpt_oss.c -- gpt-oss (arXiv:2508.10925; openai/gpt-oss, gpt_oss/torch/model.py): experts in all layers, with
 * biases and a bounded SwiGLU; sinks; every other layer has a window.
 *
 * The matrices of all experts of a layer are one tensor, each as [in, out], gates and ups by turns.  They are kept in
 * this order here, too, so that codes of published files need no other. */
#include "model/arch_llama.h"

static const char *const keys[] = {
    LM_KEYS_DECODER,        "hidden_act",           "attention_bias",
    "sliding_window",       "layer_types",          "initial_context_length",
    "num_local_experts",    "num_experts",          "num_experts_per_tok",
    "experts_per_token",    "swiglu_limit",         "swiglu_alpha",
    "router_aux_loss_coef", "output_router_logits", NULL
};

/* What the published class assumes where the config has no positions. */
static void set_rope(lm_config *c)
{
    c->ropes = 1;
    c->rope[0] = (lm_rope_config){ .type = LM_ROPE_YARN,
                                   .theta = 150000,
                                   .factor = 32,
                                   .low_freq = 1,
                                   .high_freq = 4,
                                   .beta_fast = 32,
                                   .beta_slow = 1,
                                   .original = 4096 };
}

static bool has(const json_t *o, const char *key)
{
    const json_t *v = json_object_get(o, key);
    return v && !json_is_null(v);
}

/* experts_per_token is an older name of num_experts_per_tok, which files have beside it. */
static lm_code check_chosen(const json_t *o, const char *where, const lm_config *c, lm_err *e)
{
    int64_t chosen;
    if (lm_json_i64_or(o, "experts_per_token", c->layer[0].moe.chosen, 1, INT64_C(1) << 20, &chosen,
                       where, e))
        return e->code;
    return chosen == c->layer[0].moe.chosen
               ? LM_OK
               : lm_read_bad(where, "experts_per_token", e, "is not num_experts_per_tok");
}

static lm_code read_activation(const json_t *o, const char *where, lm_config *c, lm_err *e)
{
    double limit, alpha;
    if (lm_json_f64_or(o, "swiglu_limit", 7, &limit, where, e) ||
        lm_json_f64_or(o, "swiglu_alpha", 1.702, &alpha, where, e))
        return e->code;
    if (!(limit > 0))
        return lm_read_bad(where, "swiglu_limit", e, "is not positive");
    for (int64_t l = 0; l < c->layers; l++) {
        lm_layer *y = &c->layer[l];
        y->mlp = LM_MLP_CLAMPED;
        y->sinks = true;
        y->moe.stacked = y->moe.biased = y->moe.router_bias = true;
        y->moe.limit = limit;
        y->moe.alpha = alpha;
    }
    return LM_OK;
}

static lm_code read(const json_t *o, const char *where, lm_config *c, lm_err *e)
{
    const lm_decoder_defaults d = {
        .positions = 131072, .head_dim = 64, .kv_heads = 8, .norm_eps = 1e-5
    };
    const lm_moe_defaults m = { .experts_key = "num_local_experts",
                                .other_key = "num_experts",
                                .ffn_key = "intermediate_size",
                                .experts = 128,
                                .chosen = 4,
                                .ffn = 2880,
                                .normalise = true };
    int64_t window;
    bool bias;

    if (lm_read_decoder(o, where, &d, c, e) ||
        lm_json_bool_or(o, "attention_bias", true, &bias, where, e) ||
        lm_read_window(o, where, 128, &window, e) ||
        lm_read_layer_types(o, where, c, window, lm_slides_by_pattern, 2, e) ||
        lm_read_experts(o, where, &m, c, e) || read_activation(o, where, c, e) ||
        check_chosen(o, where, c, e))
        return e->code;
    for (int64_t l = 0; l < c->layers; l++)
        c->layer[l].qkv_bias = c->layer[l].out_bias = bias;
    if (has(o, "rope_scaling") || has(o, "rope_parameters"))
        return lm_read_rope(o, where, 150000, c, e);
    set_rope(c);
    return lm_json_f64_or(o, "rope_theta", 150000, &c->rope[0].theta, where, e);
}

static const lm_tensor_name tensors[] = {
    { LM_PART_EMBED, "embed_tokens", "token_embd" },
    { LM_PART_ATTN_NORM, "input_layernorm", "attn_norm" },
    { LM_PART_Q, "self_attn.q_proj", "attn_q" },
    { LM_PART_K, "self_attn.k_proj", "attn_k" },
    { LM_PART_V, "self_attn.v_proj", "attn_v" },
    { LM_PART_ATTN_OUT, "self_attn.o_proj", "attn_output" },
    { LM_PART_SINKS, "self_attn.sinks", "attn_sinks" },
    { LM_PART_MLP_NORM, "post_attention_layernorm", "post_attention_norm" },
    { LM_PART_ROUTER, "mlp.router", "ffn_gate_inp" },
    { LM_PART_STACK_IN, "mlp.experts.gate_up_proj", "ffn_gate_exps,ffn_up_exps" },
    { LM_PART_STACK_OUT, "mlp.experts.down_proj", "ffn_down_exps" },
    { LM_PART_OUTPUT_NORM, "norm", "output_norm" },
    { LM_PART_OUTPUT, "lm_head", "output" },
    { 0, NULL, NULL },
};

static const lm_gguf_key gguf_keys[] = {
    LM_GGUF_DECODER_KEYS,
    LM_GGUF_EXPERT_KEYS("num_local_experts"),
    { .hf = "intermediate_size",
      "expert_feed_forward_length",
      LM_KEY_INT,
      .optional = true,
      .like = "intermediate_size",
      .times = 1 },
    LM_GGUF_SILU_KEYS,
    { .hf = "sliding_window",
      "attention.sliding_window",
      LM_KEY_WINDOW,
      .optional = true,
      .times = 128 },
    LM_GGUF_BIAS_KEY,
    LM_GGUF_ROPE_KEY,
    { .hf = NULL },
};

const lm_arch lm_arch_gpt_oss = {
    .name = "gpt_oss",
    .class_name = "GptOssForCausalLM",
    .gguf = "gpt-oss",
    .keys = keys,
    .read = read,
    .root = "model.",
    .layers = "model.layers.",
    .tensors = tensors,
    .gguf_keys = gguf_keys,
    .gguf_head_dim = true,
    .gguf_head = true,
    .gguf_windows = true,
    .gguf_pattern = 2,
    .gguf_out_bias = true,
    .gguf_untruncated = true,
    .gguf_normalise = true,
};
