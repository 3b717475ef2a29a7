/* SPDX-License-Identifier: Apache-2.0 */
/* prune.h -- selects the elements dropped from a model's delta: the smallest, the smallest and the
 * largest, or random ones.  The definitions are mergekit's (sparsify.py); k = max(1, floor(density
 * n)).  Private to lib/merge. */
#ifndef LM_MERGE_PRUNE_H
#define LM_MERGE_PRUNE_H

#include "merge/select.h"

typedef enum {
    LM_PRUNE_NONE,
    LM_PRUNE_SMALL,     /* TIES: keep the k largest */
    LM_PRUNE_BOTH_ENDS, /* breadcrumbs: without the gamma n largest, keep the k largest */
    LM_PRUNE_DRAWN,     /* DARE: keep each with probability density */
    /* DELLA: with a probability in density -+ epsilon, by its rank in its row */
    LM_PRUNE_RANKED,
} lm_prune;

typedef struct {
    const lm_merge_operand *of;
    lm_prune how;
    double density, epsilon;
    double scale; /* factor on kept elements */
    bool inverse; /* RANKED: divide by the probability */
    lm_merge_top top, out;
    lm_rng rng;
} lm_prune_part;

/* The pruning of model i of the job by method `how`; none if its density is 1 or more.  Thresholds
 * are set by lm_merge_select.  Fails: LM_EUSAGE, density and epsilon out of range. */
lm_code lm_prune_plan(const lm_merge_job *j, int i, lm_prune how, lm_prune_part *p, lm_err *e);

/* Prune n deltas of elements at ..; keep: multipliers from lm_prune_row, draw: n words of scratch.
 */
void lm_prune_block(const lm_blend *b, const lm_prune_part *p, void *d, int64_t at, int64_t n,
                    const void *keep, uint32_t *draw);

/* RANKED: multipliers [cols], 0 or more, of the row of deltas that begins at element `at`; order:
 * 2 cols entries. */
void lm_prune_row(const lm_blend *b, const lm_prune_part *p, const void *d, int64_t at,
                  int64_t cols, void *keep, lm_blend_entry *order);

#endif
