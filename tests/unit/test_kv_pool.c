/* SPDX-License-Identifier: Apache-2.0 */
/* The page pool and the index of prefixes: 10,000 random schedules of prompts, forks, ends, pauses
 * and shared beginnings against a model in which every sequence has a private copy of all its rows.
 * The moves are performed on arrays of rows; after each operation every row that a sequence sees
 * through its pages equals its copy, and all counts equal a recount. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/mem.h"
#include "kv/pool.h"
#include "kv/prefix.h"

enum { T = 3, ROWS = 24, PAGES = ROWS / T, SEQS = 6, MOST = 32, SCHEDULES = 10000, STEPS = 200 };

typedef struct {
    bool live, pinned, shares; /* shares: its pages are added to the index */
    int rows, n;
    uint32_t id[ROWS], row[ROWS]; /* tokens, and the private copy of what was written */
    int32_t page[PAGES];
    lm_prefix_entry last;
    int known; /* pages in the index */
} sequence;

typedef struct {
    uint64_t random;
    lm_pool *pool;
    lm_prefix *prefix;
    sequence seq[SEQS];
    uint32_t content[LM_TIERS][MOST][T];
    bool closed; /* the disk */
    char error[400];
    int64_t hits, moves[LM_TIERS][LM_TIERS];
} world;

static uint32_t draw(world *w, uint32_t n)
{
    w->random ^= w->random << 13;
    w->random ^= w->random >> 7;
    w->random ^= w->random << 17;
    return (uint32_t)((w->random >> 33) % n);
}

static bool wrong(world *w, const char *what, int a, int b)
{
    if (!w->error[0])
        snprintf(w->error, sizeof w->error, "%s (%d, %d)", what, a, b);
    return false;
}

static void perform(world *w)
{
    const lm_kv_move *m;
    int64_t n = lm_pool_moves(w->pool, &m);
    for (; n--; m++) {
        if (w->closed && m->to == LM_TIER_DISK)
            wrong(w, "a page goes to a closed tier: page", m->page, 0);
        memcpy(w->content[m->to][m->target], w->content[m->from][m->source],
               sizeof w->content[0][0]);
        w->moves[m->from][m->to]++;
    }
}

static const uint32_t *rows_of(world *w, int32_t page)
{
    return w->content[lm_pool_tier(w->pool, page)][lm_pool_place(w->pool, page)];
}

/* What the model writes in a row depends on all tokens so far. */
static uint32_t value(const sequence *q, int row)
{
    return (row ? q->row[row - 1] * 2654435761u : 7) ^ (q->id[row] + 1) * 40503u;
}

static bool same_rows(world *w, const sequence *q)
{
    for (int i = 0; i < q->rows; i++)
        if (rows_of(w, q->page[i / T])[i % T] != q->row[i])
            return wrong(w, "a row differs from the private copy: sequence, row", (int)(q - w->seq),
                         i);
    return true;
}

/* Everything that must hold after each operation. */
static bool check(world *w)
{
    int refs[3 * MOST] = { 0 }, pins[3 * MOST] = { 0 };
    lm_err e = { 0 };
    if (lm_pool_check(w->pool, &e))
        return wrong(w, e.what, 0, 0);
    for (sequence *q = w->seq; q < w->seq + SEQS; q++) {
        if (!q->live)
            continue;
        if (!same_rows(w, q))
            return false;
        for (int i = 0; i < q->n; i++) {
            refs[q->page[i]]++;
            pins[q->page[i]] += q->pinned;
            if (q->pinned && lm_pool_tier(w->pool, q->page[i]) != LM_TIER_DEVICE)
                return wrong(w, "a pinned page is not on the device: sequence, page",
                             (int)(q - w->seq), i);
        }
    }
    for (int32_t i = 0; i < lm_pool_size(w->pool, LM_TIERS); i++)
        if (refs[i] != lm_pool_refs(w->pool, i) || pins[i] != lm_pool_pins(w->pool, i))
            return wrong(w, "references or pins differ from a recount: page", i, refs[i]);
    return true;
}

static void unpin_all(world *w, sequence *q)
{
    for (int i = q->n; q->pinned && i-- > 0;)
        lm_pool_unpin(w->pool, q->page[i]);
    q->pinned = false;
}

static void end(world *w, sequence *q)
{
    unpin_all(w, q);
    while (q->n > 0)
        lm_pool_drop(w->pool, q->page[--q->n]);
    q->live = false;
}

/* Pinning succeeds exactly if lm_pool_fits says so, and changes nothing if not. */
static bool pin_all(world *w, sequence *q)
{
    bool fits = lm_pool_fits(w->pool, q->page, q->n, 0);
    q->pinned = lm_pool_pin(w->pool, q->page, q->n);
    if (q->pinned != fits || (!fits && lm_pool_pending(w->pool)))
        wrong(w, "pinning differs from what fits: sequence", (int)(q - w->seq), fits);
    return q->pinned;
}

/* A sequence whose beginning is one of three texts, and its known pages. */
static void start(world *w, sequence *q)
{
    uint32_t text = draw(w, 3);
    int same = (int)draw(w, ROWS);
    *q = (sequence){ .live = true, .shares = draw(w, 4) > 0 };
    for (int i = 0; i < ROWS; i++)
        q->id[i] = i < same ? text * 100 + (uint32_t)i / 5 : draw(w, 4);
    q->last = LM_PREFIX_ROOT;
    q->n = (int)lm_prefix_find(w->prefix, q->id, draw(w, ROWS), q->page, &q->last);
    q->rows = q->n * T;
    q->known = q->n;
    w->hits += q->n;
    for (int i = 0; i < q->rows; i++)
        q->row[i] = value(q, i);
    if (!pin_all(w, q))
        end(w, q);
}

static void append(world *w, sequence *q)
{
    lm_pool_count c = lm_pool_counts(w->pool, LM_TIER_DEVICE);
    bool some = c.free || c.cached || (c.parked && lm_pool_below(w->pool));
    int32_t page;
    if (q->rows == ROWS)
        return;
    if (q->rows % T) {
        page = lm_pool_own(w->pool, q->page[q->n - 1]);
        if (page < 0)
            return;
        q->page[q->n - 1] = page;
    } else {
        page = lm_pool_take(w->pool);
        if ((page >= 0) != some)
            wrong(w, "a page was refused or given wrongly: free, cached", (int)c.free,
                  (int)c.cached);
        if (page < 0)
            return;
        q->page[q->n++] = page;
    }
    perform(w);
    if (lm_pool_refs(w->pool, page) != 1)
        wrong(w, "a page to write is shared: page", page, lm_pool_refs(w->pool, page));
    q->row[q->rows] = value(q, q->rows);
    w->content[LM_TIER_DEVICE][lm_pool_place(w->pool, page)][q->rows % T] = q->row[q->rows];
    q->rows++;
    if (q->rows % T == 0 && q->shares && q->known == q->n - 1 &&
        lm_prefix_add(w->prefix, q->id + q->known * T, page, &q->last))
        q->known++;
}

static void fork_of(world *w, const sequence *from, sequence *q)
{
    *q = *from;
    q->pinned = false;
    for (int i = 0; i < q->n; i++)
        lm_pool_ref(w->pool, q->page[i]);
    for (int i = q->rows; i < ROWS; i++)
        q->id[i] = draw(w, 4);
    if (from->pinned && (!pin_all(w, q) || lm_pool_pending(w->pool)))
        wrong(w, "pages of a running sequence are not on the device", 0, 0);
}

static void operate(world *w)
{
    sequence *q = &w->seq[draw(w, SEQS)], *r = &w->seq[draw(w, SEQS)];
    uint32_t what = draw(w, 40);
    if (!q->live)
        start(w, q);
    else if (what < 3)
        end(w, q);
    else if (what < 7)
        unpin_all(w, q);
    else if (what < 11 && !r->live)
        fork_of(w, q, r);
    else if (what == 11)
        lm_prefix_forget(w->prefix, (int32_t)draw(w, (uint32_t)lm_pool_size(w->pool, LM_TIERS)));
    else if (what == 13)
        lm_pool_tidy(w->pool, 1 + draw(w, 6));
    else if (what == 12 && !draw(w, 20)) {
        lm_pool_close(w->pool, LM_TIER_DISK);
        w->closed = true;
    } else if (!q->pinned)
        pin_all(w, q);
    else
        append(w, q);
    perform(w);
}

/* All sequences end and the index is emptied: every place is free. */
static bool finish(world *w)
{
    for (sequence *q = w->seq; q < w->seq + SEQS; q++)
        if (q->live)
            end(w, q);
    int32_t n = (int32_t)lm_pool_size(w->pool, LM_TIERS);
    for (int32_t i = 0; i < n; i++)
        lm_prefix_forget(w->prefix, i);
    lm_err e = { 0 };
    if (lm_pool_check(w->pool, &e) || lm_prefix_count(w->prefix))
        return wrong(w, "the index is not empty at the end", 0, 0);
    for (int t = 0; t < LM_TIERS; t++) {
        lm_pool_count c = lm_pool_counts(w->pool, (lm_tier)t);
        if (c.cached || c.parked ||
            (t < LM_TIER_DISK && c.free != lm_pool_size(w->pool, (lm_tier)t)))
            return wrong(w, "a page is not free at the end: tier", t, (int)c.free);
    }
    return true;
}

static bool schedule(world *w, uint64_t seed, int *step)
{
    lm_err e = { 0 };
    w->random = seed * 0x9e3779b97f4a7c15u + 1;
    w->error[0] = 0;
    w->closed = false;
    draw(w, 2);
    memset(w->seq, 0, sizeof w->seq);
    int64_t pages[LM_TIERS] = { 1 + draw(w, MOST), 0, 0 };
    pages[LM_TIER_HOST] = draw(w, 3) ? draw(w, MOST / 2) : 0;
    pages[LM_TIER_DISK] = draw(w, 3) ? draw(w, MOST) : 0;
    assert_int_equal(lm_pool_new(pages, &w->pool, &e), LM_OK);
    assert_int_equal(lm_prefix_new(w->pool, T, &w->prefix, &e), LM_OK);
    bool good = true;
    for (*step = 0; *step < STEPS && good; ++*step) {
        operate(w);
        good = !w->error[0] && check(w);
    }
    good = good && finish(w);
    lm_prefix_free(w->prefix);
    lm_pool_free(w->pool);
    return good;
}

static void random_schedules(void **state)
{
    (void)state;
    static world w;
    const char *one = getenv("LM_TEST_SEED");
    int step;
    for (uint64_t i = 0; i < (one ? 1 : SCHEDULES); i++) {
        uint64_t seed = one ? strtoull(one, NULL, 10) : i;
        if (!schedule(&w, seed, &step))
            fail_msg("LM_TEST_SEED=%llu, operation %d: %s", (unsigned long long)seed, step,
                     w.error);
    }
    print_message(
        "hits %lld, copies %lld, to host %lld, to disk %lld, host to disk %lld, back %lld\n",
        (long long)w.hits, (long long)w.moves[0][0], (long long)w.moves[0][1],
        (long long)w.moves[0][2], (long long)w.moves[1][2],
        (long long)(w.moves[1][0] + w.moves[2][0]));
    for (int a = 0; !one && a < LM_TIERS; a++) /* every kind of move that there is */
        for (int b = 0; b < LM_TIERS; b++)
            assert_int_equal(w.moves[a][b] > 0, a == 0 || b == 0 || (a == 1 && b == 2));
    assert_true(one || w.hits > 1000);
}

static lm_pool *pool_of(int64_t device, int64_t host, int64_t disk)
{
    lm_pool *p = NULL;
    lm_err e = { 0 };
    assert_int_equal(lm_pool_new((int64_t[]){ device, host, disk }, &p, &e), LM_OK);
    return p;
}

static void refused_sizes(void **state)
{
    (void)state;
    static const int64_t bad[][LM_TIERS] = {
        { 0, 1, 1 }, { -1, 0, 0 }, { 1, -1, 0 }, { 1, 0, (int64_t)1 << 62 }, { 1 << 29, 1 << 29, 1 }
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        lm_pool *p = NULL;
        lm_err e = { 0 };
        assert_int_equal(lm_pool_new(bad[i], &p, &e), LM_EUSAGE);
        assert_null(p);
    }
}

/* The cached page that was released first is replaced first, a page after those that follow it. */
static void oldest_first(void **state)
{
    (void)state;
    lm_pool *p = pool_of(4, 0, 0);
    lm_prefix *x = NULL;
    lm_err e = { 0 };
    assert_int_equal(lm_prefix_new(p, 1, &x, &e), LM_OK);
    lm_prefix_entry last = LM_PREFIX_ROOT;
    int32_t page[4], found[4];
    static const uint32_t ids[] = { 5, 6, 7, 8 };
    for (int i = 0; i < 4; i++) {
        page[i] = lm_pool_take(p);
        assert_true(lm_prefix_add(x, &ids[i], page[i], &last));
    }
    assert_int_equal(lm_pool_take(p), -1);
    for (int i = 4; i-- > 0;) {
        lm_pool_unpin(p, page[i]);
        lm_pool_drop(p, page[i]);
    }
    for (int i = 3; i > 0; i--) {
        assert_int_equal(lm_pool_take(p), page[i]);
        last = LM_PREFIX_ROOT;
        assert_int_equal(lm_prefix_find(x, ids, 4, found, &last), i);
        for (int j = i; j-- > 0;)
            lm_pool_drop(p, found[j]);
    }
    lm_prefix_free(x);
    lm_pool_free(p);
}

/* One page that is needed moves one page, not the whole sequence that waits. */
static void moves_only_what_is_needed(void **state)
{
    (void)state;
    lm_pool *p = pool_of(4, 4, 0);
    const lm_kv_move *m;
    int32_t page[4];
    for (int i = 0; i < 4; i++)
        page[i] = lm_pool_take(p);
    for (int i = 4; i-- > 0;)
        lm_pool_unpin(p, page[i]);
    assert_int_equal(lm_pool_moves(p, &m), 0);
    int32_t more = lm_pool_take(p);
    assert_int_equal(lm_pool_moves(p, &m), 1);
    assert_true(m->page == page[3] && m->from == LM_TIER_DEVICE && m->to == LM_TIER_HOST);
    assert_int_equal(lm_pool_moves(p, &m), 0);
    assert_false(lm_pool_fits(p, page, 4, 0));
    assert_false(lm_pool_pin(p, page, 4));
    assert_true(lm_pool_fits(p, page, 3, 0));
    assert_false(lm_pool_fits(p, page, 3, 1));
    lm_pool_unpin(p, more);
    lm_pool_drop(p, more);
    assert_true(lm_pool_pin(p, page, 4));
    assert_int_equal(lm_pool_moves(p, &m), 1);
    assert_true(m->page == page[3] && m->from == LM_TIER_HOST && m->to == LM_TIER_DEVICE);
    lm_pool_free(p);
}

/* A page that may be discarded never sends a page that is waited for to the disk. */
static void cached_pages_displace_none(void **state)
{
    (void)state;
    lm_pool *p = pool_of(1, 1, 1);
    const lm_kv_move *m;
    int32_t waits = lm_pool_take(p);
    lm_pool_unpin(p, waits);
    int32_t kept = lm_pool_take(p);
    lm_pool_keep(p, kept, true);
    lm_pool_hit(p, kept);
    lm_pool_unpin(p, kept);
    lm_pool_drop(p, kept);
    assert_int_equal(lm_pool_tier(p, waits), LM_TIER_HOST);
    assert_int_equal(lm_pool_moves(p, &m), 1);
    assert_true(lm_pool_take(p) >= 0);
    assert_int_equal(lm_pool_tier(p, waits), LM_TIER_HOST);
    assert_int_equal(lm_pool_tier(p, kept), LM_TIER_DISK);
    assert_int_equal(lm_pool_moves(p, &m), 1);
    lm_pool_free(p);
}

/* Kept pages 0.. of the device, free to be moved. */
static void keep_pages(lm_pool *p, int32_t *page, int n)
{
    for (int i = 0; i < n; i++) {
        page[i] = lm_pool_take(p);
        lm_pool_keep(p, page[i], true);
    }
    for (int i = 0; i < n; i++) {
        lm_pool_unpin(p, page[i]);
        lm_pool_drop(p, page[i]);
    }
}

/* A page that is needed discards a kept one that was never hit, and moves one that was only if there are no others;
 * idle time moves both, the disk's last. */
static void moves_what_was_hit(void **state)
{
    (void)state;
    const lm_kv_move *m;
    int32_t page[16];
    lm_pool *p = pool_of(2, 2, 0);
    keep_pages(p, page, 2);
    lm_pool_hit(p, page[0]);
    assert_int_equal(lm_pool_take(p), page[1]);
    assert_int_equal(lm_pool_moves(p, &m), 0);
    assert_true(lm_pool_take(p) >= 0);
    assert_int_equal(lm_pool_moves(p, &m), 1);
    assert_true(m->page == page[0] && m->to == LM_TIER_HOST);
    lm_pool_free(p);

    p = pool_of(16, 1, 8);
    keep_pages(p, page, 16);
    lm_pool_tidy(p, 3);
    assert_int_equal(lm_pool_moves(p, &m), 3);
    assert_true(m[0].page == page[0] && m[0].to == LM_TIER_HOST);
    assert_true(m[1].page == page[0] && m[1].to == LM_TIER_DISK && m[2].page == page[1]);
    lm_pool_tidy(p, 100); /* an eighth, and one */
    assert_int_equal(lm_pool_counts(p, LM_TIER_DEVICE).free, 3);
    assert_int_equal(lm_pool_counts(p, LM_TIER_DEVICE).cached, 13);
    assert_int_equal(lm_pool_counts(p, LM_TIER_DISK).cached, 2);
    assert_int_equal(lm_pool_used(p, LM_TIER_DEVICE), 13);
    assert_int_equal(lm_pool_used(p, LM_TIER_DISK), 2);
    lm_pool_close(p, LM_TIER_DISK);
    assert_int_equal(lm_pool_used(p, LM_TIER_DISK), 0);
    lm_pool_free(p);

    p = pool_of(4, 0, 0);
    keep_pages(p, page, 4);
    lm_pool_tidy(p, 100); /* nowhere to move them */
    assert_int_equal(lm_pool_counts(p, LM_TIER_DEVICE).cached, 4);
    lm_pool_free(p);
}

/* Half a thousand million places cost nothing until they are used; an index of many entries finds each. */
static void unused_places_cost_nothing(void **state)
{
    (void)state;
    enum { N = 5000, TOKENS = 64 };
    static uint32_t ids[N][TOKENS];
    size_t before = lm_rss_now();
    lm_pool *p = pool_of(N, 1000, (1 << 29));
    lm_prefix *x = NULL;
    lm_err e = { 0 };
    int32_t found[2];
    lm_prefix_entry last;
    assert_int_equal(lm_prefix_new(p, TOKENS, &x, &e), LM_OK);
    for (uint32_t i = 0; i < N; i++) {
        last = LM_PREFIX_ROOT;
        ids[i][3] = i;
        int32_t page = lm_pool_take(p);
        assert_int_equal(lm_pool_place(p, page), i);
        assert_true(lm_prefix_add(x, ids[i], page, &last));
    }
    for (uint32_t i = 0; i < N; i += 3)
        lm_prefix_forget(x, (int32_t)i);
    assert_int_equal(lm_prefix_count(x), N - (N + 2) / 3);
    for (uint32_t i = 0; i < N; i++) {
        last = LM_PREFIX_ROOT;
        assert_int_equal(lm_prefix_find(x, ids[i], TOKENS, found, &last), i % 3 > 0);
    }
    assert_true(lm_rss_now() < before + (16 << 20));
    assert_true(lm_pool_page_cost() + lm_prefix_page_cost(TOKENS) < 400);
    lm_prefix_free(x);
    lm_pool_free(p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(refused_sizes),
        cmocka_unit_test(oldest_first),
        cmocka_unit_test(moves_only_what_is_needed),
        cmocka_unit_test(cached_pages_displace_none),
        cmocka_unit_test(moves_what_was_hit),
        cmocka_unit_test(unused_places_cost_nothing),
        cmocka_unit_test(random_schedules),
    };
    return cmocka_run_group_tests_name("kv_pool", tests, NULL, NULL);
}
