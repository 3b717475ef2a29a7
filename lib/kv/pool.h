/* SPDX-License-Identifier: Apache-2.0 */
/* pool.h -- the pages of a cache as numbers: places on device, host and disk, references, pins.
 *
 * A page holds a fixed number of tokens of all layers.  Its number never changes while it is in
 * use; its tier and its place in that tier do.  The pool holds no data and has no backend: what
 * must be copied is a list of moves, and the caller performs the moves in the order of the list
 * before the pages are read or written.
 *
 * A reference keeps the content of a page.  A pin, of which each reference has at most one, keeps
 * the page on the device: sequences that run pin their pages, sequences that wait do not.  A page
 * with references and no pins is parked, a page that is kept for others after its last reference is
 * cached (prefix.h).  Both stay where they are until a place is needed: then a cached page that was
 * never hit is discarded, so that nothing waits for its move, or the cached page that was released
 * first goes to the next tier, or is discarded where the next tiers have no room; then the parked
 * page that was released first goes down.  A page with references is never discarded.  In time that
 * would be idle, lm_pool_tidy moves cached pages ahead of the need, also those that were never hit.
 *
 * No call allocates memory after lm_pool_new. */
#ifndef LM_KV_POOL_H
#define LM_KV_POOL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"

typedef enum { LM_TIER_DEVICE, LM_TIER_HOST, LM_TIER_DISK, LM_TIERS } lm_tier;

/* Copy the content of a page from one place to another; from one place of the device to another
 * when a shared page is to be written. */
typedef struct {
    int32_t page;
    lm_tier from, to;
    int32_t source, target; /* places in these tiers */
} lm_kv_move;

typedef struct lm_pool lm_pool;

/* Bytes of memory that a page in use costs here, in any tier; a place that was never used costs
 * none. */
size_t lm_pool_page_cost(void);
/* `pages` places in each tier; only the device must have one.  LM_EUSAGE for counts that are
 * negative or of more than 2^30 in all. */
lm_code lm_pool_new(const int64_t pages[LM_TIERS], lm_pool **out, lm_err *e);
void lm_pool_free(lm_pool *p); /* NULL is fine */

/* A page on the device with one reference and one pin, of undefined content; -1: no room. */
int32_t lm_pool_take(lm_pool *p);
/* A page for writing in place of one that the caller has pinned: itself if it is neither shared nor
 * kept, else a new one with its content, which gets the caller's reference and pin.  -1: no
 * room. */
int32_t lm_pool_own(lm_pool *p, int32_t page);
void lm_pool_ref(lm_pool *p, int32_t page);
/* Remove a reference that has no pin.  Pages of a sequence are dropped and unpinned from the last
 * to the first, so that a page is discarded before the pages that precede it. */
void lm_pool_drop(lm_pool *p, int32_t page);
/* Pin n distinct pages, one pin for each, and bring them to the device: all, or false and nothing
 * has happened. */
bool lm_pool_pin(lm_pool *p, const int32_t *page, int64_t n);
void lm_pool_unpin(lm_pool *p, int32_t page);
/* True if these n pages can be pinned and `more` pages be taken then. */
bool lm_pool_fits(const lm_pool *p, const int32_t *page, int64_t n, int64_t more);

/* A kept page was found by another sequence than the one that computed it: it is worth a move. */
void lm_pool_hit(lm_pool *p, int32_t page);
/* Move cached pages from the device to tiers below it, until an eighth of its places is free: at
 * most `most` moves. */
void lm_pool_tidy(lm_pool *p, int64_t most);
/* The page is kept after its last reference, or no longer.  `forget` is called for a kept page when
 * its content is discarded; it may call lm_pool_keep(.., false) for other pages. */
void lm_pool_keep(lm_pool *p, int32_t page, bool keep);
void lm_pool_on_discard(lm_pool *p, void (*forget)(void *ctx, int32_t page), void *ctx);
/* No further page goes to this tier, which is not the device's, and its cached pages are discarded;
 * parked pages remain until they are dropped or pinned. */
void lm_pool_close(lm_pool *p, lm_tier tier);

lm_tier lm_pool_tier(const lm_pool *p, int32_t page);
int32_t lm_pool_place(const lm_pool *p, int32_t page);
int32_t lm_pool_refs(const lm_pool *p, int32_t page);
int32_t lm_pool_pins(const lm_pool *p, int32_t page);
int64_t lm_pool_size(const lm_pool *p, lm_tier tier); /* places; LM_TIERS: pages in all */
int64_t lm_pool_used(const lm_pool *p,
                     lm_tier tier); /* places that hold a page, also in a closed tier */
/* Pages of a tier that are free, cached and parked; the others are pinned. */
typedef struct {
    int64_t free, cached, parked;
} lm_pool_count;
lm_pool_count lm_pool_counts(const lm_pool *p, lm_tier tier);
/* Pages that could go from the device to the other tiers now. */
int64_t lm_pool_below(const lm_pool *p);

/* The moves since the last call, in order, valid until the next call that changes the pool. */
int64_t lm_pool_moves(lm_pool *p, const lm_kv_move **out);
int64_t lm_pool_pending(const lm_pool *p); /* their number so far */

/* Recount everything; LM_EBUG names the first page that is lost, in two lists or has a wrong
 * count. */
lm_code lm_pool_check(const lm_pool *p, lm_err *e);

#endif
