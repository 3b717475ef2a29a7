/* SPDX-License-Identifier: Apache-2.0 */
/* arch_deepseek_v2.c -- DeepSeek-V2 and V2-Lite (arXiv:2405.04434): latent attention, experts
 * by softmax scores, groups of them by their best expert, shared experts, first layers without
 * experts. */
#include "model/arch_llama.h"

static const char *const keys[] = { LM_KEYS_LATENT, "mlp_bias", NULL };

static lm_code read(const json_t *o, const char *where, lm_config *c, lm_err *e)
{
    const lm_decoder_defaults d = { .positions = 2048 };
    const lm_scored_defaults m = {
        .softmax = true, .shared = 2, .groups = 1, .kept_groups = 1, .scale = 1
    };
    bool bias = false;

    if (lm_read_latent_decoder(o, where, &d, true, c, e) ||
        lm_json_bool_or(o, "mlp_bias", false, &bias, where, e))
        return e->code;
    if (bias)
        return lm_read_bad(where, "mlp_bias", e, "only false is supported");
    return lm_read_scored_experts(o, where, &m, c, e);
}

const lm_arch lm_arch_deepseek_v2 = {
    .name = "deepseek_v2",
    .class_name = "DeepseekV2ForCausalLM",
    .gguf = "deepseek2",
    .keys = keys,
    .read = read,
    .root = "model.",
    .layers = "model.layers.",
    .tensors = lm_deepseek_tensors,
    .fused = lm_fused_experts,
    .gguf_keys = lm_deepseek_gguf_keys,
};
