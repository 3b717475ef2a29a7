/* SPDX-License-Identifier: Apache-2.0 */
/* gunzip.h -- gzip, member by member, each checked against its CRC-32 and length (RFC 1952).
 *
 * libarchive's own reader compares neither, and treats a damaged header as the end of the file, so
 * that `cat a.gz b.gz` with a fault in the middle would read as a shorter file.  This layer is
 * below libarchive: input that is not gzip passes through it unchanged, without a copy.
 * Private to lib/format. */
#ifndef LM_FORMAT_GUNZIP_H
#define LM_FORMAT_GUNZIP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"

/* The next bytes, borrowed until the next call; *n = 0 at the end, which keeps the last block
 * valid. */
typedef lm_code (*lm_block_fn)(void *ctx, const void **p, size_t *n, lm_err *e);

typedef struct lm_gunzip lm_gunzip;

/* `where` names the input in messages; it is copied.  With `skip` a damaged member is skipped. */
lm_code lm_gunzip_new(lm_block_fn next, void *ctx, const char *where, bool skip, lm_gunzip **out,
                      lm_err *e);
void lm_gunzip_free(lm_gunzip *g);

/* The next decoded bytes, as an lm_block_fn.  Zero bytes behind a member are padding.  Fails:
 * LM_EFORMAT naming the member and the byte, for a damaged or truncated member and for bytes behind
 * a member that are not another one; with `skip` each is an end (*n = 0) after which
 * lm_gunzip_resume is true.  Bytes decoded before the damage was found have been returned. */
lm_code lm_gunzip_block(void *g, const void **p, size_t *n, lm_err *e);
bool lm_gunzip_is_gzip(const lm_gunzip *g); /* known after the first block */
/* After an end: true if it was a damaged member (*why, if not NULL: the damage); the next call then
 * continues with the next intact header, if any. */
bool lm_gunzip_resume(lm_gunzip *g, lm_err *why);

#endif
