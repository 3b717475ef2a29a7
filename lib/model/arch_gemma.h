/* SPDX-License-Identifier: Apache-2.0 */
/* arch_gemma.h -- common parts of Gemma 2 and Gemma 3.  Private to lib/model. */
#ifndef LM_MODEL_ARCH_GEMMA_H
#define LM_MODEL_ARCH_GEMMA_H

#include "model/arch_llama.h"

#define LM_KEYS_GEMMA                                                                              \
    LM_KEYS_DECODER, "hidden_act", "hidden_activation", "attention_bias", "query_pre_attn_scalar", \
        "sliding_window", "layer_types", "attn_logit_softcapping", "final_logit_softcapping",      \
        "use_bidirectional_attention"

#define LM_GGUF_GEMMA_KEYS                                           \
    { .hf = "hidden_activation", "gelu_pytorch_tanh", LM_KEY_TEXT }, \
        { .hf = "rms_norm_eps",                                      \
          "attention.layer_norm_rms_epsilon",                        \
          LM_KEY_REAL,                                               \
          .optional = true,                                          \
          .times = 1e-6 },                                           \
    {                                                                \
        .hf = "query_pre_attn_scalar", "", LM_KEY_SCALAR             \
    }

/* Properties of all layers of Gemma: embeddings scaled by the square root of the width, norms
 * before and behind each branch that multiply by 1 + weight, GeGLU, scores scaled by
 * query_pre_attn_scalar, and their soft cap (`cap` where the key is absent, as for that of the
 * logits).  Layer i slides unless `pattern` divides i + 1, or layer_types says otherwise.  The
 * caller reads the rotary tables. */
typedef struct {
    int64_t positions;
    int64_t pattern;
    double attn_cap, logit_cap;
} lm_gemma_defaults;

lm_code lm_read_gemma(const json_t *o, const char *where, const lm_gemma_defaults *d, lm_config *c,
                      lm_err *e);

#endif
