/* SPDX-License-Identifier: Apache-2.0 */
/* arch_gemma3.c -- Gemma 3, the text model (arXiv:2503.19786; tensor names of Hugging Face's
 * modeling_gemma3.py): Gemma 2 with norms of queries and keys instead of the caps, five layers with
 * a sliding window for one without, and a separate rotary table for each of the two kinds. */
#include <string.h>

#include "model/arch_gemma.h"

static const char *const keys[] = { LM_KEYS_GEMMA, "rope_local_base_freq", "sliding_window_pattern",
                                    NULL };

/* One of the two tables, from an object of rope_parameters (NULL: none) or from `key` of the config itself. */
static lm_code read_table(const json_t *o, const char *where, const json_t *s, const char *key,
                          double theta, lm_rope_config *r, lm_err *e)
{
    r->type = LM_ROPE_DEFAULT;
    if (lm_json_f64_or(o, key, theta, &r->theta, where, e))
        return e->code;
    if (!s || json_is_null(s))
        return LM_OK;
    if (!json_is_object(s))
        return lm_read_bad(where, "rope_parameters", e, "holds something that is not an object");
    return lm_read_rope_object(s, where, "rope_parameters", r, e);
}

/* Table 0 is for layers without window, table 1 for those with one.  Newer files have
 * rope_parameters with an object for each, older rope_theta and rope_scaling for the first and
 * rope_local_base_freq for the second. */
static lm_code read_tables(const json_t *o, const char *where, lm_config *c, lm_err *e)
{
    static const char *const kinds[2] = { "full_attention", "sliding_attention" };
    const json_t *both = json_object_get(o, "rope_parameters"), *of[2];

    for (int i = 0; i < 2; i++)
        of[i] = json_object_get(both, kinds[i]);
    if (json_object_size(both) && !of[0] && !of[1])
        return lm_fail(e, LM_EFORMAT, where,
                       "give it a \"full_attention\" and a \"sliding_attention\"",
                       "\"rope_parameters\" has no set for a kind of layer");
    if (of[0] || of[1]) {
        const json_t *scaling = json_object_get(o, "rope_scaling");
        if (scaling && !json_is_null(scaling))
            return lm_fail(e, LM_EFORMAT, where, "keep one of them",
                           "\"rope_parameters\" and \"rope_scaling\" are both given");
        if (read_table(o, where, of[0], "rope_theta", 1e6, &c->rope[0], e))
            return e->code;
    } else if (lm_read_rope(o, where, 1e6, c, e)) {
        return e->code;
    }
    c->ropes = 2;
    return read_table(o, where, of[1], "rope_local_base_freq", 1e4, &c->rope[1], e);
}

static lm_code read(const json_t *o, const char *where, lm_config *c, lm_err *e)
{
    lm_gemma_defaults d = { .positions = 131072 };

    if (lm_json_i64_or(o, "sliding_window_pattern", 6, 1, LM_MOST_LAYERS, &d.pattern, where, e) ||
        lm_read_gemma(o, where, &d, c, e) || read_tables(o, where, c, e))
        return e->code;
    for (int64_t l = 0; l < c->layers; l++) {
        c->layer[l].qk_norm = LM_QK_NORM_HEAD;
        c->layer[l].rope = c->layer[l].window > 0;
    }
    return LM_OK;
}

static const lm_gguf_key gguf_keys[] = {
    LM_GGUF_DECODER_KEYS,
    LM_GGUF_GEMMA_KEYS,
    LM_GGUF_WINDOW_KEY,
    { .hf = "final_logit_softcapping",
      "final_logit_softcapping",
      LM_KEY_REAL,
      .optional = true,
      .unless_like = true },
    { .hf = "rope_local_base_freq",
      "rope.freq_base_swa",
      LM_KEY_REAL,
      .optional = true,
      .times = 1e4 },
    LM_GGUF_BIAS_KEY,
    LM_GGUF_ROPE_KEY,
    { .hf = NULL },
};

const lm_arch lm_arch_gemma3 = {
    .name = "gemma3_text",
    .class_name = "Gemma3ForCausalLM",
    .gguf = "gemma3",
    .keys = keys,
    .tied = true,
    .read = read,
    .root = "model.",
    .layers = "model.layers.",
    .tensors = lm_gemma_tensors,
    .gguf_keys = gguf_keys,
    .gguf_head_dim = true,
    .gguf_windows = true,
    .gguf_pattern = 6,
    .gguf_wide_layers = 62,
};
