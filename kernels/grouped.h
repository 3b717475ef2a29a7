/* SPDX-License-Identifier: Apache-2.0 */
/* grouped.h -- several linear layers of one size, each applied to its own rows: the experts of a
 * mixture, whose tokens are sorted by expert.
 *
 * Rows offsets[g] to offsets[g+1]-1 belong to group g; offsets[0] = 0, they do not decrease, and
 * the last is at most N: rows from there on belong to no group, y and dx are 0 there, and they have
 * no part in dw (copies of tokens that were dropped, kernels/route.h).  A group may be empty.  Only
 * the kernel reads the offsets, which may be the result of an earlier kernel on a device: plans do
 * not depend on them, and no row is padded.
 *
 * grouped_linear     in  x [N,K] act, w [GM,K] act (also in codes, numeric/code_rows.h, or panels), offsets [G+1] I32
 *                    out y [N,M] act                     y = x w[g]^T for the rows of g
 * grouped_linear_dx  in  dy [N,M] act, w [GM,K] act (also in codes or panels), offsets [G+1] I32
 *                    out dx [N,K] act                    dx = dy w[g]
 * grouped_linear_dw  in  dy [N,M] act, x [N,K] act, offsets [G+1] I32
 *                    out dw [GM,K] F32 (acc)             dw[g] (+)= dy^T x over the rows of g
 * w[g] are M rows of w from row g M on: the matrices lie one below another, as several tensors of a checkpoint in one
 * parameter.  In panels (kernels/panels.h) M is a multiple of 32, so that each w[g] is in panels by itself.
 * No operand aliases another.  Tolerance as in linear.h. */
#ifndef LM_KERNELS_GROUPED_H
#define LM_KERNELS_GROUPED_H

#include "kernels/kernel.h"

typedef struct {
    int64_t groups, rows; /* G, M */
    lm_acc acc;           /* grouped_linear_dw only */
} lm_grouped_attr;

#endif
