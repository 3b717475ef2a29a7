/* SPDX-License-Identifier: Apache-2.0 */
/* kmeans.h -- the best levels for numbers with weights: k-means in one dimension, exact.
 *
 * The groups of the best solution are intervals, so that dynamic programming over the sorted
 * numbers finds it, by divide and conquer in O(k n log n) (the costs of intervals satisfy the
 * quadrangle inequality).  Nothing is drawn, and there are no local minima, unlike with Lloyd's
 * iteration from random starts.
 *
 * Many numbers are counted in a histogram first.  Its cells keep sums, not middles, so that levels
 * and costs are exact except that a border between two groups is one of two cells.
 * Private to lib/kv. */
#ifndef LM_KV_KMEANS_H
#define LM_KV_KMEANS_H

#include <stdint.h>

#include "base/err.h"

/* Numbers that stay together: sums of weights w, of w x and of w x^2. */
typedef struct {
    double w, wx, wxx;
} lm_kmeans_cell;

enum { LM_KMEANS_CELLS = 4096 };

/* Numbers of [-1, 1], of which others are taken as -1 or 1; NaN is ignored.  Zero-initialise it. */
typedef struct {
    lm_kmeans_cell cell[LM_KMEANS_CELLS];
} lm_kmeans_histogram;
void lm_kmeans_count(lm_kmeans_histogram *h, double x, double w);

/* The k levels (rising, distinct) with the least sum of w (x - nearest level)^2, over n cells in
 * rising order.  cost (optional): that sum.  Where there are fewer different numbers than levels,
 * further levels divide the widest gaps.  Weights are finite and not negative.  Fails: LM_ENUMERIC
 * when all weights are 0. */
lm_code lm_kmeans(const lm_kmeans_cell *cell, int64_t n, int k, double *level, double *cost,
                  lm_err *e);

#endif
