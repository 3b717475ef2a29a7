/* SPDX-License-Identifier: Apache-2.0 */
/* pack.h -- examples into windows of a fixed length with little padding: best-fit decreasing.
 *
 * Longest first (equal lengths in their order), each example goes into the window with the least
 * room that still holds it, and into a new one if there is none.  With rooms kept by size in a tree
 * of the sizes 0..T a placement takes O(log T): O(n log T) in all.  Sources: Ding et al.,
 * arXiv:2404.10830 section 3.2 (best-fit packing); the result of TRL's strategy "bfd". */
#ifndef LM_TRAIN_PACK_H
#define LM_TRAIN_PACK_H

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"

/* Windows as lists of items: window w holds item[start[w] .. start[w+1]), in their order of
 * placement. */
typedef struct {
    int64_t windows;
    int64_t *start; /* [windows + 1] */
    int64_t *item;  /* [items] */
    int64_t used;   /* sum of the lengths */
} lm_packing;

/* Pack n items of length[i] in [0, size]; items of length 0 are left out.  join false: one item a
 * window, in their order.  Fails: LM_EUSAGE for a longer item, LM_ELIMIT. */
lm_code lm_pack_make(const int64_t *length, int64_t n, int64_t size, bool join, lm_packing *out,
                     lm_err *e);
void lm_pack_fini(lm_packing *p);

#endif
