/* SPDX-License-Identifier: Apache-2.0 */
/* Packing: every item once, no window too full, the windows of a plain search for the best fit, and
 * few of them. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/rng.h"
#include "train/pack.h"

enum { SIZE = 64, MOST = 400 };

static lm_packing pack(const int64_t *length, int64_t n, int64_t size, bool join)
{
    lm_err e = { 0 };
    lm_packing p;
    assert_int_equal(lm_pack_make(length, n, size, join, &p, &e), LM_OK);
    return p;
}

static int64_t draw(int64_t *length, uint64_t seed)
{
    lm_rng r = lm_rng_make(seed, "lengths", 0);
    int64_t n = (int64_t)lm_rng_below(r, 0, MOST) + 1;
    for (int64_t i = 0; i < n; i++)
        length[i] = (int64_t)lm_rng_below(r, (uint64_t)i + 1, SIZE + 1);
    return n;
}

static int64_t room_of(const lm_packing *p, const int64_t *length, int64_t w)
{
    int64_t room = SIZE;
    for (int64_t k = p->start[w]; k < p->start[w + 1]; k++)
        room -= length[p->item[k]];
    return room;
}

static void each_item_once_and_no_window_too_full(void **state)
{
    int64_t length[MOST];
    (void)state;
    for (uint64_t seed = 0; seed < 200; seed++) {
        int64_t n = draw(length, seed), used = 0, waste = 0;
        bool seen[MOST] = { false };
        lm_packing p = pack(length, n, SIZE, true);
        for (int64_t w = 0; w < p.windows; w++) {
            assert_true(room_of(&p, length, w) >= 0);
            waste += room_of(&p, length, w);
            for (int64_t k = p.start[w]; k < p.start[w + 1]; k++) {
                assert_false(seen[p.item[k]]);
                seen[p.item[k]] = true;
                used += length[p.item[k]];
                if (k > p.start[w]) /* longest first */
                    assert_true(length[p.item[k]] <= length[p.item[k - 1]]);
            }
        }
        for (int64_t i = 0; i < n; i++)
            assert_int_equal(seen[i], length[i] > 0);
        assert_int_equal(used, p.used);
        assert_int_equal(used + waste, p.windows * SIZE);
        lm_pack_fini(&p);
    }
}

/* The definition: for each item by falling length, search all windows for the least room that
 * suffices, the earliest to have that room. */
static int64_t search(const int64_t *length, int64_t n, int64_t *where)
{
    int64_t room[MOST], since[MOST], windows = 0, clock = 0;
    for (int64_t len = SIZE; len > 0; len--)
        for (int64_t i = 0; i < n; i++) {
            int64_t best = -1;
            if (length[i] != len)
                continue;
            for (int64_t w = 0; w < windows; w++)
                if (room[w] >= len && (best < 0 || room[w] < room[best] ||
                                       (room[w] == room[best] && since[w] < since[best])))
                    best = w;
            if (best < 0)
                room[best = windows++] = SIZE;
            room[best] -= len;
            since[best] = clock++;
            where[i] = best;
        }
    return windows;
}

static void the_best_fit_is_taken(void **state)
{
    int64_t length[MOST], where[MOST];
    (void)state;
    for (uint64_t seed = 0; seed < 200; seed++) {
        int64_t n = draw(length, seed), windows = search(length, n, where);
        lm_packing p = pack(length, n, SIZE, true);
        assert_int_equal(p.windows, windows);
        for (int64_t w = 0; w < p.windows; w++)
            for (int64_t k = p.start[w]; k < p.start[w + 1]; k++)
                assert_int_equal(where[p.item[k]], w);
        lm_pack_fini(&p);
    }
}

static void apart_keeps_the_order(void **state)
{
    const int64_t length[] = { 3, 0, 64, 5 }, want[] = { 0, 2, 3 };
    (void)state;
    lm_packing p = pack(length, 4, SIZE, false);
    assert_int_equal(p.windows, 3);
    for (int64_t w = 0; w < 3; w++) {
        assert_int_equal(p.start[w], w);
        assert_int_equal(p.item[w], want[w]);
    }
    assert_int_equal(p.start[3], 3);
    lm_pack_fini(&p);
}

static void longer_items_are_refused(void **state)
{
    const int64_t length[] = { 3, SIZE + 1 };
    lm_err e = { 0 };
    lm_packing p;
    (void)state;
    assert_int_equal(lm_pack_make(length, 2, SIZE, true, &p, &e), LM_EUSAGE);
    assert_non_null(strstr(e.what, "65"));
    p = pack(NULL, 0, SIZE, true);
    assert_int_equal(p.windows, 0);
    lm_pack_fini(&p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_item_once_and_no_window_too_full),
        cmocka_unit_test(the_best_fit_is_taken),
        cmocka_unit_test(apart_keeps_the_order),
        cmocka_unit_test(longer_items_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
