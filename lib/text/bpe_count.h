/* SPDX-License-Identifier: Apache-2.0 */
/* bpe_count.h -- a table from words (byte strings) to 64-bit counts; the working set of BPE
 * training.  Private to lib/text. */
#ifndef LM_TEXT_BPE_COUNT_H
#define LM_TEXT_BPE_COUNT_H

#include <stddef.h>
#include <stdint.h>

#include "base/err.h"

typedef struct {
    size_t off; /* of the word in text */
    uint32_t len, hash;
    int64_t count; /* 0: a free cell */
} lm_word_cell;

/* Zero-initialise. */
typedef struct {
    lm_word_cell *cells; /* open addressing, at most half full */
    size_t n_cells, n;   /* n words */
    char *text;
    size_t text_len, text_cap;
} lm_words;

/* Fails: LM_ELIMIT when memory is exhausted or a word exceeds 4 GiB. */
lm_code lm_words_add(lm_words *w, const char *word, size_t len, int64_t count, lm_err *e);
/* The cell of a word, NULL: not counted.  Its count may be changed, but not to 0. */
lm_word_cell *lm_words_find(const lm_words *w, const char *word, size_t len);
/* Add all of `from` to *w. */
lm_code lm_words_merge(lm_words *w, const lm_words *from, lm_err *e);
void lm_words_fini(lm_words *w);

#endif
