/* SPDX-License-Identifier: Apache-2.0 */
/* charsmap.h -- SentencePiece's compiled map of characters: the normaliser "Precompiled".
 *
 * 1. u32, little endian: bytes of the trie that follows;
 * 2. the trie, a double array (darts-clone): u32 units, little endian, of which bit 31 marks a
 *    leaf's value (bits 0 to 30), bits 0 to 7 are the label, bit 8 says that a value follows, and
 *    bits 10 to 30, shifted left by 8 where bit 9 is set, are the offset to the children;
 * 3. the replacements, each with a NUL behind it; values are offsets into them.
 *
 * It is applied as `tokenizers` (0.23) does: a grapheme of less than 6 bytes is looked up as a
 * whole, others character by character, and of all keys that are a prefix, the shortest is used.
 * `sentencepiece` takes the longest key at each position; both differ for characters with two
 * combining marks or more, for decomposed Hangul, for CR LF, and with case folding for capitals
 * with a combining mark.  Private to lib/text. */
#ifndef LM_TEXT_CHARSMAP_H
#define LM_TEXT_CHARSMAP_H

#include <stddef.h>

#include "base/buf.h"
#include "base/err.h"

typedef struct lm_charsmap lm_charsmap; /* constant once made: shared by threads */

/* Decode a map from base 64.  Fails: LM_EFORMAT unless it has the three parts above. */
lm_code lm_charsmap_new(const char *coded, size_t len, const char *where, lm_charsmap **out,
                        lm_err *e);
void lm_charsmap_free(lm_charsmap *c);
/* Append text[0..len), valid UTF-8, with the replacements of the map. */
lm_code lm_charsmap_run(const lm_charsmap *c, const char *text, size_t len, lm_buf *out, lm_err *e);

#endif
