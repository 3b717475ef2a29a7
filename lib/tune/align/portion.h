/* SPDX-License-Identifier: Apache-2.0 */
/* portion.h -- work that the ranks of an objective divide: contiguous parts of a list, whose results all of them get.
 *
 * `c` is lm_objective_site.comm; NULL: one rank, which has all.  The calls that fail are collective.  Private to lib/tune. */
#ifndef LM_TUNE_ALIGN_PORTION_H
#define LM_TUNE_ALIGN_PORTION_H

#include <stdbool.h>
#include <stdint.h>

#include "comm/comm.h"

/* Items [first, end) of n. */
typedef struct {
    int64_t first, end;
} lm_portion;

lm_portion lm_portion_of(int64_t n, int rank, int ranks);
lm_portion lm_portion_own(const lm_comm *c, int64_t n);

/* *stops: lm_stopping() on any rank, or one of them `ends` for another reason.  What ranks do differently because of it must be
 * decided here. */
lm_code lm_portion_stops(lm_comm *c, bool ends, bool *stops, lm_err *e);

/* x: n items of `each` bytes, of which each rank has its own; then all have all. */
lm_code lm_portion_join(lm_comm *c, void *x, int64_t n, size_t each, lm_err *e);

/* Parts of any size, one behind another in the order of the ranks: *all, which has *bytes.
 * The caller frees *all with lm_free, also after a failure. */
lm_code lm_portion_parts(lm_comm *c, const void *own, size_t n, char **all, size_t *bytes,
                         lm_err *e);

#endif
