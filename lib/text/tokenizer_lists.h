/* SPDX-License-Identifier: Apache-2.0 */
/* tokenizer_lists.h -- the two long parts of a tokenizer.json, vocabulary and merges, as plain
 * lists.
 *
 * They are most of the file and a tree of JSON of them costs ten times what is done with them, so
 * they are cut out of the text and read here, and the parser sees {} and [] in their place.  What
 * is not found at once or not read without doubt is left to the parser, whose messages are better.
 */
#ifndef LM_TEXT_TOKENIZER_LISTS_H
#define LM_TEXT_TOKENIZER_LISTS_H

#include <stdbool.h>
#include <stdint.h>

#include "base/buf.h"
#include "base/json.h"

typedef struct {
    size_t off; /* in lists.text */
    size_t len;
    int64_t id; /* -1: was no whole number */
} lm_list_token;

typedef struct {
    size_t off, left, right; /* the texts' lengths: one after the other at off */
} lm_list_merge;

typedef struct {
    lm_buf text;
    lm_list_token *tokens;
    size_t n_tokens, cap_tokens;
    lm_list_merge *merges;
    size_t n_merges, cap_merges;
} lm_lists; /* zero-initialise */

void lm_lists_fini(lm_lists *l);

/* Read both lists from the text, and put the text without them into *rest.  *done false: not that
 * plain a file, parse it whole.  Fails: LM_ELIMIT. */
lm_code lm_lists_cut(lm_lists *l, const char *json, size_t len, lm_buf *rest, bool *done,
                     lm_err *e);
/* The same lists from a tree: the values of model.vocab and model.merges. */
lm_code lm_lists_from_tree(lm_lists *l, const json_t *vocab, const json_t *merges,
                           const char *where, lm_err *e);

#endif
