/* SPDX-License-Identifier: Apache-2.0 */
/* arch_bert.c -- BERT for masked language modelling (arXiv:1810.04805; tensor names and defaults of Hugging Face's
 * modeling_bert.py): an encoder with learned positions and token types, LayerNorm after each addition, biases everywhere,
 * and a head of a product, an activation and a LayerNorm in front of the embedding's matrix with a bias.
 *
 * A BertForPreTraining has a head of pairs beside it: of the first row a product and tanh (the pooler), then two logits,
 * of which the second is that of a text that does not follow.  Trainings of next-sentence prediction read it; elsewhere it
 * is passed over, as it is in the folders of a BertForMaskedLM.  GGUF has no head at all. */
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "model/arch_read.h"

#define PAIRS_CLASS "BertForPreTraining"

static const char *const keys[] = { LM_KEYS_COMMON,
                                    "hidden_size",
                                    "intermediate_size",
                                    "num_hidden_layers",
                                    "num_attention_heads",
                                    "hidden_act",
                                    "max_position_embeddings",
                                    "position_embedding_type",
                                    "type_vocab_size",
                                    "layer_norm_eps",
                                    "hidden_dropout_prob",
                                    "attention_probs_dropout_prob",
                                    "is_decoder",
                                    "add_cross_attention",
                                    NULL };

/* Other classes have other heads. */
static lm_code check_class(const json_t *o, const char *where, lm_config *c, lm_err *e)
{
    static const char *const known[] = { "BertForMaskedLM", PAIRS_CLASS, "BertModel" };
    const char *name = json_string_value(json_array_get(json_object_get(o, "architectures"), 0));
    bool is = !name;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        is = is || !strcmp(name, known[i]);
    c->pairs = name && !strcmp(name, PAIRS_CLASS);
    return is ? LM_OK
              : lm_fail(e, LM_EUSAGE, where, "use a BertForMaskedLM",
                        "\"architectures\": the head of a %.60s is not supported", name);
}

static lm_code read_act(const json_t *o, const char *where, lm_layer *y, lm_err *e)
{
    const char *act;
    if (lm_json_str_or(o, "hidden_act", "gelu", &act, where, e))
        return e->code;
    y->mlp = strcmp(act, "gelu") ? LM_MLP_GELU : LM_MLP_GELU_EXACT;
    if (y->mlp == LM_MLP_GELU && strcmp(act, "gelu_new") && strcmp(act, "gelu_pytorch_tanh"))
        return lm_read_bad(where, "hidden_act", e, "only gelu and gelu_new are supported");
    return LM_OK;
}

static lm_code read_sizes(const json_t *o, const char *where, lm_config *c, lm_layer *y, lm_err *e)
{
    if (lm_json_i64(o, "hidden_size", 1, LM_MOST_WIDTH, &c->width, where, e) ||
        lm_json_i64(o, "num_hidden_layers", 1, LM_MOST_LAYERS, &c->layers, where, e) ||
        lm_json_i64(o, "num_attention_heads", 1, LM_MOST_WIDTH, &y->heads, where, e) ||
        lm_json_i64(o, "intermediate_size", 1, LM_MOST_WIDTH, &y->ffn, where, e) ||
        lm_json_i64_or(o, "max_position_embeddings", 512, 1, INT64_C(1) << 31, &c->max_positions,
                       where, e) ||
        lm_json_i64_or(o, "type_vocab_size", 2, 1, LM_MOST_LAYERS, &c->types, where, e))
        return e->code;
    if (c->width % y->heads)
        return lm_fail(e, LM_EUSAGE, where, NULL,
                       "num_attention_heads %" PRId64 " does not divide hidden_size %" PRId64,
                       y->heads, c->width);
    y->kv_heads = y->heads;
    y->head_dim = c->width / y->heads;
    y->scale = 1.0 / sqrt((double)y->head_dim);
    return LM_OK;
}

/* What would make another model of it. */
static lm_code check_kind(const json_t *o, const char *where, const lm_config *c, lm_err *e)
{
    const json_t *pruned = json_object_get(o, "pruned_heads");
    const char *position;
    bool decoder, cross;
    if (lm_json_bool_or(o, "is_decoder", false, &decoder, where, e) ||
        lm_json_bool_or(o, "add_cross_attention", false, &cross, where, e) ||
        lm_json_str_or(o, "position_embedding_type", "absolute", &position, where, e))
        return e->code;
    if (decoder)
        return lm_read_bad(where, "is_decoder", e, "a BERT that is a decoder is not supported");
    if (cross)
        return lm_read_bad(where, "add_cross_attention", e, "is not supported");
    if (strcmp(position, "absolute") != 0)
        return lm_read_bad(where, "position_embedding_type", e, "only absolute is supported");
    if (json_object_size(pruned))
        return lm_read_bad(where, "pruned_heads", e, "is not supported");
    return c->tied ? LM_OK
                   : lm_read_bad(where, "tie_word_embeddings", e,
                                 "a head of its own is not supported for BERT");
}

static lm_code read(const json_t *o, const char *where, lm_config *c, lm_err *e)
{
    lm_layer y = { .rope = -1,
                   .bidirectional = true,
                   .qkv_bias = true,
                   .out_bias = true,
                   .mlp_bias = true,
                   .norm_sum = true };

    c->norm = LM_NORM_LAYER;
    c->embed_norm = c->head_transform = true;
    if (check_class(o, where, c, e) || read_sizes(o, where, c, &y, e) ||
        read_act(o, where, &y, e) ||
        lm_json_f64_or(o, "layer_norm_eps", 1e-12, &c->norm_eps, where, e) ||
        lm_json_f64_or(o, "hidden_dropout_prob", 0.1, &c->drop_embed, where, e) ||
        lm_json_f64_or(o, "attention_probs_dropout_prob", 0.1, &c->drop_attn, where, e) ||
        lm_json_bool_or(o, "tie_word_embeddings", c->arch->tied, &c->tied, where, e) ||
        check_kind(o, where, c, e))
        return e->code;
    c->drop_resid = c->drop_embed;
    return lm_read_layers(c, &y, e);
}

static const lm_tensor_name tensors[] = {
    { LM_PART_EMBED, "embeddings.word_embeddings", "token_embd" },
    { LM_PART_POSITION, "embeddings.position_embeddings", "position_embd" },
    { LM_PART_TYPES, "embeddings.token_type_embeddings", "token_types" },
    { LM_PART_EMBED_NORM, "embeddings.LayerNorm", "token_embd_norm" },
    { LM_PART_Q, "attention.self.query", "attn_q" },
    { LM_PART_K, "attention.self.key", "attn_k" },
    { LM_PART_V, "attention.self.value", "attn_v" },
    { LM_PART_ATTN_OUT, "attention.output.dense", "attn_output" },
    { LM_PART_ATTN_POST_NORM, "attention.output.LayerNorm", "attn_output_norm" },
    { LM_PART_UP, "intermediate.dense", "ffn_up" },
    { LM_PART_DOWN, "output.dense", "ffn_down" },
    { LM_PART_MLP_POST_NORM, "output.LayerNorm", "layer_output_norm" },
    { LM_PART_HEAD_DENSE, "cls.predictions.transform.dense", "" },
    { LM_PART_HEAD_NORM, "cls.predictions.transform.LayerNorm", "" },
    { LM_PART_HEAD_BIAS, "cls.predictions.bias", "" },
    { LM_PART_OUTPUT, "cls.predictions.decoder", "" },
    { LM_PART_POOLER, "pooler.dense", "" },
    { LM_PART_PAIR, "cls.seq_relationship", "" },
    { 0, NULL, NULL },
};

static const char *const buffers[] = { "embeddings.position_ids", "embeddings.token_type_ids",
                                       NULL };
/* Where they are no part of the graph. */
static const char *const passed_over[] = { "bert.pooler.", "pooler.", "cls.seq_relationship.",
                                           NULL };

static const lm_gguf_key gguf_keys[] = {
    { .hf = "hidden_size", "embedding_length", LM_KEY_INT },
    { .hf = "intermediate_size", "feed_forward_length", LM_KEY_INT },
    { .hf = "num_hidden_layers", "block_count", LM_KEY_INT },
    { .hf = "num_attention_heads", "attention.head_count", LM_KEY_INT },
    { .hf = "max_position_embeddings", "context_length", LM_KEY_INT },
    { .hf = "layer_norm_eps", "attention.layer_norm_epsilon", LM_KEY_REAL },
    { .hf = "hidden_act", "gelu", LM_KEY_TEXT },
    { .hf = "type_vocab_size", "", LM_KEY_MASKED },
    { .hf = NULL },
};

const lm_arch lm_arch_bert = {
    .name = "bert",
    .class_name = "BertForMaskedLM",
    .pairs_class = PAIRS_CLASS,
    .gguf = "bert",
    .keys = keys,
    .tied = true,
    .read = read,
    .root = "bert.",
    .layers = "bert.encoder.layer.",
    .rootless = true,
    .tensors = tensors,
    .buffers = buffers,
    .passed_over = passed_over,
    .old_norms = true,
    .branch_dropout = true,
    .gguf_keys = gguf_keys,
};
