/* SPDX-License-Identifier: Apache-2.0 */
/* code_rows.h -- a matrix that stays in the codes of its file: runs of rows, each in a format of its own, since
 * weights that a model packs into one (q, k, v) may have come in several.
 *
 * A tensor (tensor.h) with codes is treated as one of its dtype except by the kernels that read it: these decode a few
 * rows at a time into numbers of that dtype (lm_code_rows_numbers).  The results equal those of a matrix that was
 * decoded once. */
#ifndef LM_NUMERIC_CODE_ROWS_H
#define LM_NUMERIC_CODE_ROWS_H

#include "numeric/format.h"
#include "numeric/tensor.h"

struct lm_code_run {
    int64_t row, rows; /* rows follow each other without a gap */
    const lm_format *format;
    const uint8_t *data; /* the format's planes one behind another; NULL: no memory yet */
    bool in_file;        /* data lies in a mapped file, at any address */
};

typedef struct lm_code_rows lm_code_rows;
struct lm_code_rows {
    int n;
    int64_t before;          /* row i of the matrix is row `before` + i of the runs */
    struct lm_code_run *run; /* borrowed */
};

/* Run i as the rows of the matrix are numbered: it may begin in front of them. */
static inline struct lm_code_run lm_code_rows_run(const lm_code_rows *c, int i)
{
    struct lm_code_run r = c->run[i];
    r.row -= c->before;
    return r;
}

/* Rows [row, row + rows) as a matrix of their own, of the same runs. */
lm_code_rows lm_code_rows_part(const lm_code_rows *c, int64_t row, int64_t rows);
/* Bytes of rows [row, row + rows) with `cols` numbers; SIZE_MAX: too many. */
size_t lm_code_rows_bytes(const lm_code_rows *c, int64_t row, int64_t rows, int64_t cols);

/* True if rows of `cols` numbers can be decoded one by one. */
bool lm_format_codes(const lm_format *f, int64_t cols);
/* Bytes of a tensor as it is stored: its codes or coded pages if it has some, its numbers otherwise.
 * SIZE_MAX: too many, or pages that its format does not fit. */
size_t lm_stored_bytes(const lm_tensor *t);

/* Faster decoders, with the same bits. */
typedef struct {
    /* Rows without gaps as F32; false: not of this format. */
    bool (*decode)(const lm_format *f, const void *const *plane, int64_t rows, int64_t cols,
                   float *y);
    void (*to_bf16)(const float *x, uint16_t *y, int64_t n);
    /* The same at once; false: not of this format. */
    bool (*decode_bf16)(const lm_format *f, const void *const *plane, int64_t rows, int64_t cols,
                        uint16_t *y);
} lm_code_rows_coder;

/* Bytes of scratch for lm_code_rows_numbers. */
size_t lm_code_rows_scratch(lm_dtype to, int64_t cols);
/* Numbers of rows [row, row + rows) as `to` (any float type) at dst, without gaps.  by NULL: plain C. */
void lm_code_rows_numbers(const lm_code_rows *c, int64_t row, int64_t rows, int64_t cols,
                          lm_dtype to, const lm_code_rows_coder *by, void *dst, void *scratch);

#endif
