/* SPDX-License-Identifier: Apache-2.0 */
/* arch_qwen3_next.c -- Qwen3-Next (transformers, modeling_qwen3_next.py): layers with a state (Gated DeltaNet,
 * arXiv:2412.06464), and after each few of them one with attention, whose results are weighed by gates and whose heads are
 * rotated in part; mixtures of experts with a shared one; norms multiply by 1 + weight. */
#include <inttypes.h>
#include <string.h>

#include "kernels/conv.h"
#include "model/arch_qwen3_next.h"

static const char *const keys[] = {
    LM_KEYS_STATES,
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
    "num_nextn_predict_layers",
    NULL,
};

static lm_code read_sizes(const json_t *o, const char *where, lm_delta_sizes *d, lm_err *e)
{
    if (lm_json_i64_or(o, "linear_num_value_heads", 32, 1, 1 << 16, &d->heads, where, e) ||
        lm_json_i64_or(o, "linear_num_key_heads", 16, 1, 1 << 16, &d->key_heads, where, e) ||
        lm_json_i64_or(o, "linear_key_head_dim", 128, 1, 4096, &d->key_dim, where, e) ||
        lm_json_i64_or(o, "linear_value_head_dim", 128, 1, 4096, &d->value_dim, where, e) ||
        lm_json_i64_or(o, "linear_conv_kernel_dim", 4, 2, LM_CONV_MOST, &d->taps, where, e))
        return e->code;
    if (d->heads % d->key_heads)
        return lm_fail(e, LM_EUSAGE, where, NULL,
                       "linear_num_key_heads %" PRId64
                       " does not divide linear_num_value_heads %" PRId64,
                       d->key_heads, d->heads);
    return LM_OK;
}

/* The kinds of layers: layer_types, or else each full_attention_interval-th has attention. */
static lm_code read_kinds(const json_t *o, const char *where, lm_config *c, lm_err *e)
{
    const json_t *types = json_object_get(o, "layer_types");
    int64_t interval = 4;
    lm_delta_sizes d = { 0 };

    types = json_is_null(types) ? NULL : types;
    if (read_sizes(o, where, &d, e) ||
        lm_json_i64_or(o, "full_attention_interval", 4, 1, LM_MOST_LAYERS, &interval, where, e))
        return e->code;
    if (types && (!json_is_array(types) || (int64_t)json_array_size(types) != c->layers))
        return lm_read_bad(where, "layer_types", e, "is not a list with one entry for each layer");
    for (int64_t l = 0; l < c->layers; l++) {
        const char *t = json_string_value(json_array_get(types, (size_t)l));
        bool full = types ? t && !strcmp(t, "full_attention") : (l + 1) % interval == 0;
        if (types && !full && (!t || strcmp(t, "linear_attention") != 0))
            return lm_read_bad(where, "layer_types", e, "holds an unknown type of layer");
        c->layer[l].out_gate = full;
        c->layer[l].qk_norm = full ? LM_QK_NORM_HEAD : LM_QK_PLAIN;
        if (full)
            continue;
        c->layer[l].attention = LM_ATTENTION_DELTA;
        c->layer[l].delta = d;
        c->layer[l].rope = -1;
        c->layer[l].qkv_bias = c->layer[l].out_bias = false;
    }
    return LM_OK;
}

/* Experts of the layers; num_experts 0: none. */
static lm_code read_experts(const json_t *o, const char *where, lm_config *c, lm_err *e)
{
    const lm_moe_defaults m = { .experts_key = "num_experts",
                                .ffn_key = "moe_intermediate_size",
                                .experts = 512,
                                .chosen = 10,
                                .ffn = 512,
                                .shared = 512,
                                .some_dense = true };
    const json_t *n = json_object_get(o, "num_experts");
    bool normalise = true;

    if (json_is_integer(n) && json_integer_value(n) == 0)
        return LM_OK;
    if (lm_read_experts(o, where, &m, c, e) ||
        lm_json_bool_or(o, "norm_topk_prob", true, &normalise, where, e))
        return e->code;
    for (int64_t l = 0; l < c->layers; l++)
        c->layer[l].moe.normalise = normalise && c->layer[l].moe.experts;
    return LM_OK;
}

lm_code lm_read_states(const json_t *o, const char *where, int64_t kv_heads, lm_config *c,
                       lm_err *e)
{
    const lm_decoder_defaults d = { .positions = 32768, .kv_heads = kv_heads, .head_dim = 256 };

    if (lm_read_decoder(o, where, &d, c, e) || lm_read_attention_bias(o, where, c, e) ||
        lm_read_partial_rope(o, where, 10000, 0.25, c, e) || read_kinds(o, where, c, e))
        return e->code;
    c->norm_plus_one = true;
    return LM_OK;
}

/* The layer of the module that predicts a token further on, which has attention in any case, and experts if the model has;
 * its embedding and head are the model's. */
static void describe_module(lm_config *c)
{
    lm_layer *y = &c->layer[c->layers];
    lm_moe moe = { 0 };
    y->out_gate = true;
    y->qk_norm = LM_QK_NORM_HEAD;
    for (int64_t l = 0; l < c->layers; l++) {
        if (c->layer[l].attention == LM_ATTENTION_HEADS)
            *y = c->layer[l];
        if (c->layer[l].moe.experts)
            moe = c->layer[l].moe;
    }
    y->moe = moe;
}

/* A layer for the module is there in any case: published folders have its tensors without the key. */
static lm_code read(const json_t *o, const char *where, lm_config *c, lm_err *e)
{
    int64_t modules;
    if (lm_json_i64_or(o, "num_nextn_predict_layers", 0, 0, 1, &modules, where, e))
        return e->code;
    c->ahead = 1;
    if (lm_read_states(o, where, 2, c, e) || read_experts(o, where, c, e))
        return e->code;
    describe_module(c);
    c->ahead = modules;
    return LM_OK;
}

static const lm_tensor_name tensors[] = {
    { LM_PART_EMBED, "embed_tokens", "token_embd" },
    { LM_PART_ATTN_NORM, "input_layernorm", "attn_norm" },
    { LM_PART_Q, "self_attn.q_proj", "attn_q" },
    { LM_PART_K, "self_attn.k_proj", "attn_k" },
    { LM_PART_V, "self_attn.v_proj", "attn_v" },
    { LM_PART_Q_NORM, "self_attn.q_norm", "attn_q_norm" },
    { LM_PART_K_NORM, "self_attn.k_norm", "attn_k_norm" },
    { LM_PART_DELTA_IN, "linear_attn.in_proj_qkvz", "attn_qkv,attn_gate" },
    { LM_PART_DELTA_GATES, "linear_attn.in_proj_ba", "ssm_ba" },
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
    { LM_PART_ROUTER, "mlp.gate", "ffn_gate_inp" },
    { LM_PART_ROUTER_NOISE, "mlp.gate.weight_noise", "" },
    { LM_PART_EXPERT_GATE, "mlp.experts.#.gate_proj", "ffn_gate_exps" },
    { LM_PART_EXPERT_UP, "mlp.experts.#.up_proj", "ffn_up_exps" },
    { LM_PART_EXPERT_DOWN, "mlp.experts.#.down_proj", "ffn_down_exps" },
    { LM_PART_SHARED_GATE, "mlp.shared_expert.gate_proj", "ffn_gate_shexp" },
    { LM_PART_SHARED_UP, "mlp.shared_expert.up_proj", "ffn_up_shexp" },
    { LM_PART_SHARED_DOWN, "mlp.shared_expert.down_proj", "ffn_down_shexp" },
    { LM_PART_SHARED_SWITCH, "mlp.shared_expert_gate", "ffn_gate_inp_shexp" },
    { LM_PART_AHEAD_TOKEN_NORM, "pre_fc_norm_embedding", "" },
    { LM_PART_AHEAD_STATE_NORM, "pre_fc_norm_hidden", "" },
    { LM_PART_AHEAD_JOIN, "fc", "" },
    { LM_PART_AHEAD_NORM, "norm", "" },
    { LM_PART_OUTPUT_NORM, "norm", "output_norm" },
    { LM_PART_OUTPUT, "lm_head", "output" },
    { 0, NULL, NULL },
};

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
    { .hf = "norm_topk_prob", "", LM_KEY_TRUE },
    LM_GGUF_SILU_KEYS,
    LM_GGUF_STATES_KEYS,
    LM_GGUF_ROPE_KEY,
    { .hf = NULL },
};

const char *const lm_mtp_passed_over[] = { "mtp.", NULL };

const lm_arch lm_arch_qwen3_next = {
    .name = "qwen3_next",
    .class_name = "Qwen3NextForCausalLM",
    .gguf = "qwen3next",
    .keys = keys,
    .read = read,
    .root = "model.",
    .layers = "model.layers.",
    .ahead = "mtp.",
    .passed_over = lm_mtp_passed_over,
    .tensors = tensors,
    .fused = lm_fused_experts,
    .gguf_keys = gguf_keys,
    .gguf_head_dim = true,
    .gguf_normalise = true,
};
