/* SPDX-License-Identifier: Apache-2.0 */
/* jsonl.h -- finds one string in a line of JSON, without a tree, and leaves the rest unchanged.
 *
 * Corpora carry other fields (ids, scores, integers beyond 64 bits) that a filter must copy byte
 * for byte, so a line is scanned and validated in place (RFC 8259, depth up to 512) and only the
 * span of one value is reported. */
#ifndef LM_FORMAT_JSONL_H
#define LM_FORMAT_JSONL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/buf.h"
#include "base/err.h"

/* Where a scan stopped: `what` is NULL without a fault, otherwise a phrase such as "expected ':'"
 * for the byte at `at` (0-based). */
typedef struct {
    const char *what;
    size_t at;
    enum {
        LM_JSONL_MALFORMED,
        LM_JSONL_ABSENT,
        LM_JSONL_NO_STRING
    } kind; /* the last two: in a valid object */
} lm_jsonl_fault;

/* Find the string under the key `field` at the top level of the object line[0..len), which must be
 * valid UTF-8.  The whole line is validated.  On success line[*begin..*end) is the string with its
 * quotes.  Faults: not an object, malformed JSON, no such key, the key twice, not a string. */
lm_jsonl_fault lm_jsonl_find(const char *line, size_t len, const char *field, size_t *begin,
                             size_t *end);
/* The same; if there is no such key, A.B is the key B of the object under A, and so on. */
lm_jsonl_fault lm_jsonl_find_path(const char *line, size_t len, const char *field, size_t *begin,
                                  size_t *end);

/* The next member of the object line[0..len), which lm_jsonl_find has found valid, with or without
 * the field: its key with its quotes is line[key..key_end), its value line[value..value_end), both
 * as written.  *at is 0 at first; false: no more members. */
typedef struct {
    size_t key, key_end, value, value_end;
} lm_jsonl_member;
bool lm_jsonl_next(const char *line, size_t len, size_t *at, lm_jsonl_member *out);
/* True if the string token s[0..len) is the word `name`.  Escapes are decoded for the
 * comparison. */
bool lm_jsonl_is(const char *s, size_t len, const char *name);

/* Append the names of the strings in the object line[0..len), valid JSON, in the form of
 * lm_jsonl_find_path, in quotes and with commas: those of the top level and of objects in it, a few
 * at most; without strings, the keys of the top level. */
lm_code lm_jsonl_names(const char *line, size_t len, lm_buf *out, lm_err *e);

/* Append the value of the string token s[0..len) (quotes included, as found above).  Lone surrogate
 * escapes have no UTF-8: they become U+FFFD and are counted in *lone. */
lm_code lm_jsonl_unescape(const char *s, size_t len, lm_buf *out, int64_t *lone, lm_err *e);
/* Overwrite the lone surrogate escapes of a string token by \ufffd, in place. */
void lm_jsonl_mend(char *s, size_t len);

/* Append text[0..len) as a JSON string with its quotes; valid UTF-8 is copied unchanged. */
lm_code lm_jsonl_escape(const char *text, size_t len, lm_buf *out, lm_err *e);

#endif
