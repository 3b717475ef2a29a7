/* SPDX-License-Identifier: Apache-2.0 */
/* optim.h -- optimiser steps over flat arrays, and the reductions around them.
 *
 * All operands are 1-D; master weights, gradients and states F32 (F64 in the reference), n
 * elements.  Gradients are clipped when read: g' = g min(1, clip_norm / (sqrt(sumsq) + 1e-6)) when
 * clip_norm > 0 and sumsq is given, then bounded by +-clip_value when that is > 0.  When sumsq or
 * watch is given and not finite, nothing is written: the kernel decides whether the step is
 * applied, and the host reads the numbers afterwards.  Numbers that change from step to step may
 * also come from memory (`now`, which then overrides the attributes), so that a recorded step can
 * be replayed.
 *
 * adamw     in  g, sumsq [1] F64 (optional), watch [1] F64 (optional),
 *               now [3] F64 (optional): lr, bc1, bc2
 *           out p, m, v, copy (BF16, optional: p rounded; a matrix may be in panels, kernels/panels.h)
 *           p *= 1 - lr*wd; m = b1 m + (1-b1) g'; v = b2 v + (1-b2) g'^2;
 *           p -= lr * (m/bc1) / (sqrt(v/bc2) + eps)
 *           (arXiv:1711.05101 alg. 2; eps outside the root, bias corrections bc = 1 - b^t given)
 * sgd       in  g, sumsq, watch (as above), now [2] F64 (optional): lr, first (0 or 1)
 *           out p, buf (optional: momentum), copy (optional)
 *           d = g' + wd p (coupled); buf = first ? d : momentum*buf + (1-dampening)*d;
 *           d = nesterov ? d + momentum*buf : buf; p -= lr d
 * sumsq     in  x, blocks [B,4] I32
 *           out s [S] F64: at the place of each block (lm_sum_block) its sum of squares in double, in an order that depends
 *                            on its count alone; 0 elsewhere
 * clip      in  sumsq [1] F64, watch [1] F64 (optional)
 *           out s [1] F64: the factor for gradients as above, NaN when nothing may be written
 * total     in  x            out s [1] F64: sum in double, in order (on a device: in a fixed
 *                            order); adds to s when step->more, else replaces it
 * strided   in  x            out y [m]: y[i] = x[i * stride], F32
 *
 * An optimiser step touches memory once: at least 70 % of memcpy's bytes/s. */
#ifndef LM_KERNELS_OPTIM_H
#define LM_KERNELS_OPTIM_H

#include "kernels/kernel.h"

/* A row of `blocks`: `count` elements, LM_SUM_BLOCK at most, from element LM_SUM_BLOCK page + first on, whose sum is number
 * `place` of `s`, where no other block's is; count 0: none of these is read. */
enum { LM_SUM_BLOCK = 65536 };
typedef struct {
    int32_t page, first, count, place;
} lm_sum_block;

typedef struct {
    double lr, beta1, beta2, eps, weight_decay, bc1, bc2;
    double clip_norm, clip_value; /* 0: none */
} lm_adamw_attr;

typedef struct {
    double lr, momentum, dampening, weight_decay;
    double clip_norm, clip_value; /* 0: none */
    bool nesterov, first;
} lm_sgd_attr;

typedef struct {
    double clip_norm; /* 0: none */
} lm_clip_attr;

typedef struct {
    int64_t stride;
} lm_strided_attr;

/* The clipping factor of gradients on the host: 1 without a norm, NAN when nothing may be written.
 * The call's operands from number `from` on are sumsq and watch. */
double lm_optim_scale(const lm_call *c, int from, double clip_norm);
/* The attributes of a call on the host, with the numbers of `now` filled in. */
lm_adamw_attr lm_adamw_now(const lm_call *c);
lm_sgd_attr lm_sgd_now(const lm_call *c);

#endif
