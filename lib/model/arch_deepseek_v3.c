/* SPDX-License-Identifier: Apache-2.0 */
/* arch_deepseek_v3.c -- DeepSeek-V3 and R1 (arXiv:2412.19437): V2's latent attention, experts
 * by sigmoid scores with a bias that follows the load, groups of them by their two best. */
#include "model/arch_llama.h"

static const char *const keys[] = { LM_KEYS_LATENT, NULL };

static lm_code read(const json_t *o, const char *where, lm_config *c, lm_err *e)
{
    const lm_decoder_defaults d = { .positions = 4096 };
    const lm_scored_defaults m = {
        .normalise = true, .shared = 1, .groups = 8, .kept_groups = 4, .dense = 3, .scale = 2.5
    };

    return lm_read_ahead(o, where, c, e) || lm_read_latent_decoder(o, where, &d, true, c, e) ||
                   lm_read_scored_experts(o, where, &m, c, e)
               ? e->code
               : LM_OK;
}

const lm_arch lm_arch_deepseek_v3 = {
    .name = "deepseek_v3",
    .class_name = "DeepseekV3ForCausalLM",
    .gguf = "deepseek2",
    .keys = keys,
    .read = read,
    .root = "model.",
    .layers = "model.layers.",
    .tensors = lm_deepseek_tensors,
    .fused = lm_fused_experts,
    .gguf_keys = lm_deepseek_gguf_keys,
};
