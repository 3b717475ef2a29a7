/* SPDX-License-Identifier: Apache-2.0 */
/* cache_about.h -- what a cache file (kv/file.h) says about the model whose cache it holds. */
#ifndef LM_MODEL_CACHE_ABOUT_H
#define LM_MODEL_CACHE_ABOUT_H

#include "base/buf.h"
#include "kv/file.h"
#include "model/config.h"

/* What the caches of a layer hold: rows of heads; a latent of each token and the rotated part of its key (rotary > 0);
 * or a state and the rows in front of its convolution, with no heads. */
typedef struct {
    int64_t kv_heads, head_dim, rotary, state, conv;
} lm_cache_shape;
lm_cache_shape lm_cache_shape_of(const lm_layer *y);

/* Owns what `about` points to; `tokens` and `history` are the caller's. */
typedef struct {
    lm_kv_about about;
    char weights[33], config[33];
    lm_buf rope;
    int64_t *kv_heads, *head_dim, *latent, *state, *conv;
} lm_cache_about;

/* Fill *out for caches of `c` in the type `act` whose rotary tables have `positions` rows (the context);
 * `weights`: lm_model_source_weights_digest.  Release with lm_cache_about_fini, also after a failure. */
lm_code lm_cache_about_model(const lm_config *c, const uint8_t weights[16], int64_t positions,
                             lm_dtype act, lm_cache_about *out, lm_err *e);
void lm_cache_about_fini(lm_cache_about *a);

/* Append the rotary settings as JSON text: {"tables":[{"type":..., ...}],"layers":[table of each layer]},
 * with every number that determines the angles, and no other.  Equal texts: equal keys.  Tables of the
 * dynamic type depend on the number of positions beyond the trained ones.  Learned positions: "{}". */
lm_code lm_rope_text(const lm_config *c, int64_t positions, lm_buf *out, lm_err *e);

/* XXH3-128, 32 hexadecimal digits, of all numbers of a configuration that determine what a model computes from its weights:
 * norms, heads, windows, scales, caps, MLPs and the rotary tables within the trained positions.  Without the
 * number of positions (unless angles depend on it), ids of special tokens, dropout and the type of weights. */
lm_code lm_config_digest(const lm_config *c, char hex[33], lm_err *e);

#endif
