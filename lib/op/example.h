/* SPDX-License-Identifier: Apache-2.0 */
/* example.h -- shared parts of the operators' example functions: ragged sizes, drawn by index.
 * Private to lib/op. */
#ifndef LM_OP_EXAMPLE_H
#define LM_OP_EXAMPLE_H

#include <string.h>

#include "graph/op.h"

/* A size for draw k of example i: mostly small and ragged, in [1, most]. */
static inline int64_t lm_example_size(lm_rng r, int i, int k, int64_t most)
{
    static const int64_t ragged[] = { 1, 2, 3, 5, 7, 8, 13, 16, 17, 31, 32, 33, 64, 65, 127 };
    uint64_t n = sizeof ragged / sizeof *ragged;
    int64_t pick = ragged[lm_rng_below(r, (uint64_t)i * 16 + (uint64_t)k, n)];
    return pick <= most ? pick : 1 + pick % most;
}

static inline uint64_t lm_example_draw(lm_rng r, int i, int k, uint64_t n)
{
    return lm_rng_below(r, (uint64_t)i * 16 + (uint64_t)k, n);
}

/* Documents of random length in `batch` sequences of `seq` rows, of which one in `mean` ends one: lo and hi [batch * seq]
 * (either may be NULL) are the first row of a row's document and the row after its last. */
void lm_example_documents(lm_rng r, int64_t batch, int64_t seq, uint64_t mean, int32_t *lo,
                          int32_t *hi);

/* The offsets, operand 2, of an example of grouped rows (kernels/grouped.h). */
void lm_grouped_fill(lm_rng r, const lm_call *c);

/* Set the attributes of example `x` to those of the struct *from. */
#define lm_example_attr(x, from)                                                            \
    do {                                                                                    \
        _Static_assert(sizeof *(from) <= sizeof(x)->attr, "an example has its attributes"); \
        memcpy((x)->attr, from, sizeof *(from));                                            \
    } while (0)

#endif
