/* SPDX-License-Identifier: Apache-2.0 */
/* format_rows.c -- plain elements by lm_convert, and GGUF's blocks by the coder of a row. */
#include "numeric/format_rows.h"

#include <string.h>

/* The bytes of a row in the only plane. */
static int64_t row_bytes(const lm_format *f, int64_t cols)
{
    return (int64_t)lm_plane_bytes(&f->plane[0], 1, cols);
}

/* ---- Plain elements ---- */

static void draw_row(const lm_format *f, const float *x, int64_t n, void *codes,
                     const lm_encode_mode *mode, uint64_t index)
{
    size_t size = (size_t)f->plane[0].bits / 8;

    for (int64_t j = 0; j < n; j++) {
        uint32_t r = lm_rng_u32(mode->rng, index + (uint64_t)j);
        uint16_t code = lm_f64_round_sr(f->element, x[j], r, mode->saturate);
        uint8_t narrow = (uint8_t)code;
        memcpy((char *)codes + (size_t)j * size, size == 1 ? (void *)&narrow : (void *)&code, size);
    }
}

static void encode_row(const lm_format *f, const float *x, int64_t n, void *codes,
                       const lm_encode_mode *mode, uint64_t index)
{
    bool exact = f->plane[0].bits >= 32;

    if (exact || !mode || (!mode->saturate && mode->rounding == LM_ROUND_NEAREST)) {
        lm_convert(LM_DTYPE_F32, x, f->element, codes, n);
        return;
    }
    if (mode->rounding == LM_ROUND_STOCHASTIC) {
        draw_row(f, x, n, codes, mode, index);
        return;
    }
    for (int64_t j = 0; j < n; j++) {
        float top = (float)f->max, v = x[j] > top ? top : x[j] < -top ? -top : x[j];
        lm_set(f->element, codes, j, v);
    }
}

void lm_plain_encode(const lm_format *f, const float *x, int64_t rows, int64_t cols, int64_t pitch,
                     void *const *plane, const lm_encode_mode *mode)
{
    for (int64_t i = 0; i < rows; i++)
        encode_row(f, x + i * pitch, cols, (char *)plane[0] + i * row_bytes(f, cols), mode,
                   (mode ? mode->index : 0) + (uint64_t)(i * cols));
}

void lm_plain_decode(const lm_format *f, const void *const *plane, int64_t rows, int64_t cols,
                     float *y, int64_t pitch)
{
    for (int64_t i = 0; i < rows; i++)
        lm_convert(f->element, (const char *)plane[0] + i * row_bytes(f, cols), LM_DTYPE_F32,
                   y + i * pitch, cols);
}

/* ---- Blocks ---- */

void lm_blocks_encode(const lm_format *f, const float *x, int64_t rows, int64_t cols, int64_t pitch,
                      void *const *plane, const lm_encode_mode *mode)
{
    const float *weight = mode && f->block->weigh ? mode->importance : NULL;

    for (int64_t i = 0; i < rows; i++) {
        char *dst = (char *)plane[0] + i * row_bytes(f, cols);
        if (weight)
            f->block->weigh(x + i * pitch, weight, cols, dst);
        else
            f->block->encode(x + i * pitch, cols, dst);
    }
}

void lm_blocks_decode(const lm_format *f, const void *const *plane, int64_t rows, int64_t cols,
                      float *y, int64_t pitch)
{
    for (int64_t i = 0; i < rows; i++)
        f->block->decode((const char *)plane[0] + i * row_bytes(f, cols), cols, y + i * pitch);
}
