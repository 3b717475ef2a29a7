/* SPDX-License-Identifier: Apache-2.0 */
/* codes.h -- encodes and decodes numbers in few bits with scales, from and to F32: states of optimisers,
 * bases.
 *
 * encode  in  gate [1] F64 or F32 (optional), x F32 of any shape
 *         out code U8, scale [S] F32, zero [S] F32 (affine formats)
 *         gate NaN: nothing is written.
 * decode  in  code, scale, zero as above     out y F32 of any shape
 *
 * x and y are one row in the order of memory; each block of 256 numbers (the last may be shorter) has a scale.
 *   dynamic8   the format of that name (numeric/format_dynamic.h): a byte each
 *   affine8    x = scale * (code - zero), scale = max(largest - least, 1e-5) / 255, zero a whole number
 *   affine4    in [0, 255]: -round(least / scale), bounded; affine4: 15 in the place of 255, two codes a
 *              byte, the first in the low half.  A block whose numbers are all above 0, or all below,
 *              does not reach them: bases and weights have both
 * stochastic: affine codes are rounded up by chance, so that the mean of the code is the number: draws are those of
 * lm_rng_make(seed, "codes", attr.stream) from lm_rng_first(step, count rounded up to a multiple of 256) on,
 * the upper 24 bits of each.  Else to nearest, ties to even (dynamic8: to the lower).
 * A block with a number that is not finite has the scale NaN, and is read as NaN.
 *
 * Codes and scales are the same bits on every backend. */
#ifndef LM_KERNELS_CODES_H
#define LM_KERNELS_CODES_H

#include "kernels/kernel.h"

enum { LM_CODES_BLOCK = 256 };

typedef enum { LM_CODES_DYNAMIC8, LM_CODES_AFFINE8, LM_CODES_AFFINE4 } lm_codes_format;

typedef struct {
    lm_codes_format format;
    bool stochastic; /* encode, of affine formats */
    int64_t stream;
} lm_codes_attr;

static inline int64_t lm_codes_blocks(int64_t count)
{
    return (count + LM_CODES_BLOCK - 1) / LM_CODES_BLOCK;
}
/* Bytes of the codes of `count` numbers. */
static inline int64_t lm_codes_bytes(lm_codes_format f, int64_t count)
{
    return f == LM_CODES_AFFINE4 ? (count + 1) / 2 : count;
}
static inline float lm_codes_most(lm_codes_format f)
{
    return f == LM_CODES_AFFINE4 ? 15.0f : 255.0f;
}

#endif
