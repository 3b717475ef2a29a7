/* SPDX-License-Identifier: Apache-2.0 */
/* language.h -- data about languages for cleaning rules: stop words and the mean length of words.
 *
 * English is as in the Gopher rules (arXiv:2112.11446): eight stop words, means of 3 to 10
 * characters a word.  The other lists are the most frequent function words of each language, and
 * the bounds are wider where words are built by joining; both are our own choice. */
#ifndef LM_TEXT_LANGUAGE_H
#define LM_TEXT_LANGUAGE_H

#include <stddef.h>
#include <stdint.h>

#include "base/err.h"

typedef struct {
    const char *code;        /* ISO 639-1 */
    double min_len, max_len; /* of words, mean characters; both 0: no bound */
    const char *words;       /* stop words, separated by spaces */
} lm_language;

/* "none" first; NULL at the end. */
extern const char *const lm_language_codes[];
const lm_language *lm_language_find(const char *code); /* NULL for "none" and unknown names */

/* ---- Sets of stop words ---- */

typedef struct lm_stop_words lm_stop_words; /* constant once made: shared by threads */

/* Words of text[0..len), separated by white space, in any case.  A word of more than one character
 * in scripts of cjk.h is refused, since texts are cut into single ones.  Fails: LM_EFORMAT, also
 * for no word at all, invalid UTF-8, or a word of more than 63 bytes. */
lm_code lm_stop_words_new(const char *text, size_t len, const char *where, lm_stop_words **out,
                          lm_err *e);
void lm_stop_words_free(lm_stop_words *s);
size_t lm_stop_words_count(const lm_stop_words *s); /* different words */
/* The index of the word s[0..n) in the set, in any case; -1: not in the set. */
int64_t lm_stop_words_find(const lm_stop_words *set, const char *s, size_t n);

#endif
