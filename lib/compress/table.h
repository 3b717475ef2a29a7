/* SPDX-License-Identifier: Apache-2.0 */
/* table.h -- the contents of an .lmz, as a text table or as JSON. */
#ifndef LM_COMPRESS_TABLE_H
#define LM_COMPRESS_TABLE_H

#include "base/buf.h"
#include "format/lmz.h"

typedef struct {
    bool json;
    bool parts;  /* one line for each tensor and file, not only for each dtype */
    bool planes; /* also how each plane of a tensor is coded */
} lm_table_opts;

/* Append the table of `z` (opened from `path`; the index is enough) to `out`. */
lm_code lm_lmz_table(const lm_lmz *z, const char *path, const lm_table_opts *o, lm_buf *out,
                     lm_err *e);

#endif
