/* SPDX-License-Identifier: Apache-2.0 */
/* convert_rows.h -- converts a matrix to another format and order, rows in parallel.
 * Private to lib/convert. */
#ifndef LM_CONVERT_CONVERT_ROWS_H
#define LM_CONVERT_CONVERT_ROWS_H

#include "base/err.h"
#include "base/par.h"
#include "convert/names.h"
#include "numeric/format.h"

typedef struct {
    const char *name; /* of the tensor, for messages */
    const void *src;
    void *dst;
    const lm_format *from, *to; /* F32, F16, BF16 or interleaved */
    int64_t rows, cols;         /* of src */
    bool turn;                  /* dst is [cols, rows]; at most one side may be interleaved */
    /* Row r of dst is row map(tensor, r) of src; NULL: r.  Not with a transpose. */
    int64_t (*map)(const lm_model_tensor *of, int64_t r);
    const lm_model_tensor *tensor;
    /* Likewise column k of dst, of plain numbers on one side at least; `run` columns follow each other on both. */
    int64_t (*col)(const lm_model_tensor *of, int64_t k);
    int64_t run;
    float plus; /* added to each element, in F32; not with a transpose */
    /* likewise: 1: each becomes -exp of it, -1: back */
    int exponent;
    /* For blocks: the weight of the error of each column of dst (importance.h); NULL: all equal. */
    const float *importance;
} lm_rows;

/* The conversion of tensor s from the order of Hugging Face's files to that of GGUF, or back; the
 * caller sets src and dst.  False: none, the bytes are the same. */
bool lm_rows_of_tensor(const lm_model_tensor *s, bool to_gguf, const lm_format *from,
                       const lm_format *to, lm_rows *r);

/* Equal formats are copied bit by bit unless a number is added; others are converted through F32.
 * The bytes do not depend on the pool.  Fails: LM_ELIMIT; LM_ENUMERIC naming tensor and element
 * when a finite number would become infinite, or a number is not finite, or too large for the
 * scales of blocks. */
lm_code lm_rows_convert(const lm_rows *r, lm_par *par, lm_err *e);

#endif
