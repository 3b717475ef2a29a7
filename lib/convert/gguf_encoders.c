/* SPDX-License-Identifier: Apache-2.0 */
/* gguf_encoders.c -- see gguf_encoders.h. */
#include "convert/gguf_encoders.h"

#include <inttypes.h>

#include "convert/gguf_keys.h"

enum {
    FAR = 128,
    CONTEXT = 512
}; /* llama.cpp's farthest distance, and its length of a text where a config has none */

/* ---- writing ---- */

static void put(lm_gguf_plan *p, const lm_config *c, const char *rest, int64_t n)
{
    char key[LM_GGUF_KEY];
    lm_gguf_put_u32(p, lm_gguf_key_of(key, c->arch->gguf, rest), (uint32_t)n);
}

static void put_real(lm_gguf_plan *p, const lm_config *c, const char *rest, double v)
{
    char key[LM_GGUF_KEY];
    lm_gguf_put_f32(p, lm_gguf_key_of(key, c->arch->gguf, rest), (float)v);
}

void lm_gguf_put_stacks(lm_gguf_plan *p, const lm_config *c)
{
    const lm_layer *y = &c->layer[0];

    put(p, c, "block_count", c->encoder->layers);
    put(p, c, "decoder_block_count", c->layers);
    put(p, c, "context_length", CONTEXT); /* positions have no bound */
    put(p, c, "embedding_length", c->width);
    put(p, c, "feed_forward_length", y->ffn);
    put(p, c, "attention.head_count", y->heads);
    put(p, c, "attention.key_length", y->head_dim);
    put(p, c, "attention.value_length", y->head_dim);
    put(p, c, "attention.relative_buckets_count", y->buckets);
    put_real(p, c, "attention.layer_norm_epsilon", c->norm_eps);
    put_real(p, c, "attention.layer_norm_rms_epsilon", c->norm_eps);
    put(p, c, "decoder_start_token_id", c->start);
    put(p, c, "vocab_size", c->vocab);
}

lm_code lm_gguf_check_stacks(const lm_import *m, lm_err *e)
{
    const lm_config *c = &m->config;
    const lm_layer *y = &c->layer[0];

    if (y->mlp != LM_MLP_RELU && y->mlp != LM_MLP_GEGLU)
        return lm_gguf_no_words(m, "feed_forward_proj but relu and gated-gelu", e);
    if (y->far != FAR)
        return lm_gguf_no_words(m, "relative_attention_max_distance but 128", e);
    if (c->out_scale > 0)
        lm_log(m->sink, LM_LOG_WARN,
               "%s: llama.cpp's %s does not scale what a tied head reads: it ranks tokens alike, "
               "with other probabilities",
               m->path, c->arch->gguf);
    return LM_OK;
}

void lm_gguf_check_masked(const lm_import *m)
{
    if (m->config.layer[0].mlp == LM_MLP_GELU_EXACT)
        lm_log(m->sink, LM_LOG_WARN, "%s: llama.cpp's %s computes GELU by its tanh form", m->path,
               m->config.arch->gguf);
}

/* ---- reading ---- */

lm_code lm_gguf_get_stacks(const lm_gguf *g, const lm_arch *a, json_t *out, lm_err *e)
{
    lm_gguf_reader r = { .g = g, .arch = a->gguf, .o = out, .e = e };
    const int64_t dim = json_integer_value(json_object_get(out, "d_kv"));
    int64_t values;

    if (lm_gguf_whole(&r, "attention.value_length", dim, &values, NULL))
        return e->code;
    if (values != dim)
        return lm_fail(e, LM_EUSAGE, lm_gguf_path(g), NULL,
                       "'%s' is %" PRId64 ", keys are %" PRId64
                       " wide: only models in which they are equal are supported",
                       r.key, values, dim);
    json_object_set_new(
        out, "feed_forward_proj",
        json_string(lm_gguf_find(g, "enc.blk.0.ffn_gate.weight") ? "gated-gelu" : "relu"));
    json_object_set_new(out, "is_encoder_decoder", json_true());
    return LM_OK;
}

lm_code lm_gguf_get_masked(const lm_gguf *g, const lm_arch *a, json_t *out, lm_err *e)
{
    char name[LM_TENSOR_NAME];
    const lm_gguf_tensor *types =
        lm_gguf_find(g, lm_tensor_gguf_name(a, LM_PART_TYPES, -1, false, name));

    if (!types)
        return lm_fail(e, LM_EUSAGE, lm_gguf_path(g), NULL,
                       "it has no tensor '%s': other models than BERT are of this architecture too",
                       name);
    /* llama.cpp leaves out an axis of length 1 */
    json_object_set_new(out, "type_vocab_size", json_integer(types->ndim > 1 ? types->dim[0] : 1));
    json_object_set_new(out, "architectures", json_pack("[s]", "BertModel"));
    return LM_OK;
}
