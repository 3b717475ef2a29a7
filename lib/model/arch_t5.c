/* SPDX-License-Identifier: Apache-2.0 */
/* arch_t5.c -- T5 (arXiv:1910.10683; tensor names of Hugging Face's modeling_t5.py): an encoder and a decoder with one
 * embedding, RMSNorm before each branch, no biases, scores that are not scaled, and positions by biases of the scores: a number
 * for each head and bucket of distances, from layer 0 of a stack for all of its layers.
 *
 * 1.0 has MLPs with ReLU, and a tied head that reads states times width^-0.5; 1.1 (and FLAN-T5) MLPs with a gate, and a head of
 * its own.  The config of the whole is the decoder's, that of the encoder hangs on it; both have a table of names, in which
 * names are whole, as the embedding is outside the stacks. */
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "base/mem.h"
#include "model/arch_read.h"

static const char *const keys[] = { LM_KEYS_COMMON,
                                    "d_model",
                                    "d_kv",
                                    "d_ff",
                                    "num_layers",
                                    "num_decoder_layers",
                                    "num_heads",
                                    "relative_attention_num_buckets",
                                    "relative_attention_max_distance",
                                    "dropout_rate",
                                    "layer_norm_epsilon",
                                    "initializer_factor",
                                    "feed_forward_proj",
                                    "scale_decoder_outputs",
                                    "decoder_start_token_id",
                                    "n_positions",
                                    NULL };

static lm_code read_mlp(const json_t *o, const char *where, lm_layer *y, lm_err *e)
{
    static const struct {
        const char *name;
        lm_mlp mlp;
    } known[] = { { "relu", LM_MLP_RELU },
                  { "gelu", LM_MLP_GELU_EXACT },
                  { "gelu_new", LM_MLP_GELU },
                  { "gated-gelu", LM_MLP_GEGLU },
                  { "gated-gelu_new", LM_MLP_GEGLU },
                  { "gated-silu", LM_MLP_SWIGLU } };
    const char *name;

    if (lm_json_str_or(o, "feed_forward_proj", "relu", &name, where, e))
        return e->code;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (!strcmp(name, known[i].name)) {
            y->mlp = known[i].mlp;
            return LM_OK;
        }
    return lm_read_bad(where, "feed_forward_proj", e,
                       "only relu, gelu, gelu_new, gated-gelu and gated-silu are known");
}

static lm_code read_layer(const json_t *o, const char *where, lm_config *c, lm_layer *y, lm_err *e)
{
    if (lm_json_i64(o, "d_model", 1, LM_MOST_WIDTH, &c->width, where, e) ||
        lm_json_i64(o, "num_heads", 1, LM_MOST_WIDTH, &y->heads, where, e) ||
        lm_json_i64(o, "d_kv", 1, 4096, &y->head_dim, where, e) ||
        lm_json_i64(o, "d_ff", 1, LM_MOST_WIDTH, &y->ffn, where, e) ||
        lm_json_i64_or(o, "relative_attention_num_buckets", 32, 2, 1 << 20, &y->buckets, where,
                       e) ||
        lm_json_i64_or(o, "relative_attention_max_distance", 128, 1, INT64_C(1) << 30, &y->far,
                       where, e))
        return e->code;
    /* Half of the encoder's buckets are for each direction, and half of those for one distance each. */
    if (y->buckets % 4)
        return lm_read_bad(where, "relative_attention_num_buckets", e, "is not a multiple of 4");
    if (y->far <= y->buckets / 2)
        return lm_fail(e, LM_EUSAGE, where, NULL,
                       "\"relative_attention_max_distance\": %" PRId64
                       " is not above half of the %" PRId64 " buckets",
                       y->far, y->buckets);
    y->kv_heads = y->heads;
    y->scale = 1;
    return read_mlp(o, where, y, e);
}

static lm_code read_head(const json_t *o, const char *where, lm_config *c, lm_err *e)
{
    bool tied, scaled;

    if (lm_json_bool_or(o, "tie_word_embeddings", c->arch->tied, &tied, where, e) ||
        lm_json_bool_or(o, "scale_decoder_outputs", tied, &scaled, where, e))
        return e->code;
    /* Newer files of transformers say that the head is tied whatever it is (lm_config_see). */
    c->tied = tied && scaled;
    c->out_scale = scaled ? 1 / sqrt((double)c->width) : 0;
    return LM_OK;
}

/* Outputs begin with the padding token if no other is given. */
static lm_code read_start(const json_t *o, const char *where, lm_config *c, lm_err *e)
{
    const json_t *own = json_object_get(o, "decoder_start_token_id"),
                 *pad = json_object_get(o, "pad_token_id");
    const char *key = (own && !json_is_null(own)) || !pad || json_is_null(pad)
                          ? "decoder_start_token_id"
                          : "pad_token_id";
    return lm_json_i64_or(o, key, 0, 0, c->vocab - 1, &c->start, where, e);
}

static lm_code read_core(const json_t *o, const char *where, lm_config *c, lm_err *e)
{
    double rate;
    bool both;

    /* Positions have no bound: 512 of n_positions is the length of the published training. */
    c->max_positions = INT32_MAX;
    c->norm = LM_NORM_RMS;
    if (lm_json_bool_or(o, "is_encoder_decoder", true, &both, where, e) ||
        lm_json_f64_or(o, "layer_norm_epsilon", 1e-6, &c->norm_eps, where, e) ||
        lm_json_f64_or(o, "dropout_rate", 0.1, &rate, where, e) ||
        lm_json_f64_or(o, "initializer_factor", 1, &c->init_std, where, e) ||
        read_start(o, where, c, e))
        return e->code;
    if (!both)
        return lm_read_bad(where, "is_encoder_decoder", e, "one half alone is not supported");
    c->drop_embed = c->drop_resid = c->drop_attn = c->drop_mlp = rate;
    return LM_OK;
}

/* Deviations of modeling_t5.py, which are of each product's inner dimension, and of queries as if scores were scaled; a head of
 * its own begins likewise, as in the training of version 1.1 (t5x), not with 1, with which a loss begins near the width. */
static double std_of(const lm_config *c, lm_part part)
{
    const lm_layer *y = &c->layer[0];

    switch (part) {
    case LM_PART_EMBED:
        return c->init_std;
    case LM_PART_Q:
    case LM_PART_CROSS_Q:
        return c->init_std / sqrt((double)(c->width * y->head_dim));
    case LM_PART_ATTN_OUT:
    case LM_PART_CROSS_OUT:
        return c->init_std / sqrt((double)(y->heads * y->head_dim));
    case LM_PART_DOWN:
        return c->init_std / sqrt((double)y->ffn);
    default:
        return c->init_std / sqrt((double)c->width);
    }
}

/* ---- Names: version 1.0 has one matrix in an MLP's beginning, with a gate there are two ---- */

#define ATTENTION                                                                            \
    { LM_PART_Q, "layer.0.SelfAttention.q", "attn_q" },                                      \
        { LM_PART_K, "layer.0.SelfAttention.k", "attn_k" },                                  \
        { LM_PART_V, "layer.0.SelfAttention.v", "attn_v" },                                  \
        { LM_PART_ATTN_OUT, "layer.0.SelfAttention.o", "attn_o" },                           \
        { LM_PART_RELATIVE, "layer.0.SelfAttention.relative_attention_bias", "attn_rel_b" }, \
    {                                                                                        \
        LM_PART_ATTN_NORM, "layer.0.layer_norm", "attn_norm"                                 \
    }
#define CROSS                                                               \
    { LM_PART_CROSS_Q, "layer.1.EncDecAttention.q", "cross_attn_q" },       \
        { LM_PART_CROSS_K, "layer.1.EncDecAttention.k", "cross_attn_k" },   \
        { LM_PART_CROSS_V, "layer.1.EncDecAttention.v", "cross_attn_v" },   \
        { LM_PART_CROSS_OUT, "layer.1.EncDecAttention.o", "cross_attn_o" }, \
    {                                                                       \
        LM_PART_CROSS_NORM, "layer.1.layer_norm", "cross_attn_norm"         \
    }
#define MLP(n, up)                                            \
    { LM_PART_UP, n ".DenseReluDense." up, "ffn_up" },        \
        { LM_PART_DOWN, n ".DenseReluDense.wo", "ffn_down" }, \
    {                                                         \
        LM_PART_MLP_NORM, n ".layer_norm", "ffn_norm"         \
    }
#define GATE(n)                                            \
    {                                                      \
        LM_PART_GATE, n ".DenseReluDense.wi_0", "ffn_gate" \
    }
#define LAST(stack, short)                                                   \
    {                                                                        \
        LM_PART_OUTPUT_NORM, stack ".final_layer_norm", short ".output_norm" \
    }
#define EMBED                                 \
    {                                         \
        LM_PART_EMBED, "shared", "token_embd" \
    }
#define HEAD                                \
    {                                       \
        LM_PART_OUTPUT, "lm_head", "output" \
    }
#define END           \
    {                 \
        0, NULL, NULL \
    }

static const lm_tensor_name
    encoder_names[] = { ATTENTION, MLP("layer.1", "wi"), LAST("encoder", "enc"), END },
    gated_encoder_names[] = { ATTENTION, GATE("layer.1"), MLP("layer.1", "wi_1"),
                              LAST("encoder", "enc"), END },
    names[] = { EMBED, ATTENTION, CROSS, MLP("layer.2", "wi"), LAST("decoder", "dec"), HEAD, END },
    gated_names[] = {
        EMBED, ATTENTION, CROSS, GATE("layer.2"), MLP("layer.2", "wi_1"), LAST("decoder", "dec"),
        HEAD,  END
    };

/* Copies of the embedding, and a table of cross attention that no version reads. */
static const char *const buffers[] = { "encoder.embed_tokens.weight", "decoder.embed_tokens.weight",
                                       ".EncDecAttention.relative_attention_bias.weight", NULL };

static const lm_gguf_key gguf_keys[] = {
    { .hf = "d_model", "embedding_length", LM_KEY_INT },
    { .hf = "d_ff", "feed_forward_length", LM_KEY_INT },
    { .hf = "num_layers", "block_count", LM_KEY_INT },
    { .hf = "num_decoder_layers",
      "decoder_block_count",
      LM_KEY_INT,
      .optional = true,
      .like = "num_layers",
      .times = 1 },
    { .hf = "num_heads", "attention.head_count", LM_KEY_INT },
    { .hf = "d_kv", "attention.key_length", LM_KEY_INT },
    { .hf = "relative_attention_num_buckets", "attention.relative_buckets_count", LM_KEY_INT },
    { .hf = "layer_norm_epsilon", "attention.layer_norm_rms_epsilon", LM_KEY_REAL },
    { .hf = "n_positions", "context_length", LM_KEY_INT, .optional = true, .times = 512 },
    { .hf = "decoder_start_token_id", "decoder_start_token_id", LM_KEY_INT, .optional = true },
    { .hf = "feed_forward_proj", "", LM_KEY_STACKS },
    { .hf = NULL },
};

static lm_code read(const json_t *o, const char *where, lm_config *c, lm_err *e);

#define T5_ARCH                                                                           \
    .name = "t5", .class_name = "T5ForConditionalGeneration", .gguf = "t5", .keys = keys, \
    .tied = true, .read = read, .root = "", .buffers = buffers, .branch_dropout = true,   \
    .std = std_of, .gguf_keys = gguf_keys

static const lm_arch encoder = { T5_ARCH, .layers = "encoder.block.", .tensors = encoder_names,
                                 .gguf_stack = "enc." },
                     gated_encoder = { T5_ARCH, .layers = "encoder.block.",
                                       .tensors = gated_encoder_names, .gguf_stack = "enc." },
                     gated = { T5_ARCH, .layers = "decoder.block.", .tensors = gated_names,
                               .gguf_stack = "dec." };
const lm_arch lm_arch_t5 = { T5_ARCH, .layers = "decoder.block.", .tensors = names,
                             .gguf_stack = "dec." };

/* The encoder beside a decoder that has all but its layers. */
static lm_code read_encoder(lm_config *c, const lm_layer *y, int64_t layers, lm_err *e)
{
    lm_layer own = *y;
    if (lm_alloc_n(&c->encoder, 1, sizeof *c->encoder, "an encoder", e))
        return e->code;
    *c->encoder = *c;
    c->encoder->encoder = NULL;
    c->encoder->arch = lm_mlp_gated(y->mlp) ? &gated_encoder : &encoder;
    c->encoder->layers = layers;
    own.cross = false;
    own.bidirectional = true;
    return lm_read_layers(c->encoder, &own, e);
}

static lm_code read(const json_t *o, const char *where, lm_config *c, lm_err *e)
{
    lm_layer y = { .rope = -1, .norm_before = true, .cross = true };
    const json_t *own = json_object_get(o, "num_decoder_layers");
    int64_t layers;

    if (read_layer(o, where, c, &y, e) || read_core(o, where, c, e) ||
        lm_json_i64(o, "num_layers", 1, LM_MOST_LAYERS, &layers, where, e))
        return e->code;
    c->layers = layers;
    if (own && !json_is_null(own) &&
        lm_json_i64(o, "num_decoder_layers", 1, LM_MOST_LAYERS, &c->layers, where, e))
        return e->code;
    if (lm_mlp_gated(y.mlp))
        c->arch = &gated;
    return read_encoder(c, &y, layers, e) || read_head(o, where, c, e) || lm_read_layers(c, &y, e)
               ? e->code
               : LM_OK;
}
