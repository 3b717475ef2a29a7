/* SPDX-License-Identifier: Apache-2.0 */
/* pretok.h -- the pre-tokeniser of a tokenizer.json: cuts a text into words.
 *
 * ByteLevel, Split (String or Regex, every behaviour, invert), Digits, Metaspace, Whitespace,
 * WhitespaceSplit, Punctuation, BertPreTokenizer, CharDelimiterSplit, and Sequence of them;
 * anything else is LM_EFORMAT by name.  Patterns with a scanner (pretok_scan.h) use it; others go
 * through PCRE2. */
#ifndef LM_TEXT_PRETOK_H
#define LM_TEXT_PRETOK_H

#include <stdbool.h>
#include <stddef.h>

#include "base/buf.h"
#include "base/err.h"
#include "base/json.h"
#include "text/pretok_regex.h"
#include "text/pretok_scan.h"

typedef struct lm_pretok lm_pretok; /* constant once made: shared by threads */

typedef struct {
    size_t off, len;
    bool start; /* the first word of the whole input */
} lm_piece;

typedef struct {
    lm_piece *v;
    size_t n, cap;
} lm_pieces;

/* Working memory of one thread; zero-initialise. */
typedef struct {
    lm_buf buf[2];
    lm_pieces list[2], cut;
} lm_pretok_scratch;
void lm_pretok_scratch_fini(lm_pretok_scratch *s);

/* Parse the value of "pre_tokenizer"; null gives a pre-tokeniser without steps. */
lm_code lm_pretok_new(const json_t *j, const char *where, lm_pretok **out, lm_err *e);
void lm_pretok_free(lm_pretok *p);

/* If the last step maps bytes to characters (ByteLevel), remove it and return true: words are then
 * plain bytes, which lm_bpe_encode reads directly. */
bool lm_pretok_leave_bytes(lm_pretok *p);
/* The scanner, if cutting with it is the only step; otherwise LM_SCAN_NONE. */
lm_scan_kind lm_pretok_scanner(const lm_pretok *p);

/* Cut text[0..len), valid UTF-8 and not empty.  `start`: it begins the whole input.  The words are
 * (*words)->v[i] over *base; both live in s, or *base is text, until the next call. */
lm_code lm_pretok_run(const lm_pretok *p, lm_regex_match *m, lm_pretok_scratch *s, const char *text,
                      size_t len, bool start, const char **base, const lm_pieces **words,
                      lm_err *e);

#endif
