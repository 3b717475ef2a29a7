/* SPDX-License-Identifier: Apache-2.0 */
/* prefix.h -- pages of prompts by their tokens, so that prompts with the same beginning share them.
 *
 * The index is a tree: an entry is a whole page, its tokens, and the entry of the page before it.
 * Entries are found by a hash (XXH3) of the tokens, seeded by the hash of the entry before; a hit
 * needs equal tokens and the same entry before, so no result depends on the hash alone.  An entry
 * keeps its page in the pool after the last reference; when the pool discards a page, its entry and
 * all that follow it are removed.  All pages of one index belong to one format of the cache and one
 * pool.  Groups, which are numbers from 0 on, share no pages: each has a root of its own.
 * Private to lib/kv. */
#ifndef LM_KV_PREFIX_H
#define LM_KV_PREFIX_H

#include <stddef.h>
#include <stdint.h>

#include "kv/pool.h"

typedef struct lm_prefix lm_prefix;

/* An entry, for the page after it; LM_PREFIX_ROOT is before the first page. */
typedef struct {
    int32_t page;
    uint64_t serial; /* a page is used again, an entry is not */
} lm_prefix_entry;
#define LM_PREFIX_ROOT ((lm_prefix_entry){ -1, 0 })
/* Before the first page of a group; LM_PREFIX_ROOT is that of group 0. */
static inline lm_prefix_entry lm_prefix_root(int32_t group)
{
    return (lm_prefix_entry){ -1 - group, 0 };
}

/* Bytes of memory that a page of `tokens` tokens costs here while it is in use. */
size_t lm_prefix_page_cost(int64_t tokens);
/* For pages of `tokens` tokens.  The pool, borrowed, reports discarded pages to this index. */
lm_code lm_prefix_new(lm_pool *p, int64_t tokens, lm_prefix **out, lm_err *e);
void lm_prefix_free(lm_prefix *x); /* before the pool; NULL is fine */

/* The pages of the longest known beginning of n tokens behind *last, a root, whole pages only, into `pages` (room for
 * n / tokens); each gets a reference.  *last becomes the entry of the last one. */
int64_t lm_prefix_find(lm_prefix *x, const uint32_t *ids, int64_t n, int32_t *pages,
                       lm_prefix_entry *last);
/* The entry of a page; of the page of tokens after `at`, or with page -1 if it is unknown. */
lm_prefix_entry lm_prefix_of(const lm_prefix *x, int32_t page);
lm_prefix_entry lm_prefix_after(const lm_prefix *x, lm_prefix_entry at, const uint32_t *ids);
/* Add a page that holds one page of tokens after *last, and set *last to its entry.  If these
 * tokens are known with another page, that one stays.  False if *last no longer exists. */
bool lm_prefix_add(lm_prefix *x, const uint32_t *ids, int32_t page, lm_prefix_entry *last);
/* Remove the entry of a page, if it has one, and all that follow it. */
void lm_prefix_forget(lm_prefix *x, int32_t page);
int64_t lm_prefix_count(const lm_prefix *x); /* entries */

#endif
