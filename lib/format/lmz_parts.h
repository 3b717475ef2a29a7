/* SPDX-License-Identifier: Apache-2.0 */
/* lmz_parts.h -- which tensors of a .safetensors become parts of an .lmz; private to lib/format.
 *
 * As a separate part, a tensor can be read by its name and is coded by its dtype, but its records
 * take about 150 bytes.  A file never grows by more than LMZ_GROWTH of its bytes (beside the
 * archive's own records).  When the records of all tensors exceed that, tensors are coded once, a
 * window of the file at a time, to measure their gain.  Those that gain less than their records
 * cost are joined with their neighbours in a part without a name.
 *
 * The choice depends on the bytes of the file alone. */
#ifndef LM_FORMAT_LMZ_PARTS_H
#define LM_FORMAT_LMZ_PARTS_H

#include "format/lmz_batch.h"
#include "format/safetensors_table.h"

enum { LMZ_GROWTH = 1000 }; /* one thousandth */

/* A part: of tensor `tensor`, or without a name (tensor is SIZE_MAX). */
typedef struct {
    size_t tensor;
    lm_lmz_kind kind;
    uint64_t offset, raw; /* in the file */
} lmz_piece;

typedef struct {
    const lm_st_table *tensors;
    uint64_t head, bytes; /* of the header with its length, of the file */
    size_t chosen;        /* tensors before this one are assigned to pieces; so is the header */
    uint64_t end;         /* end of the last piece */
    bool measure;         /* the next window is needed to choose more pieces */
    int64_t growth;       /* most bytes that the chosen pieces add; negative: their gain */
    int64_t rest;         /* cost of the records of the other tensors */
    lmz_piece *piece;     /* chosen, not yet returned: */
    size_t next, n, cap;
} lmz_parts;

/* Begin with a file of these tensors, none for a plain file.  With `all` each tensor is a part. */
lm_code lmz_parts_begin(lmz_parts *p, const lm_st_table *tensors, uint64_t head, uint64_t bytes,
                        bool all, lm_err *e);
/* With p->measure: pass the bytes of the next window, which begins at p->end (the first one at 0,
 * with the header). */
size_t lmz_parts_window(const lmz_parts *p);
/* Choose the pieces that begin in this window; all earlier ones must have been returned. */
lm_code lmz_parts_choose(lmz_parts *p, lmz_batches *b, const uint8_t *window, lm_err *e);
/* The next piece; false at the end, or when more must be chosen first. */
bool lmz_parts_next(lmz_parts *p, lmz_piece *out);
void lmz_parts_fini(lmz_parts *p);

#endif
