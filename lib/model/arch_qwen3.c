/* SPDX-License-Identifier: Apache-2.0 */
/* arch_qwen3.c -- Qwen3, dense (arXiv:2505.09388): Llama with a norm of each head of queries and
 * keys before the rotation, heads of an independent width, and Qwen2's windows. */
#include "model/arch_llama.h"

static const char *const keys[] = { LM_KEYS_DECODER,  "hidden_act",
                                    "attention_bias", "use_sliding_window",
                                    "sliding_window", "max_window_layers",
                                    "layer_types",    NULL };

static lm_code read(const json_t *o, const char *where, lm_config *c, lm_err *e)
{
    const lm_decoder_defaults d = { .positions = 32768, .head_dim = 128, .kv_heads = 32 };

    if (lm_read_decoder(o, where, &d, c, e) || lm_read_attention_bias(o, where, c, e) ||
        lm_read_window_from(o, where, c, e))
        return e->code;
    for (int64_t l = 0; l < c->layers; l++)
        c->layer[l].qk_norm = LM_QK_NORM_HEAD;
    return lm_read_rope(o, where, 10000, c, e);
}

static const lm_gguf_key gguf_keys[] = {
    LM_GGUF_DECODER_KEYS, LM_GGUF_SILU_KEYS, LM_GGUF_WINDOW_KEY,
    LM_GGUF_BIAS_KEY,     LM_GGUF_ROPE_KEY,  { .hf = NULL },
};

const lm_arch lm_arch_qwen3 = {
    .name = "qwen3",
    .class_name = "Qwen3ForCausalLM",
    .gguf = "qwen3",
    .keys = keys,
    .read = read,
    .root = "model.",
    .layers = "model.layers.",
    .tensors = lm_llama_tensors,
    .mixture = &lm_arch_qwen3_moe,
    .gguf_keys = gguf_keys,
    .gguf_head_dim = true,
};
