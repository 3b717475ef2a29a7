/* SPDX-License-Identifier: Apache-2.0 */
/* dispatch.h -- rows of tokens at the ranks that hold their experts, and the way back: the calls of one rank in place of those
 * of kernels/route.h, when experts are split over ranks along an axis and each rank has some of the tokens.
 *
 * T tokens of all ranks, K choices of a token, R rows of all experts (route_plan): each rank knows `from` and `offsets` of the
 * whole plan, so that it knows how many rows go where.  Rank r of n holds tokens T r / n to T (r+1) / n - 1 and experts
 * E r / n to E (r+1) / n - 1; its rows are those of its experts, from the first of them on: row i here is row
 * offsets[E r / n] + i of the plan, of the P rows that this has.  As many as own[G] says are there; in the list buffers have
 * R = P rows, as all tokens may choose experts of one rank, and kernels get tensors of any number of rows from own[G] on.
 * Rows behind a rank's own ones are neither written nor read, but where it has none a first one is 0.
 *
 * expert_offsets  in  offsets [E+1] I32                              out own [G+1] I32: offsets of experts `first` to
 *                                                                        first + G - 1, relative to the first of them
 * expert_rows     in  x [L,C] act: of this rank's tokens, from [P] I32, offsets [E+1] I32, own [G+1] I32
 *                 out y [R,C] act: of its experts' rows, 0 where from is -1
 * expert_scale    in  y [R,C] act, from [P] I32, offsets [E+1] I32, weight [T,K] F32
 *                 out z [R,C] act = weight[from] y
 * expert_sum      in  y [R,C] act, from [P] I32, offsets [E+1] I32, weight [L,K] F32 (optional: 1)
 *                 out x [L,C] act = sum over k, in order and in F32, of weight[t,k] times the row of assignment t K + k
 * expert_dot      in  x [R,C] act, y [R,C] act, from [P] I32, offsets [E+1] I32
 *                 out d [T,K] F32 = <x, y> of the rows of this rank, 0 elsewhere: an addend of route_dot's
 *
 * expert_rows and expert_sum exchange rows with the other ranks (kernels/comm.h) and are exact, except the sum, which is that
 * of route_sum; all ranks call them alike.  No operand aliases another.  Tolerance as in route.h. */
#ifndef LM_KERNELS_DISPATCH_H
#define LM_KERNELS_DISPATCH_H

#include "kernels/kernel.h"

typedef struct {
    int axis;            /* lm_axis: of lm_step.links */
    int64_t ranks, rank; /* along it */
    int64_t tokens, k, experts;
    int64_t rows; /* R */
    int64_t most; /* rows that this rank's experts can have */
} lm_dispatch_attr;

typedef struct {
    int64_t first, count;
} lm_expert_offsets_attr;

#endif
