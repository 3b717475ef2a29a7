/* SPDX-License-Identifier: Apache-2.0 */
/* rope.h -- rotary position embedding, half-split pairs (j, j+R/2) (arXiv:2104.09864; the pairing
 * is that of Hugging Face checkpoints).
 *
 * rope  in  qkv [N,(H+2K)D] act, pos [N] I32,
 *           table [P,R] F32: row p holds R/2 cosines then R/2 sines, with any scaling and attention factor applied
 *       out y [N,(H+2K)D] act: the first R of D dimensions of query and key heads rotated, the
 *           rest copied; may alias qkv.  inverse: rotates by -angle, which is the gradient.
 *
 * pos is in [0,P).  Tolerance: relative L2 1e-6 (F32), 4e-3 (BF16). */
#ifndef LM_KERNELS_ROPE_H
#define LM_KERNELS_ROPE_H

#include "kernels/kernel.h"

typedef struct {
    int64_t heads, kv_heads, head_dim, rotary_dim;
    bool inverse;
} lm_rope_attr;

#endif
