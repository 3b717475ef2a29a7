/* SPDX-License-Identifier: Apache-2.0 */
/* ring.h -- attention of ranks that have some positions of every sequence each: blocks of keys and values travel from rank to
 * rank around a ring, each rank attends to one after another, and the results are merged (Ring Attention, arXiv:2310.01889,
 * section 3).
 *
 * A block is the queries of one rank and the keys and values of another, or the same one: rows that hold both (ring_rows) are
 * rows of kernels/attention.h.  Which keys a query sees, by order, window and document, is an interval of the block's keys
 * (ring_mask).  Of n ranks with T rows of each sequence, rank r has positions r T to (r+1) T - 1; or
 * from both ends, for as much causal work on each, T/2 from r T/2 on and T/2 from (2n - 1 - r) T/2 on.
 *
 * ring_pass   in  x [N,C] any (optional: this rank gives nothing)
 *             out y [N,W] any (optional: it takes nothing): the last W columns of x, of the rank `hops` before this one; of one
 *                 type.  The call returns before y has come if hops is 1; what reads y is of this family, and waits for it.
 * ring_rows   in  q [N,C] any, kv [N,W] any     out y [N,R] any: the first R-W columns of q, then kv
 * ring_add    in  a [N,W] any (optional: 0), b [N,C] act      out y [N,W] any = a + columns `first` to `first` + W - 1 of b
 * ring_mask   in  lo [B*T] I32 (optional, 0), hi [B*T] I32 (optional, all): of the whole sequence
 *             out from [B*T] I32, to [B*T] I32: of the keys of rank `from`, counted from its first one, those that each query
 *                 sees are from <= j < to; none where from >= to
 * ring_merge  in  a [B*T,H*E] any, la [B,H,T] F32, b [B*T,H*E] act, lb [B,H,T] F32: o and lse of attention to two sets of keys
 *             out o [B*T,H*E] any, lse [B,H,T] F32: of attention to both.  With `undivided` a + b, and lse 0 if any is;
 *                 otherwise lse = log(exp la + exp lb), o = exp(la - lse) a + exp(lb - lse) b.
 *
 * "any" of an output: the type that the caller gives.  Without links (lm_step) a rank is its own neighbour.  y of ring_rows may
 * not alias an operand; y of ring_add may be a, o and lse of ring_merge may be a and la.  Tolerance: relative L2 1e-6 (F32), 4e-3
 * (BF16); ring_pass, ring_rows of one type and ring_mask are exact. */
#ifndef LM_KERNELS_RING_H
#define LM_KERNELS_RING_H

#include "kernels/kernel.h"

/* Of the operators that read what is on the ring. */
typedef struct {
    int axis;            /* lm_axis: of lm_step.links */
    int64_t ranks, rank; /* along it */
    int64_t hops; /* ring_pass: 1 to ranks - 1, of one rank 1; above 1 each rank gives and takes */
    int64_t columns; /* ring_pass: W */
    int64_t first;   /* ring_add: a column of b */
} lm_ring_attr;

/* The pairs of a block that order and window let see each other. */
typedef struct {
    int64_t ranks, rank, from; /* the ranks, that of the queries, and that of the keys */
    bool ends;                 /* positions are from both ends */
    bool causal;
    int64_t window; /* 0: none; as in kernels/attention.h */
} lm_ring_block;

/* The runs of positions of a rank: one, or two from both ends; and the first of run number k, of seq / runs positions. */
static inline int64_t lm_ring_runs(const lm_ring_block *b)
{
    return b->ends ? 2 : 1;
}
static inline int64_t lm_ring_first(const lm_ring_block *b, int64_t seq, int64_t rank, int64_t k)
{
    return (k ? 2 * b->ranks - 1 - rank : rank) * (seq / lm_ring_runs(b));
}

typedef struct {
    int64_t batch, seq; /* B, T */
    lm_ring_block block;
} lm_ring_mask_attr;

typedef struct {
    int64_t batch, seq, heads;
    bool undivided;
} lm_ring_merge_attr;

#endif
