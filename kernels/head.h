/* SPDX-License-Identifier: Apache-2.0 */
/* head.h -- the vocabulary head and cross-entropy in one operator: logits exist for a chunk of rows
 * at a time only (arXiv:2411.09009 and 2410.10989 do the same on GPUs).
 *
 * head_stats  in  x [N,C] act, w [V,C] act, target [N] I32 (negative: ignored), bias [V] F32 (optional)
 *             out loss [N] F32 = lse(x w^T + bias) - logit[target], of the sums in double, rounded once;
 *                 lse [N] F32 (optional): log of the sum of exp(logit); logit [N] F32 (optional): that
 *                 of the target; entropy [N] F32 (optional): -sum p log p of the row's distribution, in
 *                 nats; collision [N] F32 (optional): -log sum p^2 (Renyi's entropy of order 2).  All
 *                 are 0 where the row is ignored.
 * head_grad   in  x, w, target, lse [N] F32, scale [N] F32 (gradients of the losses), both or neither
 *                 of entropy [N] F32 and dentropy [N] F32 (gradients of the entropies), bias (optional)
 *             out dx [N,C] act (optional), dw [V,C] F32 (optional, acc), dbias [V] F32 (optional, acc; with
 *                 dw only): of the sum of scale * loss + dentropy * entropy over the rows; with
 *                 p = exp(logit - lse), dlogits = scale * (p - onehot) - dentropy * p (log p + entropy),
 *                 rounded to act
 * head_loss   both at once, with three products instead of four (a joined form: lib/op/fuse.h)
 *             in  x, w, target, scale, bias (optional)
 *             out loss, dx (optional), dw (optional, acc), dbias (optional, acc; with dw only)
 * With soft_cap c > 0, logits are c tanh((x w^T + bias) / c) (Gemma 2, arXiv:2408.00118, section 2), and
 * dlogits take the factor 1 - tanh^2.
 * w may be in codes (numeric/code_rows.h) where dw is not wanted; results are those of their numbers, to the bit.
 * chunk_rows 0: the kernel chooses.  Scratch never holds more than max(512, ceil(N/4)) rows of
 * logits, and beside them w packed for dx when that is no larger.  Columns >= vocab (padding) do
 * not exist for the softmax and get no gradient.  A target of `vocab` or more is a word of another part of the vocabulary: the
 * row counts, its logit is 0, and no column is that of the target.
 *
 * Tolerance: loss relative 1e-6 (F32), 4e-3 (BF16); gradients relative L2 2e-6, 1e-2. */
#ifndef LM_KERNELS_HEAD_H
#define LM_KERNELS_HEAD_H

#include "kernels/kernel.h"

typedef struct {
    int64_t vocab; /* columns that exist, <= V */
    int64_t chunk_rows;
    lm_acc acc;      /* of dw and dbias; not head_stats */
    double soft_cap; /* 0: none */
} lm_head_attr;

#endif
