/* SPDX-License-Identifier: Apache-2.0 */
/* format_rows.h -- coders that go row by row: plain elements, and GGUF's blocks.  For format.c only.
 * Private to lib/numeric. */
#ifndef LM_NUMERIC_FORMAT_ROWS_H
#define LM_NUMERIC_FORMAT_ROWS_H

#include "numeric/format.h"

void lm_plain_encode(const lm_format *f, const float *x, int64_t rows, int64_t cols, int64_t pitch,
                     void *const *plane, const lm_encode_mode *mode);
void lm_plain_decode(const lm_format *f, const void *const *plane, int64_t rows, int64_t cols,
                     float *y, int64_t pitch);

/* Encoder and decoder of one row of n numbers, a multiple of the block. */
typedef struct lm_block_code {
    void (*encode)(const float *x, int64_t n, void *dst);
    /* Encoding that multiplies squared errors by `weight`, one for each number.  NULL: the format
     * has none. */
    void (*weigh)(const float *x, const float *weight, int64_t n, void *dst);
    void (*decode)(const void *src, int64_t n, float *y);
} lm_block_code;

/* Through f->block. */
void lm_blocks_encode(const lm_format *f, const float *x, int64_t rows, int64_t cols, int64_t pitch,
                      void *const *plane, const lm_encode_mode *mode);
void lm_blocks_decode(const lm_format *f, const void *const *plane, int64_t rows, int64_t cols,
                      float *y, int64_t pitch);

#endif
