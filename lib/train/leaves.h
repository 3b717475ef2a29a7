/* SPDX-License-Identifier: Apache-2.0 */
/* leaves.h -- the leaves of a step's sums.
 *
 * A leaf is a contiguous group of the micro-batches of a step, whose gradients and losses are summed in order.  A binary
 * tree goes over the leaves, split behind the largest power of two as comm.h's: its bits depend on the number of leaves of
 * a step, not on the number of ranks that share them.
 *
 * A rank with several leaves keeps the sums of whole subtrees, at most floor(log2(leaves)) copies of the blocks.  They are
 * added by nodes of a small graph, on any backend.  Private to lib/train. */
#ifndef LM_TRAIN_LEAVES_H
#define LM_TRAIN_LEAVES_H

#include "graph/backend.h"

/* A block that holds the sums of one leaf, and after the last one those of all.  Memory of the backend, borrowed. */
typedef struct {
    const char *name;
    lm_dtype type; /* F32 or F64 */
    int64_t count; /* 0: there is no such block */
    void *data;
} lm_leaf_block;

enum { LM_LEAF_BLOCKS = 3 };

typedef struct lm_leaves lm_leaves;

lm_code lm_leaves_new(lm_backend *b, const lm_leaf_block block[LM_LEAF_BLOCKS], int64_t leaves,
                      lm_leaves **out, lm_err *e);
void lm_leaves_free(lm_leaves *l);
/* Copies of each block for so many leaves. */
int lm_leaves_copies(int64_t leaves);

/* The blocks hold leaf number `leaf` of the step (0 is the first); after the call they may be overwritten with the next
 * one, and after the last one they hold the sum.  On the main stream. */
lm_code lm_leaves_add(lm_leaves *l, int64_t leaf, const lm_step *step, lm_err *e);

#endif
