/* SPDX-License-Identifier: Apache-2.0 */
/* pretok_scan.h -- hand-written scanners for the word patterns of GPT-2, Llama-3, Qwen, GPT-4 and
 * GPT-4o.
 *
 * Each returns exactly the matches of its pattern, one after the other from the left (these
 * patterns match at every position, so words tile the text):
 *
 * gpt2    's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
 * llama3  (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|
 *         ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+   (a space before the ?)
 * qwen    as llama3 with \p{N} in place of \p{N}{1,3}
 * cl100k  as llama3 with \s+\z before \s*[\r\n]+: white space at the end of a text is one word.
 *         These are the matches of tiktoken's pattern of that name, which has another form there: Oniguruma, which
 *         `tokenizers` runs, reads its {1,3}+ and $ in another way.
 * o200k   tiktoken's pattern of that name: a word ends where lower case is followed by upper case, and
 *         includes marks and a contraction at its end
 *
 * Case folding in (?i:'s) makes U+017F (long s) an s, as regular-expression engines do. */
#ifndef LM_TEXT_PRETOK_SCAN_H
#define LM_TEXT_PRETOK_SCAN_H

#include <stddef.h>

typedef enum {
    LM_SCAN_NONE = 0, /* other pattern: needs a regular-expression engine */
    LM_SCAN_GPT2,
    LM_SCAN_LLAMA3,
    LM_SCAN_QWEN,
    LM_SCAN_CL100K,
    LM_SCAN_O200K,
    LM_SCAN_KINDS,
} lm_scan_kind;

/* The scanner for a pattern's exact text, or LM_SCAN_NONE. */
lm_scan_kind lm_scan_of_pattern(const char *pattern);
/* "gpt2", "llama3", "qwen", "cl100k" (also "gpt4"), "o200k" (also "gpt4o") -> kind; LM_SCAN_NONE
 * otherwise.  Capitals, '-', and tiktoken's "_base" at the end make no difference. */
lm_scan_kind lm_scan_of_name(const char *name);
/* All names, NULL at the end: for lm_nearest. */
extern const char *const lm_scan_names[];
const char *lm_scan_pattern(lm_scan_kind k); /* the pattern's text */

/* Bytes of the first word of p[0..end), at least one; p < end and valid UTF-8. */
size_t lm_scan_word(lm_scan_kind k, const char *p, const char *end);

#endif
