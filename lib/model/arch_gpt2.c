/* SPDX-License-Identifier: Apache-2.0 */
/* arch_gpt2.c -- GPT-2 (Radford et al. 2019; tensor names and defaults of Hugging Face's modeling_gpt2.py): learned
 * positions, LayerNorm before each branch, biases everywhere, GELU, tied head.
 *
 * Linear weights are stored as Conv1D [in, out]. */
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "model/arch_read.h"

static const char *const keys[] = { LM_KEYS_COMMON,
                                    "n_embd",
                                    "n_layer",
                                    "n_head",
                                    "n_positions",
                                    "n_ctx",
                                    "n_inner",
                                    "activation_function",
                                    "layer_norm_epsilon",
                                    "embd_pdrop",
                                    "resid_pdrop",
                                    "attn_pdrop",
                                    "scale_attn_weights",
                                    "scale_attn_by_inverse_layer_idx",
                                    "reorder_and_upcast_attn",
                                    NULL };

static lm_code read_layer(const json_t *o, const char *where, lm_config *c, lm_layer *y, lm_err *e)
{
    const char *act;

    if (lm_json_i64(o, "n_embd", 1, LM_MOST_WIDTH, &c->width, where, e) ||
        lm_json_i64(o, "n_layer", 1, LM_MOST_LAYERS, &c->layers, where, e) ||
        lm_json_i64(o, "n_head", 1, LM_MOST_WIDTH, &y->heads, where, e) ||
        lm_json_i64_or(o, "n_inner", 4 * c->width, 1, LM_MOST_WIDTH, &y->ffn, where, e) ||
        lm_json_str_or(o, "activation_function", "gelu_new", &act, where, e))
        return e->code;
    y->mlp = strcmp(act, "gelu") ? LM_MLP_GELU : LM_MLP_GELU_EXACT;
    if (y->mlp == LM_MLP_GELU && strcmp(act, "gelu_new") && strcmp(act, "gelu_pytorch_tanh"))
        return lm_read_bad(where, "activation_function", e, "only gelu_new and gelu are known");
    if (c->width % y->heads)
        return lm_fail(e, LM_EUSAGE, where, NULL,
                       "n_head %" PRId64 " does not divide n_embd %" PRId64, y->heads, c->width);
    y->kv_heads = y->heads;
    y->head_dim = c->width / y->heads;
    return LM_OK;
}

static lm_code read(const json_t *o, const char *where, lm_config *c, lm_err *e)
{
    lm_layer y = {
        .rope = -1, .qkv_bias = true, .out_bias = true, .mlp_bias = true, .norm_before = true
    };
    bool cross, upcast, by_layer, scaled;

    c->norm = LM_NORM_LAYER;
    if (read_layer(o, where, c, &y, e) ||
        lm_json_i64_or(o, "n_positions", 1024, 1, INT64_C(1) << 31, &c->max_positions, where, e) ||
        lm_json_f64_or(o, "layer_norm_epsilon", 1e-5, &c->norm_eps, where, e) ||
        lm_json_f64_or(o, "embd_pdrop", 0.1, &c->drop_embed, where, e) ||
        lm_json_f64_or(o, "resid_pdrop", 0.1, &c->drop_resid, where, e) ||
        lm_json_f64_or(o, "attn_pdrop", 0.1, &c->drop_attn, where, e) ||
        lm_json_bool_or(o, "tie_word_embeddings", c->arch->tied, &c->tied, where, e) ||
        lm_json_bool_or(o, "scale_attn_by_inverse_layer_idx", false, &by_layer, where, e) ||
        lm_json_bool_or(o, "scale_attn_weights", true, &scaled, where, e) ||
        lm_json_bool_or(o, "reorder_and_upcast_attn", false, &upcast, where, e) ||
        lm_json_bool_or(o, "add_cross_attention", false, &cross, where, e))
        return e->code;
    if (cross)
        return lm_read_bad(where, "add_cross_attention", e, "is not supported");
    y.scale = scaled ? 1.0 / sqrt((double)y.head_dim) : 1.0;
    if (lm_read_layers(c, &y, e))
        return e->code;
    for (int64_t l = 0; by_layer && l < c->layers; l++)
        c->layer[l].scale /= (double)(l + 1);
    return LM_OK;
}

static const lm_tensor_name tensors[] = {
    { LM_PART_EMBED, "wte", "token_embd" },
    { LM_PART_POSITION, "wpe", "position_embd" },
    { LM_PART_ATTN_NORM, "ln_1", "attn_norm" },
    { LM_PART_QKV, "attn.c_attn", "attn_qkv" },
    { LM_PART_ATTN_OUT, "attn.c_proj", "attn_output" },
    { LM_PART_MLP_NORM, "ln_2", "ffn_norm" },
    { LM_PART_UP, "mlp.c_fc", "ffn_up" },
    { LM_PART_DOWN, "mlp.c_proj", "ffn_down" },
    { LM_PART_OUTPUT_NORM, "ln_f", "output_norm" },
    { LM_PART_OUTPUT, "lm_head", "output" },
    { 0, NULL, NULL },
};

/* Masks of attention. */
static const char *const buffers[] = { ".attn.bias", ".attn.masked_bias", NULL };

static const lm_gguf_key gguf_keys[] = {
    { .hf = "activation_function", "gelu_new", LM_KEY_TEXT },
    { .hf = "n_positions", "context_length", LM_KEY_INT },
    { .hf = "n_ctx", "context_length", LM_KEY_INT },
    { .hf = "n_embd", "embedding_length", LM_KEY_INT },
    { .hf = "n_layer", "block_count", LM_KEY_INT },
    { .hf = "n_head", "attention.head_count", LM_KEY_INT },
    { .hf = "n_inner",
      "feed_forward_length",
      LM_KEY_INT,
      .optional = true,
      .like = "n_embd",
      .times = 4,
      .unless_like = true },
    { .hf = "layer_norm_epsilon",
      "attention.layer_norm_epsilon",
      LM_KEY_REAL,
      .optional = true,
      .times = 1e-5 },
    { .hf = NULL },
};

const lm_arch lm_arch_gpt2 = {
    .name = "gpt2",
    .class_name = "GPT2LMHeadModel",
    .gguf = "gpt2",
    .keys = keys,
    .tied = true,
    .read = read,
    .root = "transformer.",
    .layers = "transformer.h.",
    .rootless = true,
    .tensors = tensors,
    .buffers = buffers,
    .conv1d = true,
    .residual_init = true,
    .branch_dropout = true,
    .gguf_keys = gguf_keys,
};
