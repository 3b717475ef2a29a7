/* SPDX-License-Identifier: Apache-2.0 */
/* expert.h -- what the experts of gpt-oss have beside their products (grouped.h): biases of each expert, and a gated
 * activation with bounds (openai/gpt-oss, gpt_oss/torch/model.py).
 *
 * Rows and offsets are those of grouped.h.
 *
 * grouped_bias      in  x [N,M] act, b [G,M] F32, offsets [G+1] I32
 *                   out y [N,M] act (may alias x)         y = x + b[g] for the rows of g; rows of no group: x
 * grouped_bias_db   in  dy [N,M] act, offsets [G+1] I32
 *                   out db [G,M] F32 (acc)                db[g] (+)= sum of dy over the rows of g
 * clamped_swiglu    in  gu [N,2I] act, gates at even places and ups at odd ones
 *                   out h [N,I] act = (u + 1) g sigmoid(alpha g) with g = min(gate, limit),
 *                       u = up between -limit and limit
 * clamped_swiglu_dx in  dh [N,I] act, gu [N,2I] act
 *                   out dgu [N,2I] act                    0 where a bound holds; at the bound itself it does not
 * Results do not depend on the number of threads.
 * Tolerance: relative L2 1e-6 (F32), 4e-3 (BF16); grouped_bias_db 1e-5. */
#ifndef LM_KERNELS_EXPERT_H
#define LM_KERNELS_EXPERT_H

#include "kernels/kernel.h"

typedef struct {
    double limit, alpha;
} lm_clamped_swiglu_attr;

typedef struct {
    int64_t groups;
    lm_acc acc; /* grouped_bias_db only */
} lm_grouped_bias_attr;

#endif
