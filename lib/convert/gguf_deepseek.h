/* SPDX-License-Identifier: Apache-2.0 */
/* gguf_deepseek.h -- GGUF's keys of latent attention and of DeepSeek's experts ("deepseek2", "dots1").
 *
 * llama.cpp (src/models/deepseek2.cpp) has the cache of latents as attention with one key head: attention.key_length is
 * kv_lora_rank + qk_rope_head_dim, attention.value_length kv_lora_rank; the sizes of heads are key_length_mla and
 * value_length_mla.  Files before that have the sizes of heads under the first two, and a key head for each.
 * Private to lib/convert. */
#ifndef LM_CONVERT_GGUF_DEEPSEEK_H
#define LM_CONVERT_GGUF_DEEPSEEK_H

#include "convert/gguf_meta.h"

/* Sizes of latent attention in place of those of heads; the factor of YaRN that is in the scale of scores. */
void lm_gguf_put_latent(lm_gguf_plan *p, const lm_config *c);
/* Shared experts, scores and groups, first layers without experts. */
void lm_gguf_put_scored(lm_gguf_plan *p, const lm_config *c);
/* Report what llama.cpp would compute differently: refused, or warned of. */
lm_code lm_gguf_check_latent(const lm_import *m, lm_err *e);
lm_code lm_gguf_check_scored(const lm_import *m, lm_err *e);

/* Keys of config.json from those, added to `out`, which has the heads and layers.  Fails: LM_EFORMAT naming a key. */
lm_code lm_gguf_get_latent(const lm_gguf *g, const lm_arch *a, json_t *out, lm_err *e);
lm_code lm_gguf_get_scored(const lm_gguf *g, const lm_arch *a, json_t *out, lm_err *e);
/* Layers that predict tokens further on: llama.cpp has them behind the others, and block_count counts them. */
lm_code lm_gguf_get_further(const lm_gguf *g, const lm_arch *a, int64_t *layers, lm_err *e);
/* True if the scores of a file's experts are sigmoids. */
lm_code lm_gguf_scores_sigmoid(const lm_gguf *g, const char *arch, bool *sigmoid, lm_err *e);

#endif
