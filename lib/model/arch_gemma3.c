/* SPDX-License-Identifier: Apache-2.0 */
/* arch_gemma3.c -- Gemma 3, the text model (arXiv:2503.19786; tensor names of Hugging Face's
 * modeling_gemma3.py): Gemma 2 with norms of queries and keys instead of the caps, five layers with
 * a sliding window for one without, and a separate rotary table for each of the two kinds. */
#include "model/arch_gemma.h"

static const char *const keys[] = { LM_KEYS_GEMMA, "rope_local_base_freq", "sliding_window_pattern",
                                    NULL };

static lm_code read(const json_t *o, const char *where, lm_config *c, lm_err *e)
{
    lm_gemma_defaults d = { .positions = 131072 };

    if (lm_json_i64_or(o, "sliding_window_pattern", 6, 1, LM_MOST_LAYERS, &d.pattern, where, e) ||
        lm_read_gemma(o, where, &d, c, e))
        return e->code;
    for (int64_t l = 0; l < c->layers; l++) {
        c->layer[l].qk_norm = LM_QK_NORM_HEAD;
        c->layer[l].soft_cap =
            0; /* the published class reads the key and does not cap its scores */
    }
    return lm_read_two_ropes(o, where, 1e6, "rope_local_base_freq", 1e4, c, e);
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
    .tensors = lm_branch_norm_tensors,
    .gguf_keys = gguf_keys,
    .gguf_head_dim = true,
    .gguf_windows = true,
    .gguf_pattern = 6,
    .gguf_wide_layers = 62,
};
