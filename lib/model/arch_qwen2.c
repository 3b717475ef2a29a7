/* SPDX-License-Identifier: Apache-2.0 */
/* arch_qwen2.c -- Qwen2 (arXiv:2407.10671): Llama with biases of queries, keys and values, and a sliding window in the
 * upper layers where the config requires it. */
#include "model/arch_llama.h"

static const char *const keys[] = {
    LM_KEYS_DECODER, "hidden_act", "use_sliding_window", "sliding_window", "max_window_layers",
    "layer_types",   NULL
};

static lm_code read(const json_t *o, const char *where, lm_config *c, lm_err *e)
{
    if (lm_read_decoder(o, where, &(lm_decoder_defaults){ .positions = 32768, .kv_heads = 32 }, c,
                        e) ||
        lm_read_window_from(o, where, c, e))
        return e->code;
    for (int64_t l = 0; l < c->layers; l++)
        c->layer[l].qkv_bias = true;
    return lm_read_rope(o, where, 10000, c, e);
}

static const lm_gguf_key gguf_keys[] = {
    LM_GGUF_DECODER_KEYS, LM_GGUF_SILU_KEYS, LM_GGUF_WINDOW_KEY, LM_GGUF_ROPE_KEY, { .hf = NULL },
};

const lm_arch lm_arch_qwen2 = {
    .name = "qwen2",
    .class_name = "Qwen2ForCausalLM",
    .gguf = "qwen2",
    .keys = keys,
    .read = read,
    .root = "model.",
    .layers = "model.layers.",
    .tensors = lm_llama_tensors,
    .mixture = &lm_arch_qwen2_moe,
    .gguf_keys = gguf_keys,
};
