/* SPDX-License-Identifier: Apache-2.0 */
/* cache_shape.c -- what the caches of a layer hold. */
#include "kernels/linear_attention.h"
#include "model/cache_about.h"

lm_cache_shape lm_cache_shape_of(const lm_layer *y)
{
    const lm_delta_sizes *d = &y->delta;
    if (y->attention == LM_ATTENTION_LATENT)
        return (lm_cache_shape){ .kv_heads = 1,
                                 .head_dim = y->latent.kv_rank,
                                 .rotary = y->latent.rope_dim };
    if (y->attention == LM_ATTENTION_DELTA)
        return (lm_cache_shape){ .state = d->heads * d->key_dim * d->value_dim,
                                 .conv = (d->taps - 1) * (2 * d->key_heads * d->key_dim +
                                                          d->heads * d->value_dim) };
    if (y->attention == LM_ATTENTION_LINEAR)
        return (lm_cache_shape){ .state = y->kv_heads * y->head_dim *
                                          lm_linear_state_rows(y->linear.feature, y->head_dim) };
    return (lm_cache_shape){ .kv_heads = y->kv_heads, .head_dim = y->head_dim };
}
