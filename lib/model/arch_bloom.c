/* SPDX-License-Identifier: Apache-2.0 */
/* arch_bloom.c -- BLOOM (arXiv:2211.05100; tensor names and defaults of Hugging Face's modeling_bloom.py): biases by distance
 * (ALiBi) in place of positions, a LayerNorm behind the embedding and before each branch, biases everywhere, GELU, tied
 * head.
 *
 * The rows of query_key_value are the query, key and value of one head after another's. */
#include <inttypes.h>
#include <math.h>

#include "model/arch_read.h"

static const char *const keys[] = { LM_KEYS_COMMON,
                                    "hidden_size",
                                    "n_embed",
                                    "n_layer",
                                    "num_hidden_layers",
                                    "n_head",
                                    "num_attention_heads",
                                    "seq_length",
                                    "layer_norm_epsilon",
                                    "apply_residual_connection_post_layernorm",
                                    "hidden_dropout",
                                    "attention_dropout",
                                    "pretraining_tp",
                                    "slow_but_exact",
                                    "unk_token_id",
                                    NULL };

/* A size under its key, under the name that other files have, or under both; null is absent. */
static lm_code size_of(const json_t *o, const char *key, const char *other, int64_t most,
                       int64_t *to, const char *where, lm_err *e)
{
    int64_t n, again;
    if (lm_json_i64_or(o, key, 0, 1, most, &n, where, e) ||
        lm_json_i64_or(o, other, n, 1, most, &again, where, e))
        return e->code;
    if (!again)
        return lm_json_i64(o, key, 1, most, to, where, e);
    if (n && n != again)
        return lm_fail(e, LM_EUSAGE, where, NULL, "\"%s\" is %" PRId64 ", but \"%s\" is %" PRId64,
                       other, again, key, n);
    *to = again;
    return LM_OK;
}

static lm_code read_sizes(const json_t *o, const char *where, lm_config *c, lm_layer *y, lm_err *e)
{
    if (size_of(o, "hidden_size", "n_embed", LM_MOST_WIDTH, &c->width, where, e) ||
        size_of(o, "n_layer", "num_hidden_layers", LM_MOST_LAYERS, &c->layers, where, e) ||
        size_of(o, "n_head", "num_attention_heads", LM_MOST_WIDTH, &y->heads, where, e) ||
        lm_json_i64_or(o, "seq_length", 2048, 1, INT64_C(1) << 31, &c->max_positions, where, e))
        return e->code;
    if (c->width % y->heads)
        return lm_fail(e, LM_EUSAGE, where, NULL,
                       "n_head %" PRId64 " does not divide hidden_size %" PRId64, y->heads,
                       c->width);
    y->kv_heads = y->heads;
    y->head_dim = c->width / y->heads;
    y->scale = 1.0 / sqrt((double)y->head_dim);
    y->ffn = 4 * c->width;
    return LM_OK;
}

static lm_code read(const json_t *o, const char *where, lm_config *c, lm_err *e)
{
    lm_layer y = { .rope = -1,
                   .alibi = true,
                   .qkv_by_head = true,
                   .qkv_bias = true,
                   .out_bias = true,
                   .mlp_bias = true,
                   .mlp = LM_MLP_GELU,
                   .norm_before = true };
    bool post;

    c->norm = LM_NORM_LAYER;
    c->embed_norm = true;
    if (read_sizes(o, where, c, &y, e) ||
        lm_json_f64_or(o, "layer_norm_epsilon", 1e-5, &c->norm_eps, where, e) ||
        lm_json_f64_or(o, "hidden_dropout", 0, &c->drop_resid, where, e) ||
        lm_json_f64_or(o, "attention_dropout", 0, &c->drop_attn, where, e) ||
        lm_json_bool_or(o, "tie_word_embeddings", c->arch->tied, &c->tied, where, e) ||
        lm_json_bool_or(o, "apply_residual_connection_post_layernorm", false, &post, where, e))
        return e->code;
    if (post)
        return lm_read_bad(where, "apply_residual_connection_post_layernorm", e,
                           "residuals from behind the norms are not supported");
    return lm_read_layers(c, &y, e);
}

static const lm_tensor_name tensors[] = {
    { LM_PART_EMBED, "word_embeddings", "token_embd" },
    { LM_PART_EMBED_NORM, "word_embeddings_layernorm", "token_embd_norm" },
    { LM_PART_ATTN_NORM, "input_layernorm", "attn_norm" },
    { LM_PART_QKV, "self_attention.query_key_value", "attn_qkv" },
    { LM_PART_ATTN_OUT, "self_attention.dense", "attn_output" },
    { LM_PART_MLP_NORM, "post_attention_layernorm", "ffn_norm" },
    { LM_PART_UP, "mlp.dense_h_to_4h", "ffn_up" },
    { LM_PART_DOWN, "mlp.dense_4h_to_h", "ffn_down" },
    { LM_PART_OUTPUT_NORM, "ln_f", "output_norm" },
    { LM_PART_OUTPUT, "lm_head", "output" },
    { 0, NULL, NULL },
};

static const lm_gguf_key gguf_keys[] = {
    { .hf = "hidden_size", "embedding_length", LM_KEY_INT },
    { .hf = "n_layer", "block_count", LM_KEY_INT },
    { .hf = "n_head", "attention.head_count", LM_KEY_INT },
    { .hf = "seq_length", "context_length", LM_KEY_INT },
    { .hf = "layer_norm_epsilon",
      "attention.layer_norm_epsilon",
      LM_KEY_REAL,
      .optional = true,
      .times = 1e-5 },
    { .hf = NULL },
};

const lm_arch lm_arch_bloom = {
    .name = "bloom",
    .class_name = "BloomForCausalLM",
    .gguf = "bloom",
    .keys = keys,
    .tied = true,
    .read = read,
    .root = "transformer.",
    .layers = "transformer.h.",
    .rootless = true,
    .tensors = tensors,
    .branch_dropout = true,
    .gguf_keys = gguf_keys,
};
