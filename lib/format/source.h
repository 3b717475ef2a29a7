/* SPDX-License-Identifier: Apache-2.0 */
/* source.h -- the bytes read by input.h: a list of paths as a sequence of decompressed members.
 *
 * A plain file is one member.  Decoders are those that libarchive implements itself: filters that
 * would start another program, and formats that plain text could be mistaken for, are off. */
#ifndef LM_FORMAT_SOURCE_H
#define LM_FORMAT_SOURCE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "format/input_files.h"

typedef struct lm_source lm_source;

/* With skip_bad, damaged parts are skipped.  `most`: bytes that may follow the end of data in a
 * pipe.  Fails: as lm_input_open. */
lm_code lm_source_open(const char *const *paths, int n, bool skip_bad, size_t most, lm_source **out,
                       lm_err *e);
/* Fails as lm_source_open when one of them is missing or unreadable: checks inputs before long work
 * begins. */
lm_code lm_source_there(const char *const *paths, int n, lm_err *e);
void lm_source_close(lm_source *s);
/* Go to the next member, skipping the rest of this one; *got is false at the end. */
lm_code lm_source_next(lm_source *s, bool *got, lm_err *e);
/* The next bytes of the member, borrowed until the next call; *n = 0 at its end. */
lm_code lm_source_block(lm_source *s, const char **p, size_t *n, lm_err *e);
/* True if the member that ended was damaged (skip_bad); true if this one begins behind damage. */
bool lm_source_cut(const lm_source *s);
bool lm_source_resumed(const lm_source *s);
/* With skip_bad: record *e as the damage of this member, and clear it; lm_source_next continues
 * behind the member.  False otherwise. */
bool lm_source_pass(lm_source *s, lm_err *e);
int lm_source_file(const lm_source *s); /* number of the current file */
/* Number of skipped damaged parts, and the first of them. */
int64_t lm_source_bad(const lm_source *s, lm_err *first);
const char *lm_source_name(const lm_source *s); /* "a.tar:dir/b.txt"; until lm_source_next */
int lm_source_operand(const lm_source *s);
const lm_input_files *lm_source_files(const lm_source *s);

/* Any thread. */
uint64_t lm_source_bytes(const lm_source *s);
uint64_t lm_source_total(const lm_source *s);
/* For an operand of one file, the digest of its bytes; for several, that of their digests in
 * order. */
uint64_t lm_source_digest(const lm_source *s, int operand);

#endif
