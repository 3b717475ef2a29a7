/* SPDX-License-Identifier: Apache-2.0 */
/* head.h -- the vocabulary head and cross-entropy in one operator: logits exist for a chunk of rows
 * at a time only (arXiv:2411.09009 and 2410.10989 do the same on GPUs).
 *
 * head_loss  in  x [N,C] act, w [V,C] act, target [N] I32 (negative: ignored), scale [N] F32
 *            out loss [N] F32 = lse(x w^T) - logit[target]  (0 where ignored; unscaled),
 *                dx [N,C] act (optional), dw [V,C] F32 (optional, acc)
 *            dx and dw are gradients of the sum of scale * loss over the rows;
 *            dlogits = scale * (softmax - onehot), rounded to act.
 *
 * Both gradients are computed here because the loss is the root: its own gradient is 1.
 * chunk_rows 0: the kernel chooses.  Scratch never holds more than max(512, ceil(N/4)) rows of
 * logits, and beside them w packed for dx when that is no larger.  Columns >= vocab (padding) do
 * not exist for the softmax and get no gradient.
 *
 * Tolerance: loss relative 1e-6 (F32), 4e-3 (BF16); gradients relative L2 2e-6, 1e-2. */
#ifndef LM_KERNELS_HEAD_H
#define LM_KERNELS_HEAD_H

#include "kernels/kernel.h"

typedef struct {
    int64_t vocab; /* columns that exist, <= V */
    int64_t chunk_rows;
    lm_acc acc; /* of dw */
} lm_head_attr;

#endif
