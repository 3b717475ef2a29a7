/* SPDX-License-Identifier: Apache-2.0 */
/* pretok_scan.h -- hand-written scanners for the word patterns of GPT-2, Llama-3 and Qwen.
 *
 * Each gives exactly the matches of its pattern, taken one after the other from the left (these
 * patterns match at every position, so words tile the text): gpt2    's|'t|'re|'ve|'m|'ll|'d|
 * ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+ llama3
 * (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3} |
 * ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+ qwen    as llama3 with \p{N} in place of
 * \p{N}{1,3} Case folding in (?i:'s) makes U+017F (long s) an s, as regular-expression engines do.
 */
#ifndef LM_TEXT_PRETOK_SCAN_H
#define LM_TEXT_PRETOK_SCAN_H

#include <stddef.h>

typedef enum {
    LM_SCAN_NONE = 0, /* not one of these: needs a regular-expression engine */
    LM_SCAN_GPT2,
    LM_SCAN_LLAMA3,
    LM_SCAN_QWEN,
} lm_scan_kind;

/* The scanner for a pattern's exact text, or LM_SCAN_NONE. */
lm_scan_kind lm_scan_of_pattern(const char *pattern);
/* "gpt2", "llama3", "qwen" -> kind; LM_SCAN_NONE otherwise. */
lm_scan_kind lm_scan_of_name(const char *name);
const char *lm_scan_pattern(lm_scan_kind k); /* the pattern's text */

/* Bytes of the first word of p[0..end), at least one; p < end and valid UTF-8. */
size_t lm_scan_word(lm_scan_kind k, const char *p, const char *end);

#endif
