/* SPDX-License-Identifier: Apache-2.0 */
/* tokenizer_lists.h -- the two long parts of a tokenizer.json, vocabulary and merges, as plain
 * lists.
 *
 * They are most of the file, and a JSON tree of them costs ten times their use.  So they are cut
 * out of the text and read here, and the parser gets {} and [] instead.  Any irregularity leaves
 * the whole text to the parser, whose messages are better. */
#ifndef LM_TEXT_TOKENIZER_LISTS_H
#define LM_TEXT_TOKENIZER_LISTS_H

#include <stdbool.h>
#include <stdint.h>

#include "base/buf.h"
#include "base/json.h"

typedef struct {
    size_t off; /* in lists.text */
    size_t len;
    int64_t id;   /* -1: was not a whole number */
    double score; /* Unigram */
} lm_list_token;

typedef struct {
    size_t off, left, right; /* lengths of the texts, which follow each other from off on */
} lm_list_merge;

typedef struct {
    lm_buf text;
    lm_list_token *tokens;
    size_t n_tokens, cap_tokens;
    lm_list_merge *merges;
    size_t n_merges, cap_merges;
} lm_lists; /* zero-initialise */

void lm_lists_fini(lm_lists *l);

/* Read both lists from the text, and write the text without them to *rest.  *done false: the file
 * is irregular, parse all of it.  Fails: LM_ELIMIT. */
lm_code lm_lists_cut(lm_lists *l, const char *json, size_t len, lm_buf *rest, bool *done,
                     lm_err *e);
/* The same lists from a tree: the values of model.vocab and model.merges.  The vocabulary of a
 * Unigram model is a list of [text, score] in the order of ids; it is never cut out of the text. */
lm_code lm_lists_from_tree(lm_lists *l, const json_t *vocab, const json_t *merges,
                           const char *where, lm_err *e);

#endif
