/* SPDX-License-Identifier: Apache-2.0 */
/* format_normal.h -- NF4: 4 bits whose 16 values are quantiles of the normal distribution, in blocks of 64 that share a
 * scale; the format of frozen weights beside adapters.  For format.c and kernels/cpu/code_rows_simd.c.
 *
 *   nf4     planes: codes, 4 bits; the scale of each block, F32: its largest magnitude
 *   nf4_dq  the same with scales in 8 bits (double quantisation): codes; the code of each scale; of each 256 scales of
 *           a row two F32: the scale of the dynamic map (format_dynamic.h), and the mean of the scales, which is
 *           subtracted before and added after
 *
 * x = value[code] * scale.  value: with o = 0.9677083, the normal quantiles of linspace(o, 0.5, 9) without the last,
 * those of linspace(o, 0.5, 8) without the last and negative, and 0, all divided by the largest.  Source:
 * arXiv:2305.14314, appendix E and sec. 3; codes are numbered, and scales quantised, as bitsandbytes does, except that its
 * groups of 256 scales run on over rows.  A code is the nearest to x / scale; between two, the lower one.  With nf4_dq
 * it is chosen for the scale as it is decoded.  A block with a number that is not finite has the scale NaN. */
#ifndef LM_NUMERIC_FORMAT_NORMAL_H
#define LM_NUMERIC_FORMAT_NORMAL_H

#include "numeric/format.h"

enum {
    LM_NORMAL_BLOCK = 64,   /* numbers that share a scale, */
    LM_NORMAL_SCALES = 256, /* and scales that share a second one */
    LM_NORMAL_GROUP = LM_NORMAL_BLOCK * LM_NORMAL_SCALES
};

extern const float lm_normal_values[16];

/* Half the widest gap between two values, and room for F32 rounding: an error is at most this share of the largest magnitude
 * of the block; with nf4_dq of the group, in which a scale is off by LM_DYNAMIC_BOUND of the largest. */
#define LM_NORMAL_BOUND        0.15191
#define LM_NORMAL_DOUBLE_BOUND 0.1602

/* Scales of `blocks` blocks of a row from planes 1 to 3 of nf4_dq. */
void lm_normal_scales(const uint8_t *code, const uint8_t *second, const uint8_t *mean,
                      int64_t blocks, float *scale);

void lm_normal_encode(const lm_format *f, const float *x, int64_t rows, int64_t cols, int64_t pitch,
                      void *const *plane, const lm_encode_mode *mode);
void lm_normal_decode(const lm_format *f, const void *const *plane, int64_t rows, int64_t cols,
                      float *y, int64_t pitch);

#endif
