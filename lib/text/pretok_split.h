/* SPDX-License-Identifier: Apache-2.0 */
/* pretok_split.h -- cutting pieces of text at the matches of a pattern, a class or a character.
 * Private to lib/text. */
#ifndef LM_TEXT_PRETOK_SPLIT_H
#define LM_TEXT_PRETOK_SPLIT_H

#include <stdbool.h>
#include <stdint.h>

#include "text/pretok.h"

typedef enum {
    LM_CUT_SCAN,  /* a scanner of pretok_scan.h: matches tile the text */
    LM_CUT_REGEX, /* matches of a pattern */
    LM_CUT_CLASS, /* every character in one of the classes of `mask` is a match */
    LM_CUT_CHAR,  /* every `ch` is a match */
    LM_CUT_WORDS, /* \w+ and [^\w\s]+ */
} lm_cut_kind;

/* Treatment of the matches: "the-final" cut at "-" gives the | - | final (isolated), the | final
 * (removed), the- | final (previous), the | -final (next); contiguous joins neighbours of the same
 * sort. */
typedef enum {
    LM_CUT_ISOLATED,
    LM_CUT_REMOVED,
    LM_CUT_PREVIOUS,
    LM_CUT_NEXT,
    LM_CUT_CONTIGUOUS,
} lm_cut_behavior;

typedef struct {
    lm_cut_kind kind;
    lm_cut_behavior behavior;
    bool invert; /* inverted: the text between the matches counts as the matches */
    lm_scan_kind scan;
    lm_regex *regex; /* owned by the pre-tokeniser */
    uint8_t mask;
    uint32_t ch;
} lm_pretok_cut;

/* Cut every piece of `from` and append the pieces, empty ones left out, to *to.  tmp is working
 * memory. */
lm_code lm_cut_all(const lm_pretok_cut *c, lm_regex_match *m, const char *base,
                   const lm_pieces *from, lm_pieces *tmp, lm_pieces *to, lm_err *e);

#endif
