/* SPDX-License-Identifier: Apache-2.0 */
/* buckets.h -- ranges of the block of gradients, and when a backward has completed them.
 *
 * Ranks that share gradients add up each as soon as it is complete, and keep their own ranges of it.  Private to lib/train. */
#ifndef LM_TRAIN_BUCKETS_H
#define LM_TRAIN_BUCKETS_H

#include "model/model.h"

/* Elements [from, end) of the block, which nodes [first, last] of the list write. */
typedef struct {
    int64_t from, end;
    size_t first, last;
    int stage; /* of a pipeline, whose nodes these are; 0: there is one */
    bool late; /* sums of two (lm_model.addends), which are complete behind the list alone */
} lm_bucket;

/* Those of all `count` elements, of whole parameters of one stage and of 256 KiB at least if neighbours are alike, as they are
 * completed: late ones last.  The caller frees *out (lm_free). */
lm_code lm_buckets_make(const lm_model *m, int64_t count, lm_bucket **out, int *n, lm_err *e);
/* The most elements that such a rank of several has at once. */
int64_t lm_buckets_most(const lm_bucket *b, int n, int ranks);

#endif
