/* SPDX-License-Identifier: Apache-2.0 */
/* kv_rows.h -- the codes of a coded cache in the order of files, without loss in both directions.
 *
 * The tokens from .. end - 1 of one key/value head, both multiples of lm_kv_step, of pages of T tokens
 * (kv_format.h); n = end - from:
 *   codes           LM_KV_TOKEN [n][ceil(D bits / 8)], LM_KV_CHANNEL [D][ceil(n bits / 8)] bytes: a code behind
 *                   the other, the lowest bits first; bits that no code has are 0
 *   scales, minima  LM_KV_TOKEN [n][groups], LM_KV_CHANNEL [ceil(n / group)][D], of the format's type
 *   second scales   LM_KV_TOKEN [ceil(n / span)][D], LM_KV_CHANNEL [n]
 *   outliers        begin U32 [pages + 1], of the pages with tokens; index U16 and value F16 [begin[pages]] of one
 *                   page after another, in a page t * D + d, rising
 * A group or span of 0 is a page.  Groups of tokens do not cross pages. */
#ifndef LM_NUMERIC_KV_ROWS_H
#define LM_NUMERIC_KV_ROWS_H

#include "numeric/kv_format.h"

/* Sections that a format has not have no bytes, and are not accessed.  codes NULL: the other sections alone are copied. */
typedef struct {
    uint8_t *codes;
    void *scale, *min, *second;
    uint32_t *begin; /* outliers */
    uint16_t *index, *value;
} lm_kv_rows;

typedef struct {
    size_t codes, scale, min, second; /* bytes */
    int64_t pages;
    int64_t outliers; /* most of all pages */
} lm_kv_rows_size;

/* Fails as lm_kv_page; LM_EUSAGE for other tokens; LM_ELIMIT. */
lm_code lm_kv_rows_size_of(const lm_kv_format *f, int64_t T, int64_t D, int64_t from, int64_t end,
                           lm_kv_rows_size *out, lm_err *e);
/* From pages to rows; page[i] has the tokens from i T on, pages before the first token are not accessed. */
void lm_kv_rows_get(const lm_kv_format *f, int64_t T, int64_t D, int64_t from, int64_t end,
                    const void *const *page, const lm_kv_rows *out);
/* NULL, or what is wrong with rows of any content: a scale that is not finite, outliers that do not rise or are
 * too many (`begin` must have been read with at most lm_kv_rows_size.outliers behind it), bits behind the codes. */
const char *lm_kv_rows_wrong(const lm_kv_format *f, int64_t T, int64_t D, int64_t from, int64_t end,
                             const lm_kv_rows *rows);
/* From rows that are right to pages that are cleared. */
void lm_kv_rows_put(const lm_kv_format *f, int64_t T, int64_t D, int64_t from, int64_t end,
                    const lm_kv_rows *rows, void *const *page);

#endif
