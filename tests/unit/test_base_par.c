/* SPDX-License-Identifier: Apache-2.0 */
/* test_base_par.c -- loops and pipelines with 1, 2, 4 and 7 threads. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/par.h"

static const int sizes[] = { 1, 2, 4, 7 };
enum { SIZES = sizeof sizes / sizeof *sizes };

static lm_par *pool(int threads)
{
    lm_par *p = NULL;
    lm_err e = { 0 };

    assert_int_equal(lm_par_new(&p, threads, &e), LM_OK);
    return p;
}

typedef struct {
    unsigned char *hit;
    int64_t n, grain;
    int threads;
    atomic_int bad;
    atomic_llong calls;
} cover;

static void touch(void *ctx, int64_t begin, int64_t end, int worker)
{
    cover *c = ctx;

    /* no assert here: cmocka's asserts longjmp, which is valid in the main thread only */
    if (begin % c->grain || end <= begin || end > c->n || worker < 0 || worker >= c->threads ||
        (end - begin != c->grain && end != c->n))
        c->bad++;
    for (int64_t i = begin; i < end; i++)
        c->hit[i]++;
    c->calls++;
}

static void every_index_once(void **state)
{
    static const int64_t counts[] = { 0, 1, 2, 63, 64, 65, 1000, 12345 },
                         grains[] = { 1, 3, 64, 99999 };

    (void)state;
    for (int s = 0; s < SIZES; s++) {
        lm_par *p = pool(sizes[s]);

        assert_int_equal(lm_par_threads(p), sizes[s]);
        for (int i = 0; i < 8; i++) {
            for (int g = 0; g < 4; g++) {
                cover c = { calloc(12345, 1), counts[i], grains[g], sizes[s], 0, 0 };

                lm_par_for(p, c.n, c.grain, touch, &c);
                assert_int_equal(c.bad, 0);
                assert_true(c.calls == (c.n + c.grain - 1) / c.grain);
                for (int64_t k = 0; k < 12345; k++)
                    assert_int_equal(c.hit[k], k < c.n);
                free(c.hit);
            }
        }
        lm_par_free(p);
    }
}

static void no_pool_is_one_thread(void **state)
{
    cover c = { calloc(100, 1), 100, 7, 1, 0, 0 };

    (void)state;
    assert_int_equal(lm_par_threads(NULL), 1);
    lm_par_for(NULL, 100, 7, touch, &c);
    assert_int_equal(c.bad, 0);
    assert_int_equal(c.calls, 15);
    lm_par_free(NULL);
    free(c.hit);
}

static void add(void *ctx, int64_t begin, int64_t end, int worker)
{
    (void)worker;
    atomic_fetch_add((atomic_llong *)ctx, end - begin);
}

/* More chunks than are claimed singly. */
static void very_many_chunks(void **state)
{
    lm_par *p = pool(2);
    atomic_llong sum = 0;

    (void)state;
    lm_par_for(p, 3000001, 1, add, &sum);
    assert_int_equal(sum, 3000001);
    lm_par_free(p);
}

/* Many loops of all kinds: a late worker must neither miss a job nor run one twice. */
static void many_jobs(void **state)
{
    (void)state;
    for (int s = 0; s < SIZES; s++) {
        lm_par *p = pool(sizes[s]);
        atomic_llong sum = 0;
        long long want = 0;

        for (int i = 0; i < 2000; i++) {
            lm_par_for(p, 1 + i % 9, 1, add, &sum);
            want += 1 + i % 9;
            if (i % 3 == 0) {
                lm_par_each(p, add, &sum);
                want += sizes[s];
            }
        }
        assert_int_equal(sum, want);
        lm_par_free(p);
    }
}

static void nest(void *ctx, int64_t begin, int64_t end, int worker)
{
    (void)begin, (void)end, (void)worker;
    lm_par *p = ((void **)ctx)[0];

    lm_par_for(p, 10, 2, add, ((void **)ctx)[1]);
}

static void nested_runs_in_its_caller(void **state)
{
    lm_par *p = pool(4);
    atomic_llong sum = 0;
    void *ctx[] = { p, &sum };

    (void)state;
    lm_par_for(p, 8, 1, nest, ctx);
    assert_int_equal(sum, 80);
    lm_par_free(p);
}

typedef struct {
    lm_par *pool, *other;
    int outer; /* the worker that calls */
    atomic_int *bad;
} inside;

/* In a loop of the same pool its worker goes on; in one of another it is the only worker. */
static void keep_number(void *ctx, int64_t begin, int64_t end, int worker)
{
    const inside *at = ctx;

    (void)begin, (void)end;
    *at->bad += worker != at->outer;
}

static void call_others(void *ctx, int64_t begin, int64_t end, int worker)
{
    const inside *at = ctx;
    inside same = { .outer = worker, .bad = at->bad }, alone = { .outer = 0, .bad = at->bad };

    (void)begin, (void)end;
    lm_par_for(at->pool, 10, 2, keep_number, &same);
    lm_par_for(NULL, 10, 2, keep_number, &alone);
    lm_par_for(at->other, 10, 2, keep_number, &alone);
}

static void nested_workers_have_scratch(void **state)
{
    atomic_int bad = 0;
    inside at = { .pool = pool(4), .other = pool(2), .bad = &bad };

    (void)state;
    lm_par_each(at.pool, call_others, &at); /* every worker, so that most have other numbers */
    lm_par_for(at.pool, 64, 1, call_others, &at);
    assert_int_equal(bad, 0);
    lm_par_free(at.pool);
    lm_par_free(at.other);
}

typedef struct {
    int workers;
    atomic_int here, bad, seen;
} meeting;

/* Returns when all workers have called it, or after half a minute. */
static void meet(void *ctx, int64_t begin, int64_t end, int worker)
{
    meeting *m = ctx;
    double until = lm_now() + 30;

    if (end != begin + 1 || begin != worker)
        m->bad++;
    atomic_fetch_or(&m->seen, 1 << worker);
    m->here++;
    while (m->here < m->workers && lm_now() < until)
        usleep(20);
    if (m->here < m->workers)
        m->bad++;
}

static void each_worker_at_the_same_time(void **state)
{
    (void)state;
    for (int s = 0; s < SIZES; s++) {
        lm_par *p = pool(sizes[s]);

        for (int i = 0; i < 100; i++) {
            meeting m = { .workers = sizes[s] };

            lm_par_each(p, meet, &m);
            assert_int_equal(m.bad, 0);
            assert_int_equal(m.here, sizes[s]);
            assert_int_equal(m.seen, (1 << sizes[s]) - 1);
        }
        lm_par_free(p);
    }
}

typedef struct {
    lm_par *p;
    atomic_llong sum;
} shared;

static void *use_pool(void *arg)
{
    shared *s = arg;

    for (int i = 0; i < 500; i++)
        lm_par_for(s->p, 20, 3, add, &s->sum);
    return NULL;
}

static void two_callers(void **state)
{
    shared s = { .p = pool(2) };
    pthread_t other;

    (void)state;
    pthread_create(&other, NULL, use_pool, &s);
    use_pool(&s);
    pthread_join(other, NULL);
    assert_int_equal(s.sum, 20000);
    lm_par_free(s.p);
}

/* --- pipeline --- */

typedef struct {
    int next, total, written, in_flight, most;
    int fail_read, fail_work, fail_write; /* at this item, -1 never */
    atomic_int made, gone;
    pthread_mutex_t lock;
} line;

typedef struct {
    int serial, worked;
} thing;

static lm_code read_thing(void *ctx, void **item, lm_err *e)
{
    line *l = ctx;
    thing *t;

    if (l->next == l->total)
        return *item = NULL, LM_OK;
    if (l->next == l->fail_read)
        return lm_fail(e, LM_EFORMAT, "read", NULL, "item %d", l->next);
    t = calloc(1, sizeof *t);
    t->serial = l->next++;
    l->made++;
    pthread_mutex_lock(&l->lock);
    l->most = ++l->in_flight > l->most ? l->in_flight : l->most;
    pthread_mutex_unlock(&l->lock);
    *item = t;
    return LM_OK;
}

static lm_code work_thing(void *ctx, void *item, int worker, lm_err *e)
{
    line *l = ctx;
    thing *t = item;

    (void)worker;
    for (int i = 0; i < t->serial % 5; i++)
        sched_yield();
    t->worked++;
    if (t->serial == l->fail_work)
        return lm_fail(e, LM_ENUMERIC, "work", NULL, "item %d", t->serial);
    return LM_OK;
}

static lm_code write_thing(void *ctx, void *item, lm_err *e)
{
    line *l = ctx;
    thing *t = item;
    int serial = t->serial, worked = t->worked;

    free(t);
    l->gone++;
    pthread_mutex_lock(&l->lock);
    l->in_flight--;
    pthread_mutex_unlock(&l->lock);
    if (serial != l->written++ || worked != 1)
        return lm_fail(e, LM_EBUG, "write", NULL, "out of order");
    if (serial == l->fail_write)
        return lm_fail(e, LM_EIO, "write", NULL, "item %d", serial);
    return LM_OK;
}

static void drop_thing(void *ctx, void *item)
{
    ((line *)ctx)->gone++;
    free(item);
}

static lm_code run_line(int threads, int depth, line *l, lm_err *e)
{
    lm_par *p = threads ? pool(threads) : NULL;
    lm_pipe_ops ops = { read_thing, work_thing, write_thing, drop_thing, l, depth };
    lm_code rc;

    pthread_mutex_init(&l->lock, NULL);
    rc = lm_par_pipe(p, &ops, e);
    lm_par_free(p);
    assert_int_equal(l->made, l->gone);
    return rc;
}

static void pipe_keeps_order(void **state)
{
    (void)state;
    for (int s = 0; s <= SIZES; s++) {
        for (int depth = 0; depth <= 8; depth += 4) {
            line l = { .total = 500, .fail_read = -1, .fail_work = -1, .fail_write = -1 };
            lm_err e = { 0 };

            assert_int_equal(run_line(s ? sizes[s - 1] : 0, depth, &l, &e), LM_OK);
            assert_int_equal(l.written, 500);
            assert_true(l.most <= (depth ? depth : 1));
        }
    }
}

static void pipe_of_nothing(void **state)
{
    line l = { .fail_read = -1, .fail_work = -1, .fail_write = -1 };
    lm_err e = { 0 };

    (void)state;
    assert_int_equal(run_line(2, 4, &l, &e), LM_OK);
    assert_int_equal(l.written, 0);
}

static void pipe_stops_at_failures(void **state)
{
    (void)state;
    for (int s = 0; s < SIZES; s++) {
        line a = { .total = 100, .fail_read = 50, .fail_work = -1, .fail_write = -1 };
        line b = { .total = 100, .fail_read = -1, .fail_work = 50, .fail_write = -1 };
        line c = { .total = 100, .fail_read = -1, .fail_work = -1, .fail_write = 50 };
        lm_err e = { 0 }, f = { 0 }, g = { 0 };

        assert_int_equal(run_line(sizes[s], 4, &a, &e), LM_EFORMAT);
        assert_string_equal(e.what, "item 50");
        assert_int_equal(run_line(sizes[s], 4, &b, &f), LM_ENUMERIC);
        assert_string_equal(f.where, "work");
        assert_true(b.written <= 50);
        assert_int_equal(run_line(sizes[s], 4, &c, &g), LM_EIO);
        assert_int_equal(c.written, 51);
    }
}

static void odd_sizes_are_refused(void **state)
{
    lm_par *p;
    lm_err e = { 0 }, f = { 0 };

    (void)state;
    assert_int_equal(lm_par_new(&p, -1, &e), LM_EUSAGE);
    assert_int_equal(lm_par_new(&p, 100000, &f), LM_EUSAGE);
    assert_true(lm_cpu_count() >= 1);
    p = pool(0);
    assert_int_equal(lm_par_threads(p), lm_cpu_count());
    lm_par_free(p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_index_once),
        cmocka_unit_test(no_pool_is_one_thread),
        cmocka_unit_test(very_many_chunks),
        cmocka_unit_test(many_jobs),
        cmocka_unit_test(nested_runs_in_its_caller),
        cmocka_unit_test(nested_workers_have_scratch),
        cmocka_unit_test(each_worker_at_the_same_time),
        cmocka_unit_test(two_callers),
        cmocka_unit_test(pipe_keeps_order),
        cmocka_unit_test(pipe_of_nothing),
        cmocka_unit_test(pipe_stops_at_failures),
        cmocka_unit_test(odd_sizes_are_refused),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
