/* SPDX-License-Identifier: Apache-2.0 */
/* format.h -- number formats, in one registry: what weights, KV caches, gradients on the wire,
 * optimiser states, checkpoints and GGUF files are stored in.
 *
 * A format stores a row-major matrix in one to four planes.  A plane holds one number for each block
 * of rows x cols elements (1 x 1: one for each element); the last blocks of a row or column may be
 * short.  The numbers of a row of blocks are `bits` bits each, the first in the least significant
 * bits of the first byte; each row of blocks begins on a whole byte.
 *   plain element types (bf16)         one plane of codes of an lm_dtype
 *   planar formats (dynamic8, nf4)     codes, and a plane of scales: value(code) * scale; nf4_dq has scales in codes
 *   interleaved formats (q4_k)         one plane of blocks, which hold codes and scales side by
 *                                      side; a row is a sequence of whole blocks
 *
 * Encoding to a planar format rounds to nearest, ties to even, unless the mode asks for stochastic
 * rounding.  The random number of an element depends on its index only, so the bits do not depend
 * on how rows are split over threads.
 *
 * Interleaved formats are those of GGUF.  Their layouts are ggml's, so that llama.cpp reads our
 * files; the searches for good scales are ggml's too, with and without importance matrix, so that
 * the numbers are equal except for the last bit of a sum.  Numbers that are not finite are taken as
 * 0; scales are at most the largest number of F16.
 *   q4_0 q5_0 q8_0   32 numbers, x = d * q                          (d: F16)
 *   q4_1 q5_1        32 numbers, x = d * q + m                      (d, m: F16)
 *   q4_k q5_k        256 numbers in 8 groups of 32, x = d * sc * q - dmin * mn
 *                    (d, dmin: F16; sc, mn: 6 bits)
 *   q2_k             256 numbers in 16 groups of 16, the same       (sc, mn: 4 bits)
 *   q3_k             256 numbers in 16 groups of 16, x = d * sc * (q - 4)
 *                    (d: F16; sc: 6 bits)
 *   q6_k             256 numbers in 16 groups of 16, x = d * sc * (q - 32)
 *                    (d: F16; sc: 8 bits)
 *   iq4_nl           32 numbers, x = d * one of 16 values           (d: F16)
 *   iq4_xs           256 numbers in 8 groups of 32, the same times sc (6 bits)
 * Read only: mxfp4, nvfp4 (E2M1 with scales in E8M0 and E4M3), q1_0 (signs), q2_0 (-1 to 2), and outside of GGUF
 * fp8_e4m3_128 (format_scaled.h). */
#ifndef LM_NUMERIC_FORMAT_H
#define LM_NUMERIC_FORMAT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "base/rng.h"
#include "numeric/dtype.h"

#define LM_MAX_PLANES 4
#define LM_NO_GGUF    (-1)

typedef enum {
    LM_PLANE_CODES = 0,
    LM_PLANE_SCALE,
    LM_PLANE_BLOCKS, /* interleaved: codes and scales of a block */
} lm_plane_kind;

typedef struct {
    lm_plane_kind kind;
    lm_dtype dtype; /* of a number; LM_DTYPE_NONE: packed bits */
    int bits;       /* of a number */
    int rows, cols; /* elements in a block */
} lm_plane;

typedef enum {
    LM_ROUND_NEAREST = 0,
    LM_ROUND_STOCHASTIC,
} lm_rounding;

/* How to encode; all zeros is the default.  Interleaved formats read `importance` only. */
typedef struct {
    lm_rounding rounding;
    bool saturate;  /* overflow gives the largest finite number (infinities too); NaN stays NaN */
    lm_rng rng;     /* LM_ROUND_STOCHASTIC: the stream, */
    uint64_t index; /* and the index in it of the first element of the first row */
    /* How much the error of each column counts (finite, not negative); NULL: all equal. */
    const float *importance;
} lm_encode_mode;

typedef struct lm_format lm_format;
struct lm_format {
    const char *name;  /* "bf16", "fp8_e4m3", "q4_k": the spelling of options and JSON */
    const char *also;  /* a second spelling, or NULL */
    const char *about; /* one line for --list outputs and help */
    int n_planes;
    lm_plane plane[LM_MAX_PLANES]; /* the first holds codes or blocks */
    lm_dtype element;              /* the type of a plain format; otherwise LM_DTYPE_NONE */
    int gguf;                      /* number of the type in a GGUF file, or LM_NO_GGUF */
    double max;                    /* the largest finite value of a code; 0: the scales decide */
    /* Rounding to nearest moves a number x that does not overflow by at most
     * max(err_rel * |x|, err_abs) + err_block * (largest magnitude in its block). */
    double err_rel, err_abs, err_block;
    /* Not 0 where scales are searched for, because no bound then holds for each number: the root
     * mean square of the errors of normally distributed numbers, divided by that of the numbers. */
    double err_rms;
    /* `rows` rows of `cols` numbers, `pitch` numbers apart; planes of any alignment, sized by
     * lm_tensor_bytes.  mode NULL: the default.  encode NULL: the format is read only; decode NULL
     * too: only its sizes are known here. */
    void (*encode)(const lm_format *f, const float *x, int64_t rows, int64_t cols, int64_t pitch,
                   void *const *plane, const lm_encode_mode *mode);
    void (*decode)(const lm_format *f, const void *const *plane, int64_t rows, int64_t cols,
                   float *y, int64_t pitch);
    const struct lm_block_code *block; /* interleaved formats: one row (ggml_blocks.h) */
};

/* The i-th format, in a fixed order; NULL past the end. */
const lm_format *lm_format_at(int i);
/* By either spelling, upper or lower case, among the formats that `takes` accepts (NULL: all).
 * Fails: LM_EUSAGE with the names of these formats. */
lm_code lm_format_find(const char *name, bool (*takes)(const lm_format *f), const lm_format **out,
                       lm_err *e);
/* The plain format of an element type; NULL for LM_DTYPE_NONE. */
const lm_format *lm_format_of_dtype(lm_dtype d);
/* By its number in a GGUF file; NULL for a number that is not known. */
const lm_format *lm_format_of_gguf(uint32_t number);

/* Its name in messages about a GGUF file: for plain types that of their elements ("f16"). */
const char *lm_format_show(const lm_format *f);
bool lm_format_interleaved(const lm_format *f);
/* True if encoding reads the importance of columns. */
bool lm_format_weighs(const lm_format *f);
/* Elements of a row that share a block of some plane; 1: each has its own. */
int lm_format_group(const lm_format *f);

typedef struct {
    size_t plane[LM_MAX_PLANES]; /* bytes of each plane; 0 for absent ones */
    size_t all;
} lm_tensor_size;

/* Bytes of a tensor; the last dimension is the row, all others together are the rows, no dimension
 * is one element.  Fails: LM_ELIMIT for sizes beyond size_t or a negative dimension, LM_EUSAGE for
 * rows that are not a whole number of blocks; all sizes are then SIZE_MAX, so a caller that checks
 * for it may pass `e` NULL. */
lm_code lm_tensor_bytes(const lm_format *f, int ndim, const int64_t *dim, lm_tensor_size *out,
                        lm_err *e);
/* The same for one plane of a matrix, any number of columns: with 1 row, the bytes of a row of it, or of
 * the first `cols` numbers of a longer one if they are whole blocks and bytes. */
size_t lm_plane_bytes(const lm_plane *p, int64_t rows, int64_t cols);
/* The same for `count` elements of a plain type; SIZE_MAX when they are too many. */
size_t lm_plain_bytes(lm_dtype d, int64_t count);

#endif
