/* SPDX-License-Identifier: Apache-2.0 */
/* portions.h -- which elements of a dimension each of several ranks holds.
 *
 * A dimension is a row of pieces, and each piece is split by itself: rank r of n holds the units from m * r / n to
 * m * (r + 1) / n of a piece of m units, and its part of the dimension is what it holds of all pieces, in order.  So the rows
 * of a packed matrix of queries, keys and values (pieces of H, K and K units of D elements, one for each head) are split head
 * by head, and those of a gated MLP (two pieces of I units of one element) gate by gate.  B sequences of T rows are B pieces.
 *
 * A piece may also be split in 2 n ranges of as many units, of which rank r holds those with numbers r and 2 n - 1 - r (zigzag,
 * for positions of which later ones have more to do): then its ranges of each piece are two.
 *
 * Of a packed piece of fewer units than ranks, each unit is shared: the n / m neighbours from rank r n / m on hold unit r.
 * Of a dimension that is not packed, some ranks have nothing then. */
#ifndef LM_NUMERIC_PORTIONS_H
#define LM_NUMERIC_PORTIONS_H

#include <stdbool.h>
#include <stdint.h>

enum { LM_PORTIONS_RUNS = 4 };

typedef struct {
    int n; /* runs of equal pieces; 0: one piece, the whole dimension, in units of one element */
    struct lm_portions_run {
        int64_t times, size, unit; /* elements of a piece, a multiple of the elements of a unit */
    } run[LM_PORTIONS_RUNS];
    bool ends; /* parts are from both ends of each piece; n is above 0 then */
} lm_portions;

/* True if the pieces are those of a dimension of so many elements. */
bool lm_portions_fit(const lm_portions *p, int64_t len);
/* True if each of n ranks holds at least one unit of each piece; `even`: and as many as each other one; `shared`: or one that
 * as many ranks hold as each other one. */
bool lm_portions_serve(const lm_portions *p, int64_t len, int ranks, bool even, bool shared);
/* True if several ranks hold a unit. */
bool lm_portions_shared(const lm_portions *p, int ranks);
/* Elements that a rank holds. */
int64_t lm_portions_count(const lm_portions *p, int64_t len, int ranks, int rank);
/* Range number k of the elements that a rank holds, from 0 on, in order; false: it has fewer.  They may be empty. */
typedef struct {
    int64_t from, count;
} lm_range;
bool lm_portions_at(const lm_portions *p, int64_t len, int ranks, int rank, int64_t k,
                    lm_range *out);
/* True if each rank holds the same elements by both. */
bool lm_portions_same(const lm_portions *a, const lm_portions *b, int64_t len, int ranks);

#endif
