/* SPDX-License-Identifier: Apache-2.0 */
/* The index of prefixes against a list of all known beginnings, with a hash of two values, so that
 * nearly all entries collide. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/hash.h"

static uint64_t weak_hash(const void *data, size_t len, uint64_t seed)
{
    return ((const uint8_t *)data)[len - 4] ^ (seed & 1);
}
#define lm_hash64 weak_hash
#include "../../lib/kv/prefix.c"
#undef lm_hash64

enum { T = 2, DEPTH = 4, PAGES = 14, SCHEDULES = 2000, STEPS = 100 };

/* All known beginnings; entry i of depth n has ids[0..n*T). */
typedef struct {
    int depth;
    uint32_t ids[DEPTH * T];
    lm_prefix_entry entry;
} known;

typedef struct {
    known list[PAGES];
    int n;
    uint64_t random;
    lm_pool *pool;
    lm_prefix *prefix;
} world;

static uint32_t draw(world *w, uint32_t n)
{
    w->random = w->random * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((w->random >> 33) % n);
}

static int find(const world *w, const uint32_t *ids, int depth)
{
    for (int i = 0; i < w->n; i++)
        if (w->list[i].depth == depth &&
            !memcmp(w->list[i].ids, ids, sizeof *ids * T * (size_t)depth))
            return i;
    return -1;
}

/* The page's entry and those that begin with it. */
static void forget(world *w, int32_t page)
{
    known gone = { 0 };
    for (int i = 0; i < w->n; i++)
        if (w->list[i].entry.page == page)
            gone = w->list[i];
    for (int i = w->n; gone.depth && i-- > 0;)
        if (w->list[i].depth >= gone.depth &&
            !memcmp(w->list[i].ids, gone.ids, sizeof *gone.ids * T * (size_t)gone.depth))
            w->list[i] = w->list[--w->n];
}

static void draw_ids(world *w, uint32_t ids[DEPTH * T])
{
    for (int i = 0; i < DEPTH * T; i++)
        ids[i] = draw(w, 8) ? 0 : 1 + draw(w, 2);
}

static void check_find(world *w)
{
    uint32_t ids[DEPTH * T];
    int32_t page[DEPTH];
    lm_prefix_entry last = LM_PREFIX_ROOT;
    int rows = (int)draw(w, DEPTH * T + 1), k = 0;
    draw_ids(w, ids);
    int64_t n = lm_prefix_find(w->prefix, ids, rows, page, &last);
    for (; (k + 1) * T <= rows && find(w, ids, k + 1) >= 0; k++) {
        assert_true(k < n);
        assert_int_equal(page[k], w->list[find(w, ids, k + 1)].entry.page);
    }
    assert_int_equal(n, k);
    assert_int_equal(last.page, k ? page[k - 1] : -1);
    while (k-- > 0)
        lm_pool_drop(w->pool, page[k]);
}

/* After a known beginning, or one that was known once. */
static void add(world *w, lm_prefix_entry *old)
{
    uint32_t ids[DEPTH * T];
    draw_ids(w, ids);
    int depth = (int)draw(w, DEPTH), at = depth ? find(w, ids, depth) : -1;
    if (depth && at < 0)
        return;
    lm_prefix_entry last = depth ? w->list[at].entry : LM_PREFIX_ROOT;
    int32_t page = lm_pool_take(w->pool);
    assert_true(page >= 0);
    forget(w, page);
    bool stale = depth && find(w, ids, depth) < 0;
    bool added = lm_prefix_add(w->prefix, ids + depth * T, page, &last);
    assert_int_equal(added, !stale);
    at = find(w, ids, depth + 1);
    if (!stale && at >= 0) {
        assert_int_equal(last.page, w->list[at].entry.page);
    } else if (!stale) {
        known *k = &w->list[w->n++];
        *k = (known){ .depth = depth + 1, .entry = last };
        memcpy(k->ids, ids, sizeof *ids * T * (size_t)(depth + 1));
        assert_int_equal(last.page, page);
        if (!draw(w, 4))
            *old = last;
    }
    lm_pool_unpin(w->pool, page);
    lm_pool_drop(w->pool, page);
}

/* An entry that is gone is no parent, also if its page has another entry now. */
static void check_old(world *w, lm_prefix_entry *old)
{
    for (int i = 0; i < w->n; i++)
        if (w->list[i].entry.page == old->page && w->list[i].entry.serial == old->serial)
            return;
    uint32_t ids[T] = { 9, 9 };
    if (old->serial)
        assert_false(lm_prefix_add(w->prefix, ids, 0, old));
}

static void random_entries(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < SCHEDULES; seed++) {
        world w = { .random = seed };
        lm_prefix_entry old = { 0 };
        lm_err e = { 0 };
        assert_int_equal(lm_pool_new((int64_t[]){ PAGES, 0, 0 }, &w.pool, &e), LM_OK);
        assert_int_equal(lm_prefix_new(w.pool, T, &w.prefix, &e), LM_OK);
        for (int i = 0; i < STEPS; i++) {
            uint32_t what = draw(&w, 16);
            if (what < 10) {
                add(&w, &old);
            } else if (what == 10) {
                int32_t page = (int32_t)draw(&w, PAGES);
                lm_prefix_forget(w.prefix, page);
                forget(&w, page);
            } else {
                check_find(&w);
            }
            check_old(&w, &old);
            assert_int_equal(lm_prefix_count(w.prefix), w.n);
            lm_pool_count c = lm_pool_counts(w.pool, LM_TIER_DEVICE);
            assert_int_equal(c.cached, w.n);
            assert_int_equal(c.free, PAGES - w.n);
        }
        lm_prefix_free(w.prefix);
        lm_pool_free(w.pool);
    }
}

/* Groups have entries of their own for the same tokens. */
static void groups_share_no_pages(void **state)
{
    enum { GROUPS = 3 };
    const uint32_t ids[2 * T] = { 7 };
    lm_pool *p = NULL;
    lm_prefix *x = NULL;
    lm_err e = { 0 };
    int32_t page[GROUPS][2], found[2];
    lm_prefix_entry last;
    (void)state;
    assert_int_equal(lm_pool_new((int64_t[]){ 2 * GROUPS, 0, 0 }, &p, &e), LM_OK);
    assert_int_equal(lm_prefix_new(p, T, &x, &e), LM_OK);
    for (int g = 0; g < GROUPS; g++) {
        last = lm_prefix_root(g);
        assert_int_equal(lm_prefix_find(x, ids, 2L * T, found, &last), 0);
        for (int i = 0; i < 2; i++) {
            page[g][i] = lm_pool_take(p);
            assert_true(lm_prefix_add(x, ids + i * T, page[g][i], &last));
            assert_int_equal(last.page, page[g][i]);
        }
    }
    for (int pass = 0; pass < 2; pass++) /* the second: without the first group */
        for (int g = pass; g < GROUPS; g++) {
            last = lm_prefix_root(g);
            assert_int_equal(lm_prefix_find(x, ids, 2L * T, found, &last), 2);
            assert_memory_equal(found, page[g], sizeof found);
            for (int i = 0; i < 2; i++)
                lm_pool_drop(p, found[i]);
            if (!pass && !g)
                lm_prefix_forget(x, page[0][0]);
            last = lm_prefix_root(0);
            assert_int_equal(lm_prefix_find(x, ids, 2L * T, found, &last), 0);
        }
    assert_int_equal(lm_prefix_count(x), 2 * (GROUPS - 1));
    lm_prefix_free(x);
    lm_pool_free(p);
}

static void refused_pages(void **state)
{
    (void)state;
    lm_pool *p = NULL;
    lm_prefix *x = NULL;
    lm_err e = { 0 };
    assert_int_equal(lm_pool_new((int64_t[]){ 4, 0, 0 }, &p, &e), LM_OK);
    assert_int_equal(lm_prefix_new(p, 0, &x, &e), LM_EUSAGE);
    e = (lm_err){ 0 };
    assert_int_equal(lm_prefix_new(p, INT64_MAX / 2, &x, &e), LM_EUSAGE);
    assert_null(x);
    lm_pool_free(p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(refused_pages),
        cmocka_unit_test(random_entries),
        cmocka_unit_test(groups_share_no_pages),
    };
    return cmocka_run_group_tests_name("kv_prefix", tests, NULL, NULL);
}
