/* SPDX-License-Identifier: Apache-2.0 */
/* normal.h -- the normaliser of a tokenizer.json: the rewriting of a text before it is cut into
 * words.
 *
 * NFC NFD NFKC NFKD, Nmt, Lowercase, Strip, StripAccents, Replace, Prepend, ByteLevel,
 * BertNormalizer, Precompiled (charsmap.h), and Sequence of them.  Anything else is LM_EFORMAT by
 * name. */
#ifndef LM_TEXT_NORMAL_H
#define LM_TEXT_NORMAL_H

#include <stddef.h>

#include "base/buf.h"
#include "base/err.h"
#include "base/json.h"
#include "text/pretok_regex.h"

typedef struct lm_normal lm_normal; /* constant once made: shared by threads */

/* Parse the value of "normalizer"; null (or no steps) gives *out = NULL. */
lm_code lm_normal_new(const json_t *j, const char *where, lm_normal **out, lm_err *e);
void lm_normal_free(lm_normal *n);

/* Rewrite text[0..len); the result *out, *out_len is in a, in b, or is text itself (also for n
 * NULL). a and b are cleared first.  m and the buffers must not be shared by threads. */
lm_code lm_normal_run(const lm_normal *n, lm_regex_match *m, const char *text, size_t len,
                      lm_buf *a, lm_buf *b, const char **out, size_t *out_len, lm_err *e);

/* "pattern": {"String": s} or {"Regex": s} of a step; *text (borrowed) may be NULL. */
lm_code lm_pattern_from_json(const json_t *step, const char *where, lm_regex **out,
                             const char **text, lm_err *e);

#endif
