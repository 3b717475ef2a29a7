/* SPDX-License-Identifier: Apache-2.0 */
/* test_comm_messages.c -- collective calls out of messages, over a wire between threads of this process: the checks of every
 * transport, messages longer than the wire carries at once, reductions in less scratch than their operands, a wire that fails, and
 * one that loses messages. */
#include <pthread.h>
#include <stdatomic.h>

#include "base/clock.h"
#include "comm/messages.h"
#include "tests/unit/comm_case.h"

/* ---- a wire ---- */

typedef struct parcel {
    struct parcel *next, *before; /* before: made before */
    int from, to, tag;
    size_t bytes;
    bool taken;
    char *data; /* until it is taken */
} parcel;

typedef struct {
    pthread_mutex_t lock;
    parcel *first, **last;
    parcel *made;       /* all, freed at the end */
    atomic_int cut;     /* ranks below it and others do not reach each other; 0: all do */
    atomic_int failing; /* this rank's calls fail; -1: none */
    atomic_int began;   /* ranks that have their group */
    atomic_int closed;  /* ends */
    size_t most;
} net;

typedef struct request {
    struct request *next;   /* posted later */
    struct request *before; /* made before, by this rank */
    bool send;
    parcel *sent;
    int from, tag;
    void *data;
    size_t bytes;
} request;

typedef struct {
    lm_wire wire;
    net *net;
    request *posted; /* receptions, the earliest first */
    request *made;   /* all, also those that a failed rank has left; freed at the end */
    bool stopped;
} end;

static lm_code wire_state(const end *w, lm_err *e)
{
    return w->stopped || w->net->failing == w->wire.rank
               ? lm_fail(e, LM_EIO, "wire", NULL, "is broken")
               : LM_OK;
}

static request *new_request(end *w, request r, uintptr_t *out)
{
    request *p = malloc(sizeof *p);

    assert_non_null(p);
    *p = r;
    p->before = w->made;
    w->made = p;
    *out = (uintptr_t)p;
    return p;
}

static lm_code wire_send(lm_wire *w, int to, int tag, const void *data, size_t bytes, bool taken,
                         uintptr_t *out, lm_err *e)
{
    net *n = ((end *)w)->net;
    parcel *p;

    if (wire_state((end *)w, e))
        return e->code;
    if (bytes > w->most)
        return lm_fail(e, LM_EIO, "wire", NULL, "%zu bytes are too many", bytes);
    p = malloc(sizeof *p);
    assert_non_null(p);
    *p = (parcel){ .from = w->rank, .to = to, .tag = tag, .bytes = bytes };
    p->data = malloc(bytes + 1);
    assert_non_null(p->data);
    if (bytes)
        memcpy(p->data, data, bytes);
    pthread_mutex_lock(&n->lock);
    new_request((end *)w, (request){ .send = true, .sent = taken ? p : NULL }, out);
    *n->last = p;
    n->last = &p->next;
    p->before = n->made;
    n->made = p;
    pthread_mutex_unlock(&n->lock);
    return LM_OK;
}

static lm_code wire_recv(lm_wire *w, int from, int tag, void *data, size_t bytes, uintptr_t *out,
                         lm_err *e)
{
    net *n = ((end *)w)->net;
    request **last = &((end *)w)->posted;

    if (wire_state((end *)w, e))
        return e->code;
    pthread_mutex_lock(&n->lock); /* threads of a rank may receive, too */
    while (*last)
        last = &(*last)->next;
    *last = new_request((end *)w,
                        (request){ .from = from, .tag = tag, .data = data, .bytes = bytes }, out);
    pthread_mutex_unlock(&n->lock);
    return LM_OK;
}

/* Of two receptions that a message fits, the earlier one gets it. */
static bool is_first(const end *w, const request *r)
{
    const request *q = w->posted;

    while (q != r && (q->from != r->from || q->tag != r->tag))
        q = q->next;
    return q == r;
}

static void unpost(end *w, const request *r)
{
    request **at = &w->posted;

    while (*at != r)
        at = &(*at)->next;
    *at = r->next;
}

/* The first that fits, out of the list; with the lock held. */
static parcel *take(net *n, int from, int to, int tag)
{
    for (parcel **at = &n->first; *at; at = &(*at)->next) {
        parcel *p = *at;

        if (p->to != to || p->tag != tag || (from >= 0 && p->from != from) ||
            (n->cut && (p->from < n->cut) != (p->to < n->cut)))
            continue;
        *at = p->next;
        if (!*at)
            n->last = at;
        return p;
    }
    return NULL;
}

/* Set *got if the request is done. */
static bool advance(end *w, request *r, size_t *got)
{
    net *n = w->net;
    parcel *p;
    bool done = false;

    pthread_mutex_lock(&n->lock);
    if (r->send) {
        done = !r->sent || r->sent->taken;
    } else if (is_first(w, r) && (p = take(n, r->from, w->wire.rank, r->tag))) {
        done = true;
        unpost(w, r);
        *got = p->bytes;
        if (p->bytes)
            memcpy(r->data, p->data, p->bytes < r->bytes ? p->bytes : r->bytes);
        p->taken = true;
        free(p->data);
        p->data = NULL;
    }
    pthread_mutex_unlock(&n->lock);
    return done;
}

static lm_code wire_test(lm_wire *w, uintptr_t *requests, int n, int *at, size_t *got, lm_err *e)
{
    *at = -1;
    if (wire_state((end *)w, e))
        return e->code;
    for (int i = 0; i < n; i++) {
        request *r = (request *)requests[i];

        if (!r || !advance((end *)w, r, got))
            continue;
        requests[i] = 0;
        *at = i;
        return LM_OK;
    }
    return LM_OK;
}

static lm_code wire_poll(lm_wire *w, int tag, void *data, size_t bytes, bool *there, lm_err *e)
{
    net *n = ((end *)w)->net;
    parcel *p;

    if (wire_state((end *)w, e))
        return e->code;
    pthread_mutex_lock(&n->lock);
    p = take(n, -1, w->rank, tag);
    pthread_mutex_unlock(&n->lock);
    *there = p != NULL;
    if (p)
        memcpy(data, p->data, p->bytes < bytes ? p->bytes : bytes);
    return LM_OK;
}

static void wire_stop(lm_wire *w)
{
    ((end *)w)->stopped = true;
}

static void wire_close(lm_wire *w, bool failed)
{
    (void)failed;
    atomic_fetch_add(&((end *)w)->net->closed, 1);
}

/* ---- ranks ---- */

static struct {
    size_t most, scratch;
    int cut, failing;
    bool failing_first; /* before the group is there */
} with = { .failing = -1 };

static _Thread_local const end *own_end; /* of this rank */

typedef struct {
    pthread_t thread;
    end end;
    double timeout;
    lm_rank_fn *fn;
    void *ctx;
    lm_err e;
    double seconds;
} thread_rank;

static void *run_thread(void *p)
{
    thread_rank *t = p;
    net *n = t->end.net;
    lm_comm *c;
    lm_code code;
    double begin;

    own_end = &t->end;
    /* A rank that a busy machine lets wait must not be missing from the group: the timeout is for what comes then. */
    if (lm_messages_open(&t->end.wire, with.failing_first ? t->timeout : 60, with.scratch, false,
                         &c, &t->e))
        return NULL;
    code = lm_comm_barrier(c, &t->e);
    lm_comm_patience(c, t->timeout);
    if (!code && atomic_fetch_add(&n->began, 1) == t->end.wire.size - 1) {
        n->cut = with.cut;
        n->failing = with.failing;
    }
    begin = lm_now();
    if (t->fn(t->ctx, c, &t->e))
        lm_comm_abort(c, &t->e);
    t->seconds = lm_now() - begin;
    lm_comm_free(c);
    return NULL;
}

static lm_code run_messages(int ranks, double timeout, lm_rank_fn *fn, void *ctx, lm_err *e)
{
    static thread_rank t[16];
    net n = { .lock = PTHREAD_MUTEX_INITIALIZER,
              .failing = with.failing_first ? with.failing : -1,
              .most = with.most ? with.most : SIZE_MAX };

    n.last = &n.first;
    for (int r = 0; r < ranks; r++) {
        t[r] = (thread_rank){ .end = { { .rank = r,
                                         .size = ranks,
                                         .tags = 100,
                                         .most = n.most,
                                         .name = "threads",
                                         .send = wire_send,
                                         .recv = wire_recv,
                                         .test = wire_test,
                                         .poll = wire_poll,
                                         .stop = wire_stop,
                                         .close = wire_close },
                                       .net = &n },
                              .timeout = timeout,
                              .fn = fn,
                              .ctx = ctx };
        assert_int_equal(pthread_create(&t[r].thread, NULL, run_thread, &t[r]), 0);
    }
    for (int r = 0; r < ranks; r++)
        pthread_join(t[r].thread, NULL);
    for (int r = 0; r < ranks; r++) {
        if (t[r].e.code && (!e->code || strncmp(e->where, "rank ", 5) != 0))
            *e = t[r].e;
        if (timeout < 2 && t[r].seconds > timeout + 3)
            fail_msg("rank %d has taken %.1f s", r, t[r].seconds);
    }
    /* Once each: a rank that has no group leaves its end to the caller, which is this function. */
    assert_int_equal(atomic_load(&n.closed), with.failing_first ? 0 : ranks);
    for (int r = 0; r < ranks; r++)
        for (request *p = t[r].end.made, *before; p; p = before) {
            before = p->before;
            free(p);
        }
    for (parcel *p = n.made, *before; p; p = before) {
        before = p->before;
        free(p->data);
        free(p);
    }
    return e->code;
}

/* ---- the checks of every transport ---- */

static void test_calls(void **state)
{
    (void)state;
    check_calls(run_messages, MOST, "messages");
    check_large(run_messages);
    check_leaves(run_messages);
    check_agreement(run_messages);
}

static void test_bits(void **state)
{
    static const size_t scratch[] = { 0, 4096, 64 << 10 };

    (void)state;
    for (size_t i = 0; i < 3; i++) {
        with.scratch = scratch[i];
        check_bits(run_messages, 5, "messages");
    }
    with.scratch = 0;
}

/* As messages beyond 2 GiB, in miniature. */
static void test_long(void **state)
{
    (void)state;
    with.most = 1000;
    check_bits(run_messages, 3, "short messages");
    check_calls(run_messages, 3, "short messages");
    with.most = 0;
}

static void test_failures(void **state)
{
    (void)state;
    check_failures(run_messages, 1, 2, false);
}

/* ---- a bad wire ---- */

static lm_code reduce_always(void *ctx, lm_comm *c, lm_err *e)
{
    float x[5000] = { 0 };

    (void)ctx;
    while (!lm_comm_all_reduce(c, x, x, 5000, LM_DTYPE_F32, LM_COMM_SUM, e))
        ;
    return e->code;
}

static void test_cut(void **state)
{
    lm_err e = { 0 };

    (void)state;
    with.cut = 1;
    assert_int_equal(run_messages(3, 0.5, reduce_always, NULL, &e), LM_EIO);
    assert_string_equal(e.where, "all_reduce");
    assert_non_null(strstr(e.what, "rank "));
    assert_non_null(strstr(e.what, " has not come in 0.5 s"));
    with.cut = 0;
}

static void test_broken(void **state)
{
    lm_err e = { 0 };

    (void)state;
    with.failing = 2;
    assert_int_equal(run_messages(3, 0.5, reduce_always, NULL, &e), LM_EIO);
    assert_non_null(strstr(e.what, "rank "));
    with.failing = -1;
}

static void test_broken_first(void **state)
{
    lm_err e = { 0 };

    (void)state;
    with.failing = 1;
    with.failing_first = true;
    assert_int_equal(run_messages(3, 0.5, reduce_always, NULL, &e), LM_EIO);
    with.failing = -1;
    with.failing_first = false;
}

/* The caller frees what a late message would be written to. */
static lm_code recv_in_vain(void *ctx, lm_comm *c_, lm_err *e)
{
    lm_err got = { 0 };
    char x;

    (void)ctx;
    EXPECT(!own_end->stopped);
    if (lm_comm_rank(c_) == 1) {
        EXPECT(lm_comm_recv(c_, 0, &x, 1, &got) == LM_EIO && own_end->stopped);
    } else {
        EXPECT(lm_comm_barrier(c_, &got) == LM_EIO && own_end->stopped);
    }
    return LM_OK;
}

static void test_stops(void **state)
{
    lm_err e = { 0 };

    (void)state;
    if (run_messages(3, 0.4, recv_in_vain, NULL, &e))
        fail_msg("%s: %s", e.where, e.what);
}

typedef struct {
    int victim, root; /* root: of a broadcast; -1: a barrier */
    atomic_int ended;
} absence;

static lm_code one_is_absent(void *ctx, lm_comm *c, lm_err *e)
{
    absence *a = ctx;
    char x = 0;

    while (lm_comm_rank(c) == a->victim && atomic_load(&a->ended) < 1)
        usleep(10000);
    if (a->root < 0 ? lm_comm_barrier(c, e) : lm_comm_broadcast(c, &x, 1, a->root, e))
        atomic_fetch_add(&a->ended, 1);
    return e->code;
}

/* The missing rank is named, not one that waits for it. */
static void test_absent(void **state)
{
    enum { RANKS = 6 };

    (void)state;
    for (int root = -1; root < 2; root += 2)
        for (int victim = 0; victim < RANKS; victim++) {
            absence a = { .victim = victim, .root = root };
            lm_err e = { 0 };
            char wanted[40];

            if (root >= 0 && (victim - root + RANKS) % 2)
                continue; /* no rank waits for this one */
            assert_int_equal(run_messages(RANKS, 0.8, one_is_absent, &a, &e), LM_EIO);
            snprintf(wanted, sizeof wanted, "rank %d of %d on ", victim, RANKS);
            if (!strstr(e.what, wanted))
                fail_msg("root %d, rank %d: %s: %s", root, victim, e.where, e.what);
        }
}

static lm_code split_always(void *ctx, lm_comm *c, lm_err *e)
{
    lm_comm *child = NULL;

    (void)ctx;
    for (int i = 0; i < 60; i++) {
        if (lm_comm_split(c, 0, 0, &child, e))
            return e->code;
        lm_comm_free(child);
    }
    return LM_OK;
}

/* A wire has so many tags. */
static void test_tags(void **state)
{
    lm_err e = { 0 };

    (void)state;
    if (run_messages(2, 60, split_always, NULL, &e) != LM_ELIMIT)
        fail_msg("%s: %s", e.where, e.what);
    assert_non_null(strstr(e.what, "groups are more than threads can tell apart"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_calls), cmocka_unit_test(test_bits),
        cmocka_unit_test(test_long),  cmocka_unit_test(test_failures),
        cmocka_unit_test(test_cut),   cmocka_unit_test(test_broken),
        cmocka_unit_test(test_tags),  cmocka_unit_test(test_broken_first),
        cmocka_unit_test(test_stops), cmocka_unit_test(test_absent),
    };
    return cmocka_run_group_tests_name("comm_messages", tests, NULL, NULL);
}
