/* SPDX-License-Identifier: Apache-2.0 */
/* test_comm_gather.c -- gathers in a queue: results, order, growth, failures, and what is seen of their times. */
#include "comm/gather.h"

#include "comm_case.h"

enum { GATHERS = 70, WIDTH = 40 };

/* Bytes of rank r in gather k; none of some. */
static size_t bytes_of(int r, int k)
{
    return (size_t)((r * 5 + k * 3) % WIDTH);
}

static unsigned char byte_of(int r, int k, size_t i)
{
    return (unsigned char)(r * 31 + k * 7 + (int)i);
}

/* What a rank gives to gathers, and gets of them. */
typedef struct {
    unsigned char in[GATHERS][WIDTH], out[GATHERS][MOST * WIDTH];
} memory;

static lm_code begin(lm_gatherer *g, lm_comm *c, memory *m, int k, lm_err *e)
{
    size_t bytes[MOST];
    for (int r = 0; r < lm_comm_size(c); r++)
        bytes[r] = bytes_of(r, k);
    for (size_t i = 0; i < bytes[lm_comm_rank(c)]; i++)
        m->in[k][i] = byte_of(lm_comm_rank(c), k, i);
    return lm_gatherer_begin(g, m->in[k], m->out[k], bytes,
                             e); /* it keeps no pointer to the sizes */
}

static bool is_right(const lm_comm *c, const memory *m, int k)
{
    size_t at = 0;
    bool same = true;
    for (int r = 0; r < lm_comm_size(c); r++)
        for (size_t i = 0; i < bytes_of(r, k); i++)
            same &= m->out[k][at++] == byte_of(r, k, i);
    return same;
}

typedef struct {
    int n;
    double last;
    bool ordered;
} watcher;

static void see(void *ctx, double began, double ended, double waiting)
{
    watcher *w = ctx;
    w->ordered &= began >= w->last && ended >= began && waiting > 0;
    w->last = ended;
    w->n++;
}

/* Many before the first is waited for, then as in a run: a few ahead. */
static lm_code queue(void *ctx, lm_comm *c_, lm_err *e)
{
    memory *m = (memory *)ctx + lm_comm_rank(c_);
    watcher w = { .ordered = true };
    lm_gatherer *g;
    if (lm_gatherer_new(c_, &g, e))
        return e->code;
    lm_gatherer_watch(g, see, &w);
    int begun = 0, ended = 0;
    while (begun < GATHERS / 2)
        if (begin(g, c_, m, begun++, e))
            return e->code;
    for (; ended < GATHERS; ended++) {
        EXPECT(lm_gatherer_busy(g));
        if (lm_gatherer_end(g, e))
            return e->code;
        EXPECT(is_right(c_, m, ended));
        if (begun < GATHERS && begin(g, c_, m, begun++, e))
            return e->code;
    }
    EXPECT(!lm_gatherer_busy(g));
    EXPECT(w.n == GATHERS && w.ordered);
    EXPECT(lm_gatherer_hidden(g) >= 0);
    lm_err over = { 0 };
    EXPECT(lm_gatherer_end(g, &over) == LM_EBUG);
    lm_gatherer_free(g);
    return LM_OK;
}

/* Settled ones are complete, and are still to be waited for. */
static lm_code settle(void *ctx, lm_comm *c_, lm_err *e)
{
    memory *m = (memory *)ctx + lm_comm_rank(c_);
    lm_gatherer *g;
    if (lm_gatherer_new(c_, &g, e))
        return e->code;
    for (int k = 0; k < 20; k++)
        if (begin(g, c_, m, k, e))
            return e->code;
    lm_gatherer_settle(g);
    for (int k = 0; k < 20; k++)
        EXPECT(is_right(c_, m, k));
    for (int k = 0; k < 20; k++) {
        EXPECT(lm_gatherer_busy(g));
        if (lm_gatherer_end(g, e))
            return e->code;
    }
    EXPECT(!lm_gatherer_busy(g));
    lm_gatherer_free(g);
    return LM_OK;
}

/* Rank 0 ends all; the others wait for what never comes, settle, and get its error of each that has begun. */
static lm_code ends(void *ctx, lm_comm *c_, lm_err *e)
{
    memory *m = (memory *)ctx + lm_comm_rank(c_);
    lm_gatherer *g;
    if (lm_comm_rank(c_) == 0)
        return lm_fail(e, LM_EIO, "disk", NULL, "is full");
    if (lm_gatherer_new(c_, &g, e))
        return e->code;
    for (int k = 0; k < 3; k++)
        if (begin(g, c_, m, k, e))
            return e->code;
    lm_gatherer_settle(g);
    for (int k = 0; k < 3; k++) {
        lm_err why = { 0 };
        EXPECT(lm_gatherer_busy(g));
        EXPECT(lm_gatherer_end(g, &why) == LM_EIO);
        *e = why;
    }
    EXPECT(!lm_gatherer_busy(g));
    lm_gatherer_free(g);
    return e->code;
}

static void run(int ranks, lm_rank_fn *fn, lm_err *e)
{
    memory *m = calloc((size_t)ranks, sizeof *m);
    assert_non_null(m);
    lm_threads_run(ranks, 0, fn, m, e);
    free(m);
}

static void test_queue(void **state)
{
    (void)state;
    for (int ranks = 1; ranks <= 4; ranks++) {
        lm_err e = { 0 };
        run(ranks, queue, &e);
        assert_string_equal(e.what, "");
    }
}

static void test_settle(void **state)
{
    lm_err e = { 0 };
    (void)state;
    run(3, settle, &e);
    assert_string_equal(e.what, "");
}

static void test_failure(void **state)
{
    lm_err e = { 0 };
    (void)state;
    run(3, ends, &e);
    assert_int_equal(e.code, LM_EIO);
    assert_string_equal(e.what, "is full");
    assert_non_null(strstr(e.where, "rank 0 of 3"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_queue),
        cmocka_unit_test(test_settle),
        cmocka_unit_test(test_failure),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
