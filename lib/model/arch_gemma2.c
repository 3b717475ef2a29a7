/* SPDX-License-Identifier: Apache-2.0 */
/* arch_gemma2.c -- Gemma 2 (arXiv:2408.00118; tensor names of Hugging Face's modeling_gemma2.py):
 * scaled embeddings, four norms a layer that multiply by 1 + weight, GeGLU, soft caps of scores and
 * logits, every other layer with a sliding window, tied head.  Parts shared with Gemma 3 are here
 * too. */
#include <math.h>

#include "model/arch_gemma.h"

static const char *const keys[] = { LM_KEYS_GEMMA, NULL };

/* A cap; null: none. */
static lm_code read_cap(const json_t *o, const char *where, const char *key, double absent,
                        double *cap, lm_err *e)
{
    if (lm_json_f64_or(o, key, json_object_get(o, key) ? 0 : absent, cap, where, e))
        return e->code;
    return *cap >= 0 ? LM_OK : lm_read_bad(where, key, e, "is negative");
}

static lm_code read_layers(const json_t *o, const char *where, const lm_gemma_defaults *d,
                           lm_config *c, lm_err *e)
{
    double scalar, cap;
    int64_t window;
    bool both;

    if (lm_json_f64_or(o, "query_pre_attn_scalar", 256, &scalar, where, e) ||
        read_cap(o, where, "attn_logit_softcapping", d->attn_cap, &cap, e) ||
        lm_json_bool_or(o, "use_bidirectional_attention", false, &both, where, e) ||
        lm_read_window(o, where, 4096, &window, e) ||
        lm_read_layer_types(o, where, c, window, lm_slides_by_pattern, d->pattern, e))
        return e->code;
    if (!(scalar > 0))
        return lm_read_bad(where, "query_pre_attn_scalar", e, "is not positive");
    if (both)
        return lm_read_bad(where, "use_bidirectional_attention", e, "is not supported");
    for (int64_t l = 0; l < c->layers; l++) {
        lm_layer *y = &c->layer[l];
        y->norm_after = true;
        y->scale = 1 / sqrt(scalar);
        y->soft_cap = cap;
    }
    return LM_OK;
}

lm_code lm_read_gemma(const json_t *o, const char *where, const lm_gemma_defaults *d, lm_config *c,
                      lm_err *e)
{
    const lm_decoder_defaults all = { .positions = d->positions,
                                      .head_dim = 256,
                                      .kv_heads = 4,
                                      .act_key = "hidden_activation",
                                      .act = "gelu_pytorch_tanh" };

    if (lm_read_decoder(o, where, &all, c, e) || read_layers(o, where, d, c, e) ||
        lm_read_attention_bias(o, where, c, e))
        return e->code;
    c->norm_plus_one = true;
    c->embed_scale = sqrt((double)c->width);
    return read_cap(o, where, "final_logit_softcapping", d->logit_cap, &c->logit_cap, e);
}

static lm_code read(const json_t *o, const char *where, lm_config *c, lm_err *e)
{
    const lm_gemma_defaults d = {
        .positions = 8192, .pattern = 2, .attn_cap = 50, .logit_cap = 30
    };

    return lm_read_gemma(o, where, &d, c, e) ? e->code : lm_read_rope(o, where, 10000, c, e);
}

static const lm_gguf_key gguf_keys[] = {
    LM_GGUF_DECODER_KEYS,
    LM_GGUF_GEMMA_KEYS,
    { .hf = "sliding_window",
      "attention.sliding_window",
      LM_KEY_WINDOW,
      .optional = true,
      .times = 4096 },
    { .hf = "attn_logit_softcapping",
      "attn_logit_softcapping",
      LM_KEY_REAL,
      .optional = true,
      .times = 50 },
    { .hf = "final_logit_softcapping",
      "final_logit_softcapping",
      LM_KEY_REAL,
      .optional = true,
      .times = 30 },
    LM_GGUF_BIAS_KEY,
    LM_GGUF_ROPE_KEY,
    { .hf = NULL },
};

const lm_arch lm_arch_gemma2 = {
    .name = "gemma2",
    .class_name = "Gemma2ForCausalLM",
    .gguf = "gemma2",
    .keys = keys,
    .tied = true,
    .read = read,
    .root = "model.",
    .layers = "model.layers.",
    .tensors = lm_branch_norm_tensors,
    .gguf_keys = gguf_keys,
    .gguf_head_dim = true,
    .gguf_tied = true,
    .gguf_windows = true,
    .gguf_pattern = 2,
    .gguf_wide_layers = 46,
};
