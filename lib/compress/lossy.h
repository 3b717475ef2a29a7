/* SPDX-License-Identifier: Apache-2.0 */
/* lossy.h -- one tensor through a codec (numeric/codec.h) and back, with an account of what is lost.
 *
 * A tensor is taken as one row of its elements in memory order, so blocks run along the flattened
 * tensor.  Every number is decoded again in the same pass and held against the bound that the codec
 * states; a number that breaks it (an overflow, an infinity in a block) is a failure, never a
 * silent loss. */
#ifndef LM_COMPRESS_LOSSY_H
#define LM_COMPRESS_LOSSY_H

#include "base/err.h"
#include "base/par.h"
#include "numeric/codec.h"

/* x: the numbers before, y: what decoding gives.  Sums are taken over fixed blocks of elements: the
 * same bits for any number of threads. */
typedef struct {
    double max_abs; /* max |x - y| */
    double rel_l2;  /* ||x - y|| / ||x||; 0 for a tensor of zeros */
    double bound;   /* what is guaranteed for |x - y|: the largest over the elements */
} lm_lossy_error;

/* Can this codec take a flattened tensor of this type?  F32, F16 and BF16, blocks of one row, and
 * fewer bits than the type has. */
bool lm_lossy_can(const lm_codec *c, lm_dtype from);

/* Bytes of codes and scales for `count` elements.  Fails: LM_ELIMIT. */
lm_code lm_lossy_size(const lm_codec *c, int64_t count, size_t *codes, size_t *scales, lm_err *e);

/* Encode `count` elements of type `from`, aligned, at x to codes and scales, sized by
 * lm_lossy_size.  `name` is for messages.  Fails: LM_ENUMERIC naming the first element that breaks
 * the bound; LM_ELIMIT.  NaN stays NaN in a codec without scales. */
lm_code lm_lossy_encode(const lm_codec *c, const char *name, lm_dtype from, const void *x,
                        int64_t count, void *codes, void *scales, lm_par *par, lm_lossy_error *err,
                        lm_err *e);

/* The way back: `count` elements of type `to` at y. */
lm_code lm_lossy_decode(const lm_codec *c, const void *codes, const void *scales, int64_t count,
                        lm_dtype to, void *y, lm_par *par, lm_err *e);

#endif
