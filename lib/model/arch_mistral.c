/* SPDX-License-Identifier: Apache-2.0 */
/* arch_mistral.c -- Mistral (arXiv:2310.06825): Llama with a sliding window in all layers. */
#include "model/arch_llama.h"

static const char *const keys[] = { LM_KEYS_DECODER, "hidden_act", "sliding_window", NULL };

static lm_code read(const json_t *o, const char *where, lm_config *c, lm_err *e)
{
    int64_t window;

    if (lm_read_decoder(o, where, &(lm_decoder_defaults){ .positions = 131072, .kv_heads = 8 }, c,
                        e) ||
        lm_read_window(o, where, 4096, &window, e) || /* null: none */
        lm_read_layer_types(o, where, c, window, lm_slides_always, 0, e))
        return e->code;
    return lm_read_rope(o, where, 10000, c, e);
}

static const lm_gguf_key gguf_keys[] = {
    LM_GGUF_DECODER_KEYS, LM_GGUF_SILU_KEYS, LM_GGUF_WINDOW_KEY,
    LM_GGUF_BIAS_KEY,     LM_GGUF_ROPE_KEY,  { .hf = NULL },
};

const lm_arch lm_arch_mistral = {
    .name = "mistral",
    .class_name = "MistralForCausalLM",
    .gguf = "llama",
    .keys = keys,
    .read = read,
    .root = "model.",
    .layers = "model.layers.",
    .tensors = lm_llama_tensors,
    .mixture = &lm_arch_mixtral,
    .gguf_keys = gguf_keys,
    .gguf_pairs = true,
};
