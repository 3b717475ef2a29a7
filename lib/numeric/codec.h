/* SPDX-License-Identifier: Apache-2.0 */
/* codec.h -- number formats as codecs, in one registry: what weights, KV caches, gradients on the
 * wire, optimiser states and checkpoints are stored in.
 *
 * A codec turns a row-major matrix of F32 into codes and scales, and back.  Elements are grouped in
 * blocks of block_rows x block_cols that share one scale; the last blocks of a row or column may be
 * short.
 *   codes    rows one after another; element j of a row is the `bits` bits from bit j * bits on,
 *            least significant first; each row begins on a whole byte
 *   scales   [ceil(rows / block_rows), ceil(cols / block_cols)] of the scale type, row-major; none
 *            for formats without blocks
 * The value of an element is value(code) * scale.  Encoding rounds to nearest, ties to even, unless
 * the mode asks for stochastic rounding, whose draws are counted by the element's index, so that the
 * same bits come out of any split of the rows over threads. */
#ifndef LM_NUMERIC_CODEC_H
#define LM_NUMERIC_CODEC_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "base/rng.h"
#include "numeric/dtype.h"

typedef enum {
    LM_ROUND_NEAREST = 0,
    LM_ROUND_STOCHASTIC,
} lm_rounding;

/* How to encode; zeros are a good default. */
typedef struct {
    lm_rounding rounding;
    bool saturate;  /* overflow gives the largest finite number (infinities too); NaN stays NaN */
    lm_rng rng;     /* LM_ROUND_STOCHASTIC: the stream, */
    uint64_t index; /* and the index in it of the first element of the first row */
} lm_codec_mode;

typedef struct lm_codec lm_codec;
struct lm_codec {
    const char *name;  /* "bf16", "fp8_e4m3": what options and JSON say */
    const char *also;  /* a second spelling, or NULL */
    const char *about; /* one line for people */
    int bits;          /* of one code */
    int block_rows, block_cols;
    lm_dtype scale;   /* type of scales; LM_DTYPE_NONE: no scales */
    lm_dtype element; /* when codes are plain elements of a dtype; else LM_DTYPE_NONE */
    double max;       /* the largest finite value of a code */
    /* Rounding to nearest moves a number x that does not overflow by at most
     * max(err_rel * |x|, err_abs) + err_block * (largest magnitude in its block). */
    double err_rel, err_abs, err_block;
    /* `rows` rows of `cols` numbers, `pitch` numbers apart.  codes and scales are sized by
     * lm_codec_size. */
    void (*encode)(const lm_codec *c, const float *x, int64_t rows, int64_t cols, int64_t pitch,
                   void *codes, void *scales, const lm_codec_mode *mode);
    void (*decode)(const lm_codec *c, const void *codes, const void *scales, int64_t rows,
                   int64_t cols, float *y, int64_t pitch);
};

/* The i-th codec, in a fixed order; NULL past the end. */
const lm_codec *lm_codec_at(int i);
/* By either spelling.  Fails: LM_EUSAGE with the names there are. */
lm_code lm_codec_find(const char *name, const lm_codec **out, lm_err *e);

/* Bytes of codes and of scales for a matrix.  Fails: LM_ELIMIT when they do not fit a size_t. */
lm_code lm_codec_size(const lm_codec *c, int64_t rows, int64_t cols, size_t *codes, size_t *scales,
                      lm_err *e);

#endif
