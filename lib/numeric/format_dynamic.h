/* SPDX-License-Identifier: Apache-2.0 */
/* format_dynamic.h -- the dynamic map: 8 bits whose steps grow with the number, in blocks of 256
 * that share an F32 scale; the format in which 8-bit optimisers keep their states.  For format.c
 * and kernels/codes.h.
 *
 * Entries of the unsigned map, for d = 0..6: 10^(d-6) times the middles of 2^(d+1) equal cells of
 * [0.1, 1], and 0 and 1; of the signed map: the middles of 2^d cells with both signs, 0, 1, and -1
 * in place of the negative entry next to 0, so that both extremes of a block are exact.  Source:
 * arXiv:2110.02861 sec. 1.3; there the map is chosen by the tensor and -1 is absent.
 *
 * The scale is the block's largest magnitude.  Its sign chooses the map: positive: the block has no
 * negative number and uses the unsigned map, in which a number other than 0 never becomes 0 (a
 * second moment of 0 would make the next step infinite); negative: the signed map.  A block with a
 * number that is not finite has the scale NaN. */
#ifndef LM_NUMERIC_FORMAT_DYNAMIC_H
#define LM_NUMERIC_FORMAT_DYNAMIC_H

#include "numeric/format.h"

#define LM_DYNAMIC_BLOCK 256
/* Half the widest gap of the signed map (64 cells of [0.1, 1]), and room for F32 rounding: an error
 * is at most this share of the block's largest magnitude. */
#define LM_DYNAMIC_BOUND (0.9 / 128 + 1e-6)

/* Magnitudes from 2^-23 (below half of the least entry) to 1, distinguished by 8 bits of the
 * mantissa: entries are at least 0.7 % apart, so no cell holds more than one middle between two of
 * them, and one comparison behind a look-up gives the code. */
enum {
    LM_DYNAMIC_CELL_SHIFT = 23 - 8,          /* bits of a magnitude to its cell, */
    LM_DYNAMIC_CELL_LEAST = (127 - 23) << 8, /* less this, at least 0 */
    LM_DYNAMIC_CELLS = (23 << 8) + 1,
    LM_DYNAMIC_ROOM = LM_DYNAMIC_CELLS + sizeof(int32_t) /* a cell may be read as a word */
};

typedef struct {
    float value[256]; /* ascending */
    float mid[256];   /* between an entry and the next; the last is infinite */
    uint8_t zero;     /* code of 0 */
    /* for numbers without and with a sign: the lowest code in the cell */
    uint8_t start[2][LM_DYNAMIC_ROOM];
} lm_dynamic_map;

/* The unsigned map, then the signed one. */
const lm_dynamic_map *lm_dynamic_maps(void);

void lm_dynamic_encode(const lm_format *f, const float *x, int64_t rows, int64_t cols,
                       int64_t pitch, void *const *plane, const lm_encode_mode *mode);
void lm_dynamic_decode(const lm_format *f, const void *const *plane, int64_t rows, int64_t cols,
                       float *y, int64_t pitch);

#endif
