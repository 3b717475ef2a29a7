/* SPDX-License-Identifier: Apache-2.0 */
/* clean_parts.h -- a text split for clean.h: words, lines, paragraphs and their repeats.
 *
 * A word is a run without white space; in the scripts of cjk.h each character is one, with the
 * punctuation around it.  Private to lib/text. */
#ifndef LM_TEXT_CLEAN_PARTS_H
#define LM_TEXT_CLEAN_PARTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "text/language.h"

typedef struct {
    uint64_t hash;
    int64_t chars;
} lm_unit;

typedef struct {
    int64_t chars, newlines;    /* code points in all; '\n' among them */
    int64_t n_words, cjk_words; /* the second: single characters of cjk.h */
    int64_t plain_words;        /* with a character that is neither punctuation nor symbol */
    int64_t plain_chars;        /* of those, punctuation around them not counted */
    int64_t alpha_words;        /* with a letter */
    int64_t stop_words;         /* number of different words of the set */
    int64_t hashes, ellipses;   /* '#'; "..." and U+2026 */
    int64_t n_lines;            /* not blank */
    int64_t bullet_lines, ellipsis_lines, sentence_lines, short_lines;
    lm_unit *words;              /* chars is a running sum */
    lm_unit *lines, *paragraphs; /* lines and paragraphs without the white space around */
    int64_t n_paragraphs;
    size_t cap_words, cap_lines, cap_paragraphs;
    uint64_t *gram; /* hashes of the gram_n words from each word on */
    size_t cap_gram;
    int gram_n;
    uint32_t *stop_seen; /* by stop word: the last text that contained it, counted by n_texts */
    size_t cap_stop_seen;
    uint32_t n_texts;
    struct lm_seen *table; /* scratch for counting */
    size_t cap_table;
} lm_parts; /* zero-initialise, reuse */

/* stop: the set counted in stop_words, the same for all texts; NULL: none. */
lm_code lm_parts_split(lm_parts *p, const char *text, size_t len, const lm_stop_words *stop,
                       lm_err *e);
void lm_parts_fini(lm_parts *p);

typedef enum { LM_UNIT_LINE, LM_UNIT_PARAGRAPH } lm_unit_kind;
typedef struct {
    double share;  /* fraction of units that repeat an earlier one */
    int64_t chars; /* fraction of characters in them */
} lm_repeats;
lm_code lm_parts_repeats(lm_parts *p, lm_unit_kind kind, lm_repeats *out, lm_err *e);
/* Word n-grams; of texts that are mostly of the scripts of cjk.h 2n characters take the place of n
 * words, since their words have about two. */
/* Characters in the most frequent n-gram times its count; 0 if each occurs once. */
lm_code lm_parts_top_gram(lm_parts *p, int n, int64_t *chars, lm_err *e);
/* Characters in n-grams that repeat an earlier one, each character counted once. */
lm_code lm_parts_dup_grams(lm_parts *p, int n, int64_t *chars, lm_err *e);

/* One line, trimmed. */
void lm_trim(const char **begin, const char **end);
void lm_line_words(const char *s, size_t n, int64_t *words, int64_t *longest);
bool lm_line_ends_sentence(const char *s, size_t n); /* . ? ! or a quote, and not "..." */
int64_t lm_line_sentences(const char *s, size_t n);  /* at least 1 */

#endif
