/* SPDX-License-Identifier: Apache-2.0 */
/* virtual.h -- rows of virtual tokens: ids from `first` on, whose numbers come from a table that is trained.
 *
 * virtual_rows     in  x [N,C] act, tok [N] I32, table [P,D] F32
 *                  out y [N,C] act (may alias x)
 *                  y = x, but y[n, at + j] = table[tok[n] - first, j] (+ x[n, at + j] if `add`) where tok[n] >= first
 * virtual_rows_dx  in  dy [N,C] act, tok [N] I32
 *                  out dx [N,C] act (may alias dy)      dy, with zeros where y does not read x
 * virtual_rows_dw  in  dy [N,C] act, tok [N] I32
 *                  out dtable [P,D] F32 (acc)           (+)= the sums of the rows of each id, in row order
 *
 * With at = 0, D = C and `add` they are prompts behind an embedding, which gives such ids zeros; without `add`
 * keys and values of a prefix.  Ids are below first + P.  Tolerance: relative L2 1e-6 (F32), 4e-3 (BF16). */
#ifndef LM_KERNELS_VIRTUAL_H
#define LM_KERNELS_VIRTUAL_H

#include "kernels/kernel.h"

typedef struct {
    lm_acc acc; /* virtual_rows_dw only, */
    bool fresh; /* in which this replaces dtable in every run */
    int64_t first, at;
    int64_t width; /* D, of virtual_rows_dx */
    bool add;
} lm_virtual_attr;

#endif
