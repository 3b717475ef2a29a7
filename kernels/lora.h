/* SPDX-License-Identifier: Apache-2.0 */
/* lora.h -- the low-rank paths beside a linear layer: y += s (x A^T) B^T.
 *
 * A layer whose weight holds several modules one below another (q, k, v) reads x once for all: A of the modules that are
 * adapted lie one below another, too, and so do their B.  A block is one such module: `rows` columns of y from `at` on, and
 * R columns of h.  The product B A is never formed.
 *
 * lora_down     in  x [N,K] act, a [H,K] act
 *               out h [N,H] act                            h = x a^T, sums in F32
 * lora_down_dx  in  dh [N,H] act, a [H,K] act, dres [N,K] act (optional)
 *               out dx [N,K] act (may alias dres)          dx = dh a (+ dres)
 *               (da is linear_dw of dh and x)
 * lora_up       in  y [N,M] act, h [N,H] act, b [S,R] act
 *               out z [N,M] act (may alias y)              z = y, and for block i
 *                                                          z[:, at_i + j] += scale_i sum_r h[:, i R + r] b[row_i + j, r]
 *               H = blocks R; row_i: the sum of `rows` of the blocks before i, S that of all
 * lora_up_dx    in  dz [N,M] act, b [S,R] act
 *               out dh [N,H] act                           dh[:, i R + r] = scale_i sum_j dz[:, at_i + j] b[row_i + j, r]
 * lora_up_dw    in  dz [N,M] act, h [N,H] act
 *               out db [S,R] F32 (acc)                     db[row_i + j, r] (+)= scale_i sum dz[:, at_i + j] h[:, i R + r]
 *
 * h (or dh) times the scale is rounded to act.  Tolerance: relative L2 1e-6 (F32), 6e-3 (BF16); lora_up_dw 1e-6 and 6e-3. */
#ifndef LM_KERNELS_LORA_H
#define LM_KERNELS_LORA_H

#include "kernels/kernel.h"

enum { LM_LORA_BLOCKS = 3 };

typedef struct {
    int64_t at, rows; /* columns of y */
    double scale;
} lm_lora_block;

typedef struct {
    lm_acc acc; /* lora_up_dw only */
    int64_t blocks;
    lm_lora_block block[LM_LORA_BLOCKS];
} lm_lora_attr;

/* True if a block has another scale than 1. */
static inline bool lm_lora_scales(const lm_lora_attr *a)
{
    for (int64_t i = 0; i < a->blocks; i++)
        if (a->block[i].scale != 1)
            return true;
    return false;
}

#endif
