/* SPDX-License-Identifier: Apache-2.0 */
/* format_scaled.h -- FP8 with a scale for LM_SCALED_BLOCK numbers of a row, which are side by side: the scale in F32, then
 * the codes in E4M3; x = scale * code, in F32.  It holds the matrices of folders of FP8 in blocks (format/fp8_source.h),
 * whose rows repeat the scale of their block.  Read only. */
#ifndef LM_NUMERIC_FORMAT_SCALED_H
#define LM_NUMERIC_FORMAT_SCALED_H

#include <stdint.h>

enum { LM_SCALED_BLOCK = 128, LM_SCALED_BYTES = 4 + LM_SCALED_BLOCK };

/* n numbers, whole blocks. */
void lm_scaled_decode(const void *src, int64_t n, float *y);

#endif
