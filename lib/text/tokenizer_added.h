/* SPDX-License-Identifier: Apache-2.0 */
/* tokenizer_added.h -- added tokens: strings that are searched in the text before any other step.
 *
 * Two groups: tokens with "normalized" false are searched in the raw text, then the others in the
 * normalised rest.  In a group the leftmost match is taken, the longest of several. */
#ifndef LM_TEXT_TOKENIZER_ADDED_H
#define LM_TEXT_TOKENIZER_ADDED_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"

typedef struct {
    char *text; /* as in the file */
    size_t len;
    char *pattern; /* the text to search, normalised in the second group; NULL: the same */
    size_t pattern_len;
    uint32_t id;
    bool special, single_word, lstrip, rstrip, normalized;
} lm_added_token;

enum { LM_ADDED_RAW, LM_ADDED_NORMAL };

typedef struct {
    lm_added_token *v;
    size_t n;
    struct {
        uint32_t *order; /* indices into v, sorted by pattern */
        size_t n;
        uint32_t first[257]; /* order[first[b]..first[b+1]) begin with byte b */
        int only;            /* the only first byte, or -1 if there are several */
    } group[2];
} lm_added;

/* Build the groups from v[0..n) with their patterns. */
lm_code lm_added_index(lm_added *a, lm_err *e);
void lm_added_fini(lm_added *a);

/* A walk over the matches of one group in text[0..len).  After each lm_added_next that returns
 * true, token is the match, text[gap..begin) the text between it and the last one, and the match
 * (with the white space that lstrip and rstrip swallow) ends where the next gap begins. After
 * false, text[gap..len) is left. */
typedef struct {
    const lm_added *added;
    int group;
    const char *text;
    size_t len, at, gap, begin, next_gap;
    const lm_added_token *token;
} lm_added_walk;
bool lm_added_next(lm_added_walk *w);

#endif
