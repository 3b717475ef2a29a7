/* SPDX-License-Identifier: Apache-2.0 */
/* arch_olmo3.c -- OLMo 3 (arXiv:2512.13961; tensor names of Hugging Face's modeling_olmo3.py): OLMo 2
 * with a sliding window in three of four layers, whose positions are not scaled. */
#include "model/arch_olmo.h"

/* The base of published models.  transformers 5 gives it to layers with a window even where rope_theta differs;
 * here, as in llama.cpp, rope_theta is the base of all layers. */
#define THETA 500000.0

static const char *const keys[] = { LM_KEYS_DECODER,  "hidden_act",  "attention_bias",
                                    "sliding_window", "layer_types", NULL };

static lm_code read(const json_t *o, const char *where, lm_config *c, lm_err *e)
{
    int64_t window;

    if (lm_read_olmo2(o, where, c, e) || lm_read_window(o, where, 4096, &window, e) ||
        lm_read_layer_types(o, where, c, window, lm_slides_by_pattern, 4, e))
        return e->code;
    return lm_read_two_ropes(o, where, THETA, "rope_theta", THETA, c, e);
}

static const lm_gguf_key gguf_keys[] = {
    LM_GGUF_DECODER_KEYS,
    LM_GGUF_SILU_KEYS,
    LM_GGUF_BIAS_KEY,
    LM_GGUF_WINDOW_KEY,
    { .hf = "rope_theta", "rope.freq_base", LM_KEY_ROPE, .times = THETA },
    { .hf = NULL },
};

const lm_arch lm_arch_olmo3 = {
    .name = "olmo3",
    .class_name = "Olmo3ForCausalLM",
    .gguf = "olmo2",
    .keys = keys,
    .read = read,
    .root = "model.",
    .layers = "model.layers.",
    .tensors = lm_branch_norm_tensors,
    .gguf_keys = gguf_keys,
    .gguf_head = true,
    .gguf_square = true,
    .gguf_windows = true,
    .gguf_pattern = 4,
};
