/* SPDX-License-Identifier: Apache-2.0 */
/* prefix.c -- a tree of pages by their tokens, with hash chains over all of its entries. */
#include "kv/prefix.h"

#include <string.h>

#include "base/hash.h"
#include "base/mem.h"

enum { FEWEST_BUCKETS = 1024 };

/* An entry has the number of its page.  Links are pages, -1: none; chains and buckets 1 + the page, 0: none, so that
 * the tables, which are lazy, need not be written before they are used. */
typedef struct {
    uint64_t hash, serial; /* serial 0: no entry */
    int32_t parent, child; /* the first child; parent below 0: that root */
    int32_t before, after; /* siblings */
    int32_t chain;         /* the next entry in the same bucket */
} entry;

struct lm_prefix {
    lm_pool *pool;
    int64_t tokens, n, count;
    uint64_t serial, mask; /* mask: of the buckets in use, which double as entries are added */
    uint64_t buckets;      /* at most */
    entry *entry;
    uint32_t *ids; /* [n, tokens] */
    int32_t *bucket;
};

static uint64_t hash_of(const lm_prefix *x, int32_t parent, const uint32_t *ids)
{
    uint64_t seed = parent < 0 ? (uint64_t)(-1 - (int64_t)parent) : x->entry[parent].hash;
    return lm_hash64(ids, (size_t)x->tokens * sizeof *ids, seed);
}

static int32_t find_child(const lm_prefix *x, int32_t parent, uint64_t hash, const uint32_t *ids)
{
    int32_t i = x->bucket[hash & x->mask] - 1;
    for (; i >= 0; i = x->entry[i].chain - 1)
        if (x->entry[i].hash == hash && x->entry[i].parent == parent &&
            !memcmp(x->ids + i * x->tokens, ids, (size_t)x->tokens * sizeof *ids))
            break;
    return i;
}

int64_t lm_prefix_find(lm_prefix *x, const uint32_t *ids, int64_t n, int32_t *pages,
                       lm_prefix_entry *last)
{
    int64_t k = 0;
    for (; (k + 1) * x->tokens <= n; k++) {
        const uint32_t *at = ids + k * x->tokens;
        int32_t page = find_child(x, last->page, hash_of(x, last->page, at), at);
        if (page < 0)
            break;
        lm_pool_ref(x->pool, page);
        lm_pool_hit(x->pool, page);
        pages[k] = page;
        *last = (lm_prefix_entry){ page, x->entry[page].serial };
    }
    return k;
}

lm_prefix_entry lm_prefix_of(const lm_prefix *x, int32_t page)
{
    return (lm_prefix_entry){ page, x->entry[page].serial };
}

lm_prefix_entry lm_prefix_after(const lm_prefix *x, lm_prefix_entry at, const uint32_t *ids)
{
    int32_t page = -1;
    if (at.page < 0 || x->entry[at.page].serial == at.serial)
        page = find_child(x, at.page, hash_of(x, at.page, ids), ids);
    return page < 0 ? LM_PREFIX_ROOT : lm_prefix_of(x, page);
}

/* Twice as many buckets: each gives part of its chain to a new one. */
static void add_buckets(lm_prefix *x)
{
    uint64_t n = x->mask + 1;
    x->mask = 2 * n - 1;
    for (uint64_t i = 0; i < n; i++) {
        int32_t page = x->bucket[i], after;
        x->bucket[i] = 0;
        for (; page; page = after) {
            entry *g = &x->entry[page - 1];
            int32_t *first = &x->bucket[g->hash & x->mask];
            after = g->chain;
            g->chain = *first;
            *first = page;
        }
    }
}

bool lm_prefix_add(lm_prefix *x, const uint32_t *ids, int32_t page, lm_prefix_entry *last)
{
    int32_t parent = last->page;
    if (parent >= 0 && x->entry[parent].serial != last->serial)
        return false;
    uint64_t hash = hash_of(x, parent, ids);
    int32_t known = find_child(x, parent, hash, ids);
    if (known < 0) {
        entry *n = &x->entry[page];
        lm_prefix_forget(x, page);
        if ((uint64_t)x->count > x->mask && x->mask + 1 < x->buckets)
            add_buckets(x);
        int32_t *first = &x->bucket[hash & x->mask];
        *n = (entry){ hash, ++x->serial, parent, -1, -1, -1, *first };
        *first = page + 1;
        known = page;
        if (parent >= 0) {
            n->after = x->entry[parent].child;
            if (n->after >= 0)
                x->entry[n->after].before = page;
            x->entry[parent].child = page;
        }
        memcpy(x->ids + page * x->tokens, ids, (size_t)x->tokens * sizeof *ids);
        x->count++;
        lm_pool_keep(x->pool, page, true);
    }
    *last = (lm_prefix_entry){ known, x->entry[known].serial };
    return true;
}

static void remove_leaf(lm_prefix *x, int32_t page)
{
    entry *n = &x->entry[page];
    int32_t *at = &x->bucket[n->hash & x->mask];
    while (*at != page + 1)
        at = &x->entry[*at - 1].chain;
    *at = n->chain;
    if (n->after >= 0)
        x->entry[n->after].before = n->before;
    if (n->before >= 0)
        x->entry[n->before].after = n->after;
    else if (n->parent >= 0)
        x->entry[n->parent].child = n->after;
    n->serial = 0;
    x->count--;
    lm_pool_keep(x->pool, page, false);
}

void lm_prefix_forget(lm_prefix *x, int32_t page)
{
    int32_t at = page;
    while (x->entry[page].serial) {
        while (x->entry[at].child >= 0)
            at = x->entry[at].child;
        int32_t up = x->entry[at].parent;
        remove_leaf(x, at);
        at = up;
    }
}

static void forget_discarded(void *ctx, int32_t page)
{
    lm_prefix_forget(ctx, page);
}

size_t lm_prefix_page_cost(int64_t tokens)
{
    return sizeof(entry) + (size_t)tokens * sizeof(uint32_t) + sizeof(int32_t);
}

int64_t lm_prefix_count(const lm_prefix *x)
{
    return x->count;
}

lm_code lm_prefix_new(lm_pool *p, int64_t tokens, lm_prefix **out, lm_err *e)
{
    int64_t n = lm_pool_size(p, LM_TIERS), ids;
    lm_prefix *x = NULL;

    *out = NULL;
    if (tokens < 1 || !lm_mul_i64_ok(n, tokens, &ids))
        return lm_fail(e, LM_EUSAGE, "prefix index", NULL, "cannot have %lld tokens in a page",
                       (long long)tokens);
    if (lm_alloc_n(&x, 1, sizeof *x, "prefix index", e))
        return e->code;
    x->n = n;
    x->tokens = tokens;
    for (x->buckets = FEWEST_BUCKETS; x->buckets < (uint64_t)(2 * n);)
        x->buckets *= 2;
    x->mask = FEWEST_BUCKETS - 1;
    if (lm_lazy_alloc(&x->entry, (size_t)n, sizeof *x->entry, "prefix index", e) ||
        lm_lazy_alloc(&x->ids, (size_t)ids, sizeof *x->ids, "prefix index", e) ||
        lm_lazy_alloc(&x->bucket, (size_t)x->buckets, sizeof *x->bucket, "prefix index", e)) {
        lm_prefix_free(x);
        return e->code;
    }
    x->pool = p;
    lm_pool_on_discard(p, forget_discarded, x);
    *out = x;
    return LM_OK;
}

void lm_prefix_free(lm_prefix *x)
{
    if (!x)
        return;
    if (x->pool)
        lm_pool_on_discard(x->pool, NULL, NULL);
    lm_lazy_free(x->entry, (size_t)x->n, sizeof *x->entry);
    lm_lazy_free(x->ids, (size_t)(x->n * x->tokens), sizeof *x->ids);
    lm_lazy_free(x->bucket, (size_t)x->buckets, sizeof *x->bucket);
    lm_free(x);
}
