/* SPDX-License-Identifier: Apache-2.0 */
/* arch_qwen3_next.h -- common parts of Qwen3-Next and its successors.  Private to lib/model. */
#ifndef LM_MODEL_ARCH_QWEN3_NEXT_H
#define LM_MODEL_ARCH_QWEN3_NEXT_H

#include "model/arch_llama.h"

#define LM_KEYS_STATES                                                                       \
    LM_KEYS_DECODER, "hidden_act", "attention_bias", "partial_rotary_factor", "layer_types", \
        "full_attention_interval", "linear_conv_kernel_dim", "linear_key_head_dim",          \
        "linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads"

/* Behind the widths. */
#define LM_GGUF_STATES_KEYS                                                        \
    { .hf = "full_attention_interval",                                             \
      "full_attention_interval",                                                   \
      LM_KEY_INT,                                                                  \
      .optional = true,                                                            \
      .times = 4 },                                                                \
        { .hf = "linear_conv_kernel_dim", "ssm.conv_kernel", LM_KEY_INT },         \
        { .hf = "linear_key_head_dim", "ssm.state_size", LM_KEY_INT },             \
        { .hf = "linear_num_key_heads", "ssm.group_count", LM_KEY_INT },           \
        { .hf = "linear_num_value_heads", "ssm.time_step_rank", LM_KEY_INT },      \
        { .hf = "linear_value_head_dim",                                           \
          "ssm.inner_size",                                                        \
          LM_KEY_SHARE,                                                            \
          .like = "linear_num_value_heads" },                                      \
    {                                                                              \
        .hf = "partial_rotary_factor", "rope.dimension_count", LM_KEY_PARTIAL_ROPE \
    }

/* For lm_arch.passed_over: layers that predict tokens further on, as transformers passes them over. */
extern const char *const lm_mtp_passed_over[];
/* Everything but experts. */
lm_code lm_read_states(const json_t *o, const char *where, int64_t kv_heads, lm_config *c,
                       lm_err *e);

#endif
