/* SPDX-License-Identifier: Apache-2.0 */
/* config.h -- a model's hyper-parameters: read from a Hugging Face config.json, checked, and
 * written back.
 *
 * Architectures: GPT-2, and the Llama family (Llama 2/3, Mistral, Qwen2, Qwen3), which differ in a
 * few switches. An unknown model_type, a missing key or a contradiction is LM_EFORMAT that names
 * the key.  Keys that say something this code would have to obey and does not know (another
 * activation, another rope_type, quantization_config) are refused, not ignored. */
#ifndef LM_MODEL_CONFIG_H
#define LM_MODEL_CONFIG_H

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"
#include "base/json.h"

typedef enum {
    LM_ARCH_GPT2,
    LM_ARCH_LLAMA,
    LM_ARCH_MISTRAL,
    LM_ARCH_QWEN2,
    LM_ARCH_QWEN3,
    LM_ARCH_COUNT,
} lm_arch;
const char *lm_arch_name(lm_arch a); /* model_type: "gpt2", "llama", ... */

typedef enum {
    LM_ROPE_NONE, /* GPT-2: learned positions */
    LM_ROPE_DEFAULT,
    LM_ROPE_LINEAR,
    LM_ROPE_DYNAMIC, /* NTK */
    LM_ROPE_LLAMA3,
    LM_ROPE_YARN,
} lm_rope_type;

typedef struct {
    lm_rope_type type;
    double theta, factor;
    double low_freq, high_freq;             /* llama3 */
    double beta_fast, beta_slow, attention; /* yarn; attention 0: derived from factor */
    double mscale, mscale_all_dim;          /* yarn; 0: absent */
    bool truncate;                          /* yarn */
    int64_t original;                       /* original_max_position_embeddings; 0: absent */
} lm_rope_config;

typedef struct {
    lm_arch arch;
    int64_t vocab, width, ffn, layers, heads, kv_heads, head_dim, max_positions;
    double norm_eps, init_std;
    bool tied;     /* lm_head shares the embedding */
    bool qkv_bias; /* Qwen2; Llama's attention_bias sets both */
    bool out_bias; /* bias on the attention's output projection */
    bool mlp_bias;
    bool qk_norm;          /* Qwen3 */
    int64_t window;        /* sliding window in keys, itself included; 0: none */
    int64_t window_from;   /* layers >= this slide (Qwen max_window_layers); 0: all */
    uint8_t *layer_window; /* [layers] 1: this layer slides (layer_types); NULL: by window_from */
    bool gelu_exact;       /* GPT-2: activation_function "gelu" instead of "gelu_new" */
    bool scale_by_layer;   /* GPT-2: scale_attn_by_inverse_layer_idx */
    bool scale_attention;  /* GPT-2: scale_attn_weights (true) */
    double drop_embed, drop_resid, drop_attn;
    int64_t bos, eos, pad; /* -1: none (eos: the first when it is a list) */
    lm_rope_config rope;
} lm_config;

lm_code lm_config_read(const json_t *obj, const char *where, lm_config *out, lm_err *e);
void lm_config_fini(lm_config *c);
bool lm_config_slides(const lm_config *c, int64_t layer);

/* Number of parameters (tied tensors once), and those that take part in matrix products (N of the
 * FLOP formula: no looked-up embedding rows, a head counted whether tied or not). */
int64_t lm_config_params(const lm_config *c);
int64_t lm_config_matmul_params(const lm_config *c);
/* FLOPs of forward and backward per token: 6 N + 12 L H D T (PaLM, appendix B; no causal discount).
 */
double lm_config_train_flops(const lm_config *c, int64_t seq);
/* FLOPs of forward and backward of `tokens` tokens with the products of attention for those pairs of a
 * query and a key that it looks at: `pairs` in layers that see all keys, `near` in those with the window.
 * 6 N tokens + 12 H D times the pairs of all layers: the formula above with T^2 pairs a sequence. */
double lm_config_pair_flops(const lm_config *c, double tokens, double pairs, double near);

/* Rows 0..positions-1 of the rotary table that kernels/rope.h describes, [positions, head_dim]. */
void lm_rope_table(const lm_config *c, int64_t positions, float *out);

#endif
