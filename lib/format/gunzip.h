/* SPDX-License-Identifier: Apache-2.0 */
/* gunzip.h -- gzip, member by member, each held against its CRC-32 and its length (RFC 1952).
 *
 * libarchive's own reader compares neither, and takes what stands behind a damaged header for the end of the
 * file, so that `cat a.gz b.gz` with a fault in the middle would read as a shorter file.  This layer lies under
 * libarchive's: input that is not gzip passes through it unchanged, without a copy.
 * Private to lib/format. */
#ifndef LM_FORMAT_GUNZIP_H
#define LM_FORMAT_GUNZIP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"

/* The next bytes, borrowed until the next call; *n = 0 at the end, which leaves the last ones as they are. */
typedef lm_code (*lm_block_fn)(void *ctx, const void **p, size_t *n, lm_err *e);

typedef struct lm_gunzip lm_gunzip;

/* `where` names the input in messages; it is copied.  With `skip` a damaged member is passed over. */
lm_code lm_gunzip_new(lm_block_fn next, void *ctx, const char *where, bool skip, lm_gunzip **out,
                      lm_err *e);
void lm_gunzip_free(lm_gunzip *g);

/* The next decoded bytes, as an lm_block_fn.  Zero bytes behind a member are padding.
 * Fails: LM_EFORMAT naming the member and the byte, for a damaged or truncated member and for bytes
 * behind a member that begin no other; with `skip` these are an end (*n = 0) after which lm_gunzip_resume
 * holds.
 * What was decoded before the damage showed has been given out. */
lm_code lm_gunzip_block(void *g, const void **p, size_t *n, lm_err *e);
bool lm_gunzip_is_gzip(const lm_gunzip *g); /* known from the first block on */
/* After an end: was it a damaged member (then *why, if not NULL, says what was wrong with it), behind which
 * the next call goes on with the next one that has a header, if there is any? */
bool lm_gunzip_resume(lm_gunzip *g, lm_err *why);

#endif
