/* SPDX-License-Identifier: Apache-2.0 */
/* lossy.h -- one tensor through a number format (numeric/format.h) and back, with measured errors.
 *
 * A tensor is treated as one row of its elements in memory order, so blocks run along the flattened
 * tensor.  Every number is decoded again in the same pass and compared with the bound that the
 * format states; a number beyond it (an overflow, an infinity in a block) is a failure, never a
 * silent loss. */
#ifndef LM_COMPRESS_LOSSY_H
#define LM_COMPRESS_LOSSY_H

#include "base/err.h"
#include "base/par.h"
#include "numeric/format.h"

/* x: the numbers before, y: the decoded numbers.  Sums are taken over fixed blocks of elements: the
 * same bits for any number of threads. */
typedef struct {
    double max_abs; /* max |x - y| */
    double rel_l2;  /* ||x - y|| / ||x||; 0 for a tensor of zeros */
    double bound;   /* the guaranteed bound of |x - y|: the largest over the elements */
} lm_lossy_error;

/* Formats for lossy coding: planar ones that have an encoder and state a bound, with blocks of one
 * row and codes of at most 32 bits. */
bool lm_lossy_takes(const lm_format *f);
/* True if f can hold a flattened tensor of this type: F32, F16 or BF16 with more bits than the
 * codes. */
bool lm_lossy_can(const lm_format *f, lm_dtype from);

/* Encode `count` elements of type `from`, aligned, at x to the planes, sized by lm_tensor_bytes for
 * one row.  `name` is for messages.  Fails: LM_ENUMERIC naming the first element beyond the bound;
 * LM_ELIMIT.  NaN stays NaN in a format without scales. */
lm_code lm_lossy_encode(const lm_format *f, const char *name, lm_dtype from, const void *x,
                        int64_t count, void *const *plane, lm_par *par, lm_lossy_error *err,
                        lm_err *e);

/* Decode `count` elements to type `to` at y. */
lm_code lm_lossy_decode(const lm_format *f, const void *const *plane, int64_t count, lm_dtype to,
                        void *y, lm_par *par, lm_err *e);

#endif
