/* SPDX-License-Identifier: Apache-2.0 */
/* pretok_regex.h -- regular expressions of tokenizer files, through PCRE2 with Unicode properties.
 *
 * The files are written for Oniguruma.  Equal in both engines: alternation from the left, \p{..},
 * (?i:..), look-around, possessive quantifiers.  \s and \S are the White_Space property, as there.
 * Refused because their meaning differs: \h, \H (hexadecimal digits there) and && in a character
 * class. */
#ifndef LM_TEXT_PRETOK_REGEX_H
#define LM_TEXT_PRETOK_REGEX_H

#include <stdbool.h>
#include <stddef.h>

#include "base/err.h"

typedef struct lm_regex lm_regex;             /* constant once compiled: shared by threads */
typedef struct lm_regex_match lm_regex_match; /* one per thread; fits every lm_regex */

/* `literal`: the text matches itself.  Fails: LM_EFORMAT naming the place in the pattern. */
lm_code lm_regex_new(const char *pattern, size_t len, bool literal, const char *where,
                     lm_regex **out, lm_err *e);
void lm_regex_free(lm_regex *r);

lm_code lm_regex_match_new(lm_regex_match **out, lm_err *e);
void lm_regex_match_free(lm_regex_match *m);

/* The first match in text[from..len) (valid UTF-8; look-behind reads the text before): *begin,
 * *end.  *found false at the end.  Fails: LM_ELIMIT when the engine's limits are reached
 * (catastrophic patterns). */
lm_code lm_regex_find(const lm_regex *r, lm_regex_match *m, const char *text, size_t len,
                      size_t from, size_t *begin, size_t *end, bool *found, lm_err *e);

/* The position at which the search continues after an empty match at `at`: one character further
 * (len + 1 past the end). */
static inline size_t lm_regex_step(const char *text, size_t len, size_t at)
{
    do
        at++;
    while (at < len && ((unsigned char)text[at] & 0xC0) == 0x80);
    return at;
}

#endif
