/* SPDX-License-Identifier: Apache-2.0 */
/* input_kind.h -- detects the kind of a member of the input: JSONL, plain text, or another format
 * by mistake.  Private to lib/format. */
#ifndef LM_FORMAT_INPUT_KIND_H
#define LM_FORMAT_INPUT_KIND_H

#include "format/input.h"

/* Unless `asked` sets it, the kind follows from the name without the suffix of a compressor,
 * otherwise from the first byte.  p[0..n) are the first bytes; the name is also for messages.
 * Fails, unless LM_INPUT_TEXT is set: LM_EFORMAT for data formats that are not supported (Parquet,
 * Arrow, NumPy, pickles, PDF, tables named .csv, ...), for model and token files, for UTF-16 text,
 * for other data with zero bytes, for one large JSON array, and for JSONL named .txt. */
lm_code lm_input_recognise(lm_input_kind asked, const char *name, const char *p, size_t n,
                           bool *jsonl, lm_err *e);

/* The name of the format (one of the above, a compressor or an archive) that begins with the bytes
 * p[0..n); NULL: unknown. */
const char *lm_input_known_format(const char *p, size_t n);

#endif
