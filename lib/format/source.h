/* SPDX-License-Identifier: Apache-2.0 */
/* source.h -- the bytes under input.h: a list of paths as a sequence of decompressed members.
 *
 * A plain file is one member.  Decoders are those of libarchive that live in its own library:
 * filters that would start another program, and formats that plain text can be mistaken for, are
 * off. */
#ifndef LM_FORMAT_SOURCE_H
#define LM_FORMAT_SOURCE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "format/input_files.h"

typedef struct lm_source lm_source;

/* With skip_bad, what is damaged is passed over.  `most`: bytes of a pipe that may follow the end of its data.
 * Fails: as lm_input_open. */
lm_code lm_source_open(const char *const *paths, int n, bool skip_bad, size_t most, lm_source **out,
                       lm_err *e);
/* Fails as lm_source_open when one of them is not there or may not be read; for the inputs of a long work,
 * before it begins. */
lm_code lm_source_there(const char *const *paths, int n, lm_err *e);
void lm_source_close(lm_source *s);
/* Go to the next member, over what is left of this one; *got is false at the end of all. */
lm_code lm_source_next(lm_source *s, bool *got, lm_err *e);
/* The next bytes of the member, borrowed until the next call; *n = 0 at its end. */
lm_code lm_source_block(lm_source *s, const char **p, size_t *n, lm_err *e);
/* Did the member that has ended end in damage (skip_bad)?  Does this one begin behind damage? */
bool lm_source_cut(const lm_source *s);
bool lm_source_resumed(const lm_source *s);
/* With skip_bad: note *e, for which this member cannot be read, and clear it; lm_source_next goes on behind the
 * member.  False otherwise. */
bool lm_source_pass(lm_source *s, lm_err *e);
int lm_source_file(const lm_source *s); /* the number of the file among all */
/* Damaged parts that were passed over, and the first of them. */
int64_t lm_source_bad(const lm_source *s, lm_err *first);
const char *lm_source_name(const lm_source *s); /* "a.tar:dir/b.txt"; until lm_source_next */
int lm_source_operand(const lm_source *s);
const lm_input_files *lm_source_files(const lm_source *s);

/* Any thread. */
uint64_t lm_source_bytes(const lm_source *s);
uint64_t lm_source_total(const lm_source *s);
/* Of an operand that is one file, of its bytes; of several, of their digests in order. */
uint64_t lm_source_digest(const lm_source *s, int operand);

#endif
