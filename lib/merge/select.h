/* SPDX-License-Identifier: Apache-2.0 */
/* select.h -- selects exactly the k largest magnitudes of values that are never all in memory.
 *
 * Several rows of values (one for each model) are computed block by block by the caller, as often
 * as needed.  A sample brackets each threshold; one pass counts what is above and lists what is
 * inside the bracket (a few percent), and the list is searched.  Where the bracket misses, or too
 * many values fall into it (weights of few bits have few distinct deltas), histograms of the bits
 * narrow the range instead, eleven bits per pass.  The result is the same in both cases, for any
 * number of threads.  Private to lib/merge. */
#ifndef LM_MERGE_SELECT_H
#define LM_MERGE_SELECT_H

#include "merge/blocks.h"

/* The k largest |x| of row `row`, 0 <= k <= count, of equal ones those with the lower index, are:
 * the magnitude's bits > bits, or == bits and the index <= cut. */
typedef struct {
    int row;
    int64_t k;
    uint64_t bits;
    int64_t cut;
} lm_merge_top;

/* out: rows of LM_MERGE_STRIDE reals; elements at .. at + n - 1 of each. */
typedef void (*lm_merge_fill)(const void *ctx, int64_t at, int64_t n, void *out, void *cells);

typedef struct {
    const lm_merge_job *job;
    const lm_blend *loops;
    lm_merge_fill fill;
    const void *ctx;
    int rows;  /* rows that fill makes */
    int extra; /* further rows of cells that fill needs */
} lm_merge_values;

/* Allocates scratch from s (only counted when s->at is NULL) and then selects. */
void lm_merge_select(const lm_merge_values *v, lm_merge_top *top, int n_tops, int threads,
                     lm_merge_scratch *s);

/* Keep those of a block that are in `top` (and, unless out is NULL, not in `out`), times scale; set
 * the others to zero. */
void lm_merge_keep(const lm_blend *b, void *d, int64_t at, int64_t n, const lm_merge_top *top,
                   const lm_merge_top *out, double scale);

#endif
