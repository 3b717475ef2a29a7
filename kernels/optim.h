/* optim.h -- optimiser steps over flat arrays, and the reductions around them.
 *
 * All operands are 1-D of n elements; master weights, gradients and states F32 (F64 in the
 * reference).  g' = g * g_scale (clipping by norm), then bounded by +-clip_value when that is > 0.
 *
 * adamw     in  g            out p, m, v, copy (BF16, optional: p rounded)
 *           p *= 1 - lr*wd; m = b1 m + (1-b1) g'; v = b2 v + (1-b2) g'^2;
 *           p -= lr * (m/bc1) / (sqrt(v/bc2) + eps)
 *           (arXiv:1711.05101 alg. 2; eps outside the root, bias corrections bc = 1 - b^t given)
 * sgd       in  g            out p, buf (optional: momentum), copy (optional)
 *           d = g' + wd p (coupled); buf = first ? d : momentum*buf + (1-dampening)*d;
 *           d = nesterov ? d + momentum*buf : buf; p -= lr d
 * sumsq     in  g            out s [1] F64: sum of squares in double over fixed blocks of 65,536,
 *                            added in order (the same bits for any number of threads)
 *
 * An optimiser step touches memory once: at least 70 % of memcpy's bytes/s. */
#ifndef LM_KERNELS_OPTIM_H
#define LM_KERNELS_OPTIM_H

#include "kernels/kernel.h"

typedef struct {
    double lr, beta1, beta2, eps, weight_decay, bc1, bc2;
    double g_scale, clip_value;
} lm_adamw_attr;

typedef struct {
    double lr, momentum, dampening, weight_decay;
    double g_scale, clip_value;
    bool nesterov, first;
} lm_sgd_attr;

#endif
