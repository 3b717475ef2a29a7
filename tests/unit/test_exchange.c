/* SPDX-License-Identifier: Apache-2.0 */
/* Which elements ranks hold of a dimension that is split in portions, and the exchanges between all placements of a value. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "comm/threads.h"
#include "exchange_case.h"

enum { MOST = 5 };

/* ---- portions ---- */

/* Each element belongs to one rank; those of a rank are in order, and whole units. */
static void check_portions(const lm_portions *p, int64_t len, int ranks)
{
    int owner[64];
    const bool shared = lm_portions_shared(p, ranks);
    memset(owner, -1, sizeof owner);
    assert_true(lm_portions_fit(p, len));
    for (int r = 0; r < ranks; r++) {
        int64_t sum = 0, last = -1;
        lm_range x;
        for (int64_t k = 0; lm_portions_at(p, len, ranks, r, k, &x); k++)
            for (int64_t i = x.from; i < x.from + x.count; i++, sum++) {
                assert_true(i > last && i < len && (owner[i] < 0 || shared));
                owner[i] = r;
                last = i;
            }
        assert_int_equal(sum, lm_portions_count(p, len, ranks, r));
    }
    for (int64_t i = 0; i < len; i++)
        assert_true(owner[i] >= 0);
}

static void test_portions(void **state)
{
    static const lm_portions whole;
    const lm_portions packed = { .n = 2, .run = { { 1, 24, 6 }, { 2, 12, 6 } } };
    const lm_portions rows = { .n = 1, .run = { { 4, 12, 1 } } };
    const lm_portions bad[] = { { .n = 1, .run = { { 1, 40, 1 } } },
                                { .n = 1, .run = { { 1, 48, 5 } } },
                                { .n = 1, .run = { { 0, 48, 1 } } },
                                { .n = 2, .run = { { 1, 48, 1 }, { 1, 48, 1 } } },
                                { .ends = true } };
    const lm_portions ends = { .n = 1, .run = { { 2, 24, 2 } }, .ends = true };
    lm_range x;
    (void)state;
    for (int ranks = 1; ranks <= MOST; ranks++) {
        check_portions(&whole, 48, ranks);
        check_portions(&packed, 48, ranks);
        check_portions(&rows, 48, ranks);
        assert_true(lm_portions_same(&packed, &packed, 48, ranks));
        assert_int_equal(lm_portions_same(&packed, &whole, 48, ranks), ranks == 1);
    }
    /* four ranks: pairs of them hold a unit of the last two portions */
    for (int r = 0; r < 4; r++) {
        assert_true(lm_portions_at(&packed, 48, 4, r, 0, &x) && x.from == 6 * r && x.count == 6);
        assert_true(lm_portions_at(&packed, 48, 4, r, 1, &x) && x.from == 24 + r / 2 * 6);
        assert_int_equal(lm_portions_count(&packed, 48, 4, r), 18);
    }
    assert_true(lm_portions_shared(&packed, 4) && !lm_portions_shared(&packed, 2));
    assert_true(lm_portions_serve(&packed, 48, 4, true, true));
    assert_false(lm_portions_serve(&packed, 48, 3, false, true));
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        assert_false(lm_portions_fit(&bad[i], 48));
    assert_true(lm_portions_serve(&packed, 48, 2, true, false));
    assert_false(lm_portions_serve(&packed, 48, 4, false, false));
    assert_true(lm_portions_serve(&rows, 48, 5, false, false));
    assert_false(lm_portions_serve(&rows, 48, 5, true, false));
    assert_true(lm_portions_at(&packed, 48, 2, 1, 2,
                               &x)); /* of the third portion, [36, 48), the second half */
    assert_true(x.from == 42 && x.count == 6);
    assert_false(lm_portions_at(&packed, 48, 2, 1, 3, &x));
    /* from both ends of two pieces of twelve units: units 1 and 4 of six pairs, at 4 and 16, and 28 and 40 */
    static const int64_t at[] = { 4, 16, 28, 40 };
    check_portions(&ends, 48, 2);
    check_portions(&ends, 48, 3);
    for (int64_t k = 0; k < 4; k++)
        assert_true(lm_portions_at(&ends, 48, 3, 1, k, &x) && x.from == at[k] && x.count == 4);
    assert_false(lm_portions_at(&ends, 48, 3, 1, 4, &x));
    assert_true(lm_portions_serve(&ends, 48, 3, false, true));
    assert_false(lm_portions_serve(&ends, 48, 4, false, true));
    assert_true(lm_portions_same(&ends, &ends, 48, 2) && !lm_portions_same(&ends, &rows, 48, 2));
}

/* ---- exchanges ---- */

static lm_code exchanges(void *ctx, lm_comm *c, lm_err *e)
{
    lm_links links = lm_comm_links(c);
    lm_backend *b = NULL;
    exchange_rank r = { 0 };
    if (!lm_backend_cpu(LM_CPU_REF, NULL, &b, e) && !exchange_open(b, &links, &r, e))
        exchange_all(&r, ctx, e);
    if (r.b)
        exchange_close(&r);
    lm_backend_close(b);
    return e->code;
}

static void test_exchanges(void **state)
{
    int made = 0;
    (void)state;
    for (int ranks = 1; ranks <= MOST; ranks++) {
        lm_err e = { 0 };
        if (lm_threads_run(ranks, 60, exchanges, &made, &e))
            fail_msg("%d ranks: %s: %s", ranks, e.where, e.what);
    }
    assert_true(made > 100);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_portions),
        cmocka_unit_test(test_exchanges),
    };
    return cmocka_run_group_tests_name("exchange", tests, NULL, NULL);
}
