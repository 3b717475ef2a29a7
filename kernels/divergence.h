/* SPDX-License-Identifier: Apache-2.0 */
/* divergence.h -- the generalised Jensen-Shannon divergence of a teacher's and a student's distributions over the
 * vocabulary, row by row (arXiv:2306.13649, eq. 1, as TRL's GKD computes it); like the head (kernels/head.h), without
 * the logits of all rows at once.
 *
 * divergence       in  x [N,C] act, w [V,C] act: the student's last states and head,
 *                      xt [N,D] act, wt [U,D] act (may be in codes): the teacher's, which get no gradient,
 *                      target [N] I32: negative where a row is ignored; its value is not used
 *                  out loss [N] F32: with s = softmax(x w^T / T), t = softmax(xt wt^T / T), T = attr.temperature,
 *                      over the first attr.vocab words of both, and m = (1 - beta) s + beta t,
 *                        beta KL(t|m) + (1 - beta) KL(s|m);   beta 0: KL(t|s);   beta 1: KL(s|t)
 *                      0 where the row is ignored
 * divergence_grad  in  x, w, xt, wt, target, scale [N] F32 (gradients of the losses)
 *                  out dx [N,C] act (optional), dw [V,C] F32 (optional, acc) of the sum of scale * loss;
 *                      d loss / d logit = s (g - sum of s g) / T, g = (1 - beta) log(s / m);   beta 0: (s - t) / T;
 *                      beta 1: g = log(s / t).  Rounded to act before the products
 * With a soft cap c > 0, logits are c tanh(. / c) before they are divided by T.
 *
 * Tolerance: relative L2 5e-6 (F32), 2e-2 (BF16). */
#ifndef LM_KERNELS_DIVERGENCE_H
#define LM_KERNELS_DIVERGENCE_H

#include "kernels/kernel.h"

typedef struct {
    int64_t vocab;
    lm_acc acc; /* of dw; divergence_grad alone */
    double beta, temperature;
    double soft_cap, teacher_cap; /* 0: none */
} lm_divergence_attr;

/* Rows of a chunk: two of logits for each fit 32 MiB together, and one is always there. */
static inline int64_t lm_divergence_chunk(int64_t rows, int64_t pitch)
{
    int64_t chunk = (32 << 20) / 8 / pitch / 16 * 16;
    chunk = chunk < 16 ? 16 : chunk;
    return chunk < rows ? chunk : rows;
}

#endif
