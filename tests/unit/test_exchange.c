/* SPDX-License-Identifier: Apache-2.0 */
/* Which elements ranks hold of a dimension that is split in portions, and the exchanges between all placements of a value. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "base/mem.h"
#include "comm/threads.h"
#include "graph/links.h"
#include "graph/shard.h"

enum { ROWS = 12, COLS = 10, MOST = 5 };

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

static const lm_placement placements[] = {
    { .share = LM_REPLICATED },
    { .share = LM_PARTIAL },
    { .share = LM_SPLIT, .at = 0 },
    { .share = LM_SPLIT, .at = 1 },
    { .share = LM_SPLIT, .at = 0, .pieces = { .n = 2, .run = { { 1, 6, 1 }, { 1, 6, 1 } } } },
    { .share = LM_SPLIT, .at = 1, .pieces = { .n = 1, .run = { { 2, 5, 1 } } } },
};
enum { N_PLACEMENTS = sizeof placements / sizeof *placements };

static float number(int64_t i)
{
    return (float)(i * 7 % 31 - 9);
}

/* What a rank has; addends: of rank r a multiple of the number, and on rank 0 what is left. */
static int64_t fill(const lm_placement *p, int ranks, int rank, float *out)
{
    int64_t n = 0;
    for (int64_t i = 0; i < (int64_t)ROWS * COLS; i++) {
        int64_t at = p->at == 0 ? i / COLS : i % COLS, len = p->at == 0 ? ROWS : COLS;
        bool mine = p->share != LM_SPLIT;
        lm_range r;
        for (int64_t k = 0; !mine && lm_portions_at(&p->pieces, len, ranks, rank, k, &r); k++)
            mine = at >= r.from && at < r.from + r.count;
        float x = number(i), left = (float)(1 - ranks * (ranks - 1) / 2);
        if (mine)
            out[n++] = p->share != LM_PARTIAL ? x : x * (rank ? (float)rank : left);
    }
    return n;
}

typedef struct {
    const lm_placement *from, *to;
    int made;
} pair;

static lm_code exchange(void *ctx, lm_comm *c, lm_err *e)
{
    const pair *p = ctx;
    lm_mesh mesh = lm_mesh_alone;
    lm_links links = lm_comm_links(c), *by_axis[LM_AXES] = { [LM_AXIS_CP] = &links };
    lm_step step = { .links = by_axis };
    lm_tensor whole = lm_shape2(LM_DTYPE_F32, ROWS, COLS), in[LM_MAX_IN], out[LM_MAX_OUT];
    float x[ROWS * COLS], y[ROWS * COLS], want[ROWS * COLS], work[64 * ROWS * COLS];
    lm_graph *g = NULL;
    lm_vid v, to;
    int ranks = mesh.size[LM_AXIS_CP] = lm_comm_size(c);
    int rank = mesh.rank[LM_AXIS_CP] = lm_comm_rank(c);
    if (lm_graph_new(&g, e))
        return e->code;
    lm_tensor part = lm_placement_part(p->from, LM_AXIS_CP, &mesh, &whole);
    if (lm_graph_value(g, LM_ROLE_INPUT, part, NULL, &v, e) ||
        lm_exchange_append(g, LM_AXIS_CP, &mesh, v, &whole, p->from, p->to, &to, e)) {
        lm_graph_free(g);
        return e->code;
    }
    lm_call call = lm_node_call(g, &g->node[0], in, out);
    const lm_kernel *k = lm_cpu_kernel(g->node[0].op->name, LM_DTYPE_F32, LM_CPU_REF);
    fill(p->from, ranks, rank, x);
    int64_t n = fill(p->to, ranks, rank, want);
    in[0].data = x;
    out[0].data = y;
    call.step = &step;
    call.work = work;
    if (k->work && k->work(&call, 1) > sizeof work)
        lm_fail(e, LM_EBUG, "exchange", NULL, "wants more scratch than the test has");
    else
        k->run(&call);
    if (!e->code && links.failure.code)
        *e = links.failure;
    else if (!e->code && n != lm_tensor_count(&out[0]))
        lm_fail(e, LM_EBUG, "exchange", NULL, "has another number of elements");
    /* addends are others, but their sum is the value: see the pass */
    for (int64_t i = 0; !e->code && p->to->share != LM_PARTIAL && i < n; i++)
        if (y[i] != want[i])
            lm_fail(e, LM_EBUG, "exchange", NULL, "element %d is %g, not %g", (int)i, (double)y[i],
                    (double)want[i]);
    for (int64_t i = 0; !e->code && p->to->share == LM_PARTIAL && i < n; i++)
        if (y[i] != (rank ? 0 : number(i)))
            lm_fail(e, LM_EBUG, "exchange", NULL, "element %d is not added once", (int)i);
    lm_graph_free(g);
    return e->code;
}

static void test_exchanges(void **state)
{
    lm_tensor whole = lm_shape2(LM_DTYPE_F32, ROWS, COLS);
    int made = 0;
    (void)state;
    for (int ranks = 1; ranks <= MOST; ranks++)
        for (int i = 0; i < N_PLACEMENTS; i++)
            for (int j = 0; j < N_PLACEMENTS; j++) {
                pair p = { .from = &placements[i], .to = &placements[j] };
                lm_err e = { 0 };
                if (!lm_exchange_of(p.from, p.to, &whole, ranks))
                    continue;
                made++;
                if (lm_threads_run(ranks, 60, exchange, &p, &e))
                    fail_msg("%d ranks, %d to %d: %s: %s", ranks, i, j, e.where, e.what);
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
