/* SPDX-License-Identifier: Apache-2.0 */
/* format_dynamic.h -- the dynamic map: 8 bits whose steps grow with the number, in blocks of 256
 * that share an F32 scale; the format in which 8-bit optimisers keep their states.  For format.c
 * only.
 *
 * Entries of the unsigned map, for d = 0..6: 10^(d-6) times the middles of 2^(d+1) equal cells of
 * [0.1, 1], and 0 and 1; of the signed map: the middles of 2^d cells with both signs, 0, 1, and -1
 * in place of the negative entry next to 0, so that both extremes of a block are exact.  Source:
 * arXiv:2110.02861 sec. 1.3; there the map is chosen by the tensor and -1 is absent.
 *
 * The scale is the block's largest magnitude.  Its sign chooses the map: positive: the block has no
 * negative number and uses the unsigned map, in which a number other than 0 never becomes 0 (a
 * second moment of 0 would make the next step infinite); negative: the signed map.  A block with a
 * number that is not finite has the scale NaN.  Private to lib/numeric. */
#ifndef LM_NUMERIC_FORMAT_DYNAMIC_H
#define LM_NUMERIC_FORMAT_DYNAMIC_H

#include "numeric/format.h"

#define LM_DYNAMIC_BLOCK 256
/* Half the widest gap of the signed map (64 cells of [0.1, 1]), and room for F32 rounding: an error
 * is at most this share of the block's largest magnitude. */
#define LM_DYNAMIC_BOUND (0.9 / 128 + 1e-6)

void lm_dynamic_encode(const lm_format *f, const float *x, int64_t rows, int64_t cols,
                       int64_t pitch, void *const *plane, const lm_encode_mode *mode);
void lm_dynamic_decode(const lm_format *f, const void *const *plane, int64_t rows, int64_t cols,
                       float *y, int64_t pitch);

#endif
