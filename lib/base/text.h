/* SPDX-License-Identifier: Apache-2.0 */
/* text.h -- numbers with suffixes, sizes for people, nearest names, UTF-8. */
#ifndef LM_BASE_TEXT_H
#define LM_BASE_TEXT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* "1.5k", "20M", "3B", "1T": 10^3..10^12.  The whole string must match. */
bool lm_parse_count(const char *s, int64_t *out);
bool lm_parse_bytes(const char *s, int64_t *out);  /* K M G T = 2^10..2^40 */
bool lm_parse_seconds(const char *s, double *out); /* 90, 90s, 15m, 2h */
/* A decimal number, [+-]1.5e-3, in the "C" locale whatever the process has.  Refused: hexadecimal,
 * "inf", "nan", and numbers that a double cannot hold (1e400, 1e-400). */
bool lm_parse_double(const char *s, double *out);
/* "0,0.5,1": at most `most` numbers into v; *n: how many. */
bool lm_parse_list(const char *s, double *v, int most, int *n);
/* "18.3 GiB", "4.96 M"; buf of at least 32 bytes; returns buf. */
char *lm_show_bytes(double bytes, char *buf);
char *lm_show_count(double n, char *buf);
char *lm_show_seconds(double s, char *buf); /* "2:31", "1:02:31" */
/* "1 file%s": the end of a noun, "" for 1, else "s". */
const char *lm_plural(uint64_t n);
/* Copies the text from *at up to a character of `ends`, or its own end; *at then points to that.  False:
 * it is too long, and `out` holds its beginning. */
bool lm_text_until(const char **at, const char *ends, char *out, size_t size);
/* True if s ends in `end` and has something before it. */
bool lm_text_ends(const char *s, const char *end);
/* The member of a NULL-terminated list nearest to s (edit distance <= 3), or NULL. */
const char *lm_nearest(const char *s, const char *const *list);

/* Length of the longest valid UTF-8 prefix (RFC 3629: no surrogates, no overlongs). */
size_t lm_utf8_valid(const char *s, size_t len);
/* Decode one code point at s (valid input, len > 0); *n = bytes used. */
uint32_t lm_utf8_get(const char *s, size_t len, size_t *n);
size_t lm_utf8_put(uint32_t cp, char out[4]);

#endif
