/* SPDX-License-Identifier: Apache-2.0 */
/* input_kind.h -- what a member of the input is: JSONL, plain text, or something else by mistake.
 * Private to lib/format. */
#ifndef LM_FORMAT_INPUT_KIND_H
#define LM_FORMAT_INPUT_KIND_H

#include "format/input.h"

/* By the name without the suffix of a compressor, else by the first byte, unless `asked` says.  p[0..n) are the
 * first bytes, of the name in messages.
 * Fails, unless LM_INPUT_TEXT is asked for: LM_EFORMAT for the formats that data come in and that are not read
 * (Parquet, Arrow, NumPy, pickles, PDF, tables called .csv, ...), for model and token files, for text of two bytes a
 * character, for other bytes that hold zeros, for one large JSON array, and for JSONL that is called .txt. */
lm_code lm_input_recognise(lm_input_kind asked, const char *name, const char *p, size_t n,
                           bool *jsonl, lm_err *e);

/* The name of a format that the first bytes p[0..n) are known by, of those above, compressors and archives; NULL:
 * none. */
const char *lm_input_known_format(const char *p, size_t n);

#endif
