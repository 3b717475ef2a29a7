/* SPDX-License-Identifier: Apache-2.0 */
/* arch_olmo2.c -- OLMo 2 (arXiv:2501.00656; tensor names of Hugging Face's modeling_olmo2.py):
 * Llama, but with the norm behind each branch instead of before it, and a norm of queries and keys
 * over all heads at once before the rotation. */
#include "model/arch_olmo.h"

static const char *const keys[] = { LM_KEYS_DECODER, "hidden_act", "attention_bias", NULL };

lm_code lm_read_olmo2(const json_t *o, const char *where, lm_config *c, lm_err *e)
{
    const lm_decoder_defaults d = { .positions = 2048, .norm_eps = 1e-5 };

    if (lm_read_decoder(o, where, &d, c, e) || lm_read_attention_bias(o, where, c, e))
        return e->code;
    c->norm = LM_NORM_RMS_ONCE;
    for (int64_t l = 0; l < c->layers; l++) {
        lm_layer *y = &c->layer[l];
        y->norm_before = false;
        y->norm_after = true;
        y->qk_norm = LM_QK_NORM_ROW;
    }
    return LM_OK;
}

static lm_code read(const json_t *o, const char *where, lm_config *c, lm_err *e)
{
    return lm_read_olmo2(o, where, c, e) ? e->code : lm_read_rope(o, where, 10000, c, e);
}

static const lm_gguf_key gguf_keys[] = {
    LM_GGUF_DECODER_KEYS, LM_GGUF_SILU_KEYS, LM_GGUF_BIAS_KEY, LM_GGUF_ROPE_KEY, { .hf = NULL },
};

const lm_arch lm_arch_olmo2 = {
    .name = "olmo2",
    .class_name = "Olmo2ForCausalLM",
    .gguf = "olmo2",
    .keys = keys,
    .read = read,
    .root = "model.",
    .layers = "model.layers.",
    .tensors = lm_branch_norm_tensors,
    .gguf_keys = gguf_keys,
    .gguf_head = true,
    .gguf_square = true,
    .gguf_windowed = &lm_arch_olmo3,
};
