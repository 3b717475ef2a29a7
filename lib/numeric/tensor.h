/* SPDX-License-Identifier: Apache-2.0 */
/* tensor.h -- a borrowed view of memory with a shape: contiguous, row-major, at most 5 dimensions.
 */
#ifndef LM_NUMERIC_TENSOR_H
#define LM_NUMERIC_TENSOR_H

#include <stdint.h>

#include "numeric/dtype.h"

#define LM_MAX_DIMS 5

typedef struct {
    void *data; /* NULL: absent (optional operand) or not bound yet */
    lm_dtype dtype;
    int ndim;
    int64_t dim[LM_MAX_DIMS];
    /* Of a weight that stays in the codes of its file (code_rows.h): dtype is what they are read as, and data
     * theirs.  NULL: data holds numbers of dtype. */
    const struct lm_code_rows *codes;
    /* Of a coded cache [pages, K, T, D] (kv_format.h): dtype is that of the numbers that are written and read, and
     * data its pages, page by page and head by head.  NULL: data holds numbers of dtype. */
    const struct lm_kv_format *kv;
    /* A matrix in BF16 whose numbers are in the order of kernels/panels.h, not row-major. */
    bool panels;
} lm_tensor;

static inline int64_t lm_tensor_count(const lm_tensor *t)
{
    int64_t n = 1;
    for (int i = 0; i < t->ndim; i++)
        n *= t->dim[i];
    return n;
}

#endif
