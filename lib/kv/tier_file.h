/* SPDX-License-Identifier: Apache-2.0 */
/* tier_file.h -- the disk tier of a cache: pages in one file without a name, one place each.
 *
 * Every page has a checksum (XXH3) in memory, so that a page is read as it was written or not at
 * all.  The first failure, of a full disk for example, closes the tier: no page is written any
 * longer.  Pages that were written before can still be read.  The caller then calls lm_pool_close
 * (pool.h), and lm_sched_lost (sched.h) for the page of each failed move, whose rows are computed
 * again.  One thread at a time. */
#ifndef LM_KV_TIER_FILE_H
#define LM_KV_TIER_FILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#include "base/err.h"

typedef struct lm_tier_file lm_tier_file;

/* Bytes of memory that a place costs once it was used. */
size_t lm_tier_file_page_cost(void);
/* `pages` places of page_bytes in a file in the folder `dir`, which ends with the process.  The
 * file grows as places are used. */
lm_code lm_tier_file_new(const char *dir, size_t page_bytes, int64_t pages, lm_tier_file **out,
                         lm_err *e);
void lm_tier_file_free(lm_tier_file *t); /* NULL is fine */

/* Copy a page to or from its place.  In memory it has n pieces of page_bytes in all.  LM_EIO: the
 * system failed; LM_ELIMIT: a write to a closed tier; LM_EFORMAT: the place holds no page, or other
 * bytes than were written.  After a failure the content of a written place, or of the pieces read,
 * is undefined, and the place holds no page. */
lm_code lm_tier_file_write(lm_tier_file *t, int64_t place, const struct iovec *piece, int n,
                           lm_err *e);
lm_code lm_tier_file_read(lm_tier_file *t, int64_t place, const struct iovec *piece, int n,
                          lm_err *e);

/* The failure that closed the tier, for one warning; code LM_OK: it is open. */
const lm_err *lm_tier_file_closed(const lm_tier_file *t);

#endif
