/* SPDX-License-Identifier: Apache-2.0 */
/* test_comm_shm.c -- ranks that share memory, as processes and (for ThreadSanitizer) as threads: the checks of every transport
 * with buffers of several sizes; a rank that is killed or stopped in each call ends all. */
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/wait.h>

#include "base/clock.h"
#include "comm/shm.h"
#include "tests/unit/comm_case.h"

static size_t piece; /* bytes of a buffer; 0: as in programs */

/* ---- ranks that are processes ---- */

/* What happens to one of them. */
static struct {
    int victim; /* -1: nothing */
    int signal;
    int after_us;      /* that all ranks have their group */
    atomic_int *began; /* ranks that do */
} strike = { .victim = -1 };

static lm_code run_rank(lm_shm *s, int rank, lm_rank_fn *fn, void *ctx, lm_err *e)
{
    lm_comm *c;

    if (lm_shm_join(s, rank, &c, e))
        return e->code;
    if (strike.began)
        atomic_fetch_add(strike.began, 1);
    if (fn(ctx, c, e))
        lm_comm_abort(c, e);
    lm_comm_free(c);
    return e->code;
}

/* The error that names a rank, if there is one: a rank's own error has no name. */
static void take_error(lm_err *e, const lm_err *other)
{
    if (other->code && (!e->code || strncmp(e->where, "rank ", 5) != 0))
        *e = *other;
}

static lm_code run_processes(int ranks, double timeout, lm_rank_fn *fn, void *ctx, lm_err *e)
{
    lm_shm *s;
    lm_err *result = shared_memory((size_t)ranks * sizeof *result);
    pid_t pid[LM_SHM_RANKS] = { 0 };

    assert_int_equal(lm_shm_new(ranks, timeout, piece, &s, e), LM_OK);
    for (int r = 0; r < ranks; r++) {
        pid[r] = fork();
        assert_true(pid[r] >= 0);
        if (!pid[r])
            _exit(run_rank(s, r, fn, ctx, &result[r]) != LM_OK);
    }
    if (strike.victim >= 0) {
        while (atomic_load(strike.began) < ranks)
            usleep(1000);
        usleep((useconds_t)strike.after_us);
        kill(pid[strike.victim], strike.signal);
    }
    for (int r = 0; r < ranks; r++)
        if (r != strike.victim)
            assert_int_equal(waitpid(pid[r], NULL, 0), pid[r]);
    if (strike.victim >= 0) {
        kill(pid[strike.victim], SIGKILL);
        assert_int_equal(waitpid(pid[strike.victim], NULL, 0), pid[strike.victim]);
    }
    for (int r = 0; r < ranks; r++)
        take_error(e, &result[r]);
    munmap(result, (size_t)ranks * sizeof *result);
    lm_shm_drop(s);
    return e->code;
}

/* ---- ranks that are threads ---- */

typedef struct {
    pthread_t thread;
    lm_shm *s;
    int rank;
    lm_rank_fn *fn;
    void *ctx;
    lm_err e;
} thread_rank;

static void *run_thread(void *p)
{
    thread_rank *t = p;

    run_rank(t->s, t->rank, t->fn, t->ctx, &t->e);
    return NULL;
}

static lm_code run_threads(int ranks, double timeout, lm_rank_fn *fn, void *ctx, lm_err *e)
{
    static thread_rank t[LM_SHM_RANKS];
    lm_shm *s;

    assert_int_equal(lm_shm_new(ranks, timeout, piece, &s, e), LM_OK);
    for (int r = 0; r < ranks; r++) {
        t[r] = (thread_rank){ .s = s, .rank = r, .fn = fn, .ctx = ctx };
        assert_int_equal(pthread_create(&t[r].thread, NULL, run_thread, &t[r]), 0);
    }
    for (int r = 0; r < ranks; r++)
        pthread_join(t[r].thread, NULL);
    for (int r = 0; r < ranks; r++)
        take_error(e, &t[r].e);
    lm_shm_drop(s);
    return e->code;
}

/* ---- the checks of every transport ---- */

static const size_t pieces[] = { 0, 64 };

static void test_processes(void **state)
{
    (void)state;
    for (size_t i = 0; i < 2; i++) {
        piece = pieces[i];
        check_calls(run_processes, MOST, "processes");
        check_bits(run_processes, 5, "processes");
    }
    piece = 0;
    check_large(run_processes);
    check_leaves(run_processes);
    check_agreement(run_processes);
}

static void test_threads(void **state)
{
    (void)state;
    for (size_t i = 0; i < 2; i++) {
        piece = pieces[i];
        check_calls(run_threads, 4, "threads that share memory");
        check_bits(run_threads, 3, "threads that share memory");
    }
    piece = 0;
}

static void test_failures(void **state)
{
    (void)state;
    check_failures(run_processes, 0.4, 2, true);
    check_failures(run_threads, 0.4, 1, true);
}

/* ---- ranks that end, and ranks that hang ---- */

enum { BARRIER, REDUCE, SCATTER, GATHER, EXCHANGE, BROADCAST, MESSAGE, SPLIT, CALLS };
static const char *const names[] = { "barrier",    "all_reduce", "reduce_scatter", "all_gather",
                                     "all_to_all", "broadcast",  "send or recv",   "split" };

static lm_code call_once(int call, lm_comm *c, float *in, float *out, lm_err *e)
{
    size_t count[3] = { 9000, 9000, 9000 }, bytes[3] = { 36000, 36000, 36000 };
    int rank = lm_comm_rank(c);
    lm_comm *child = NULL;
    lm_code rc;

    switch (call) {
    case BARRIER:
        return lm_comm_barrier(c, e);
    case REDUCE:
        return lm_comm_all_reduce(c, in, out, 27000, LM_DTYPE_F32, LM_COMM_SUM, e);
    case SCATTER:
        return lm_comm_reduce_scatter(c, in, out, count, LM_DTYPE_F32, LM_COMM_SUM, e);
    case GATHER:
        return lm_comm_all_gather(c, in, out, bytes, e);
    case EXCHANGE:
        return lm_comm_all_to_all(c, in, bytes, out, bytes, e);
    case BROADCAST:
        return lm_comm_broadcast(c, out, 108000, 1, e);
    case MESSAGE: /* a ring */
        rc = rank == 0 ? lm_comm_send(c, 1, in, 108000, e)
                       : lm_comm_recv(c, rank - 1, in, 108000, e);
        return rc          ? rc
               : rank == 0 ? lm_comm_recv(c, 2, in, 108000, e)
                           : lm_comm_send(c, (rank + 1) % 3, in, 108000, e);
    default:
        rc = lm_comm_split(c, 0, 0, &child, e);
        rc = rc ? rc : lm_comm_barrier(child, e);
        lm_comm_free(child);
        return rc;
    }
}

static lm_code call_always(void *ctx, lm_comm *c, lm_err *e)
{
    static float in[27000], out[27000];

    while (!call_once(*(int *)ctx, c, in, out, e))
        ;
    return e->code;
}

static void strike_one(int signal, int victim, double timeout, int *call, const char *what)
{
    lm_err e = { 0 };
    char rank[32];
    double begin = lm_now();

    strike.victim = victim;
    strike.signal = signal;
    strike.after_us = 10000 + 7919 * victim;
    strike.began = shared_memory(sizeof *strike.began);
    assert_int_equal(run_processes(3, timeout, call_always, call, &e), LM_EIO);
    snprintf(rank, sizeof rank, "rank %d of 3 on ", victim);
    if (!strstr(e.what, rank) || !strstr(e.what, what) || lm_now() - begin > timeout + 9)
        fail_msg("%s, rank %d: %.1f s: %s: %s", names[*call], victim, lm_now() - begin, e.where,
                 e.what);
    munmap(strike.began, sizeof *strike.began);
    strike.began = NULL;
    strike.victim = -1;
    assert_int_equal(waitpid(-1, NULL, WNOHANG), -1); /* no process is left */
}

static void test_killed(void **state)
{
    int *call = shared_memory(sizeof *call);

    (void)state;
    for (*call = 0; *call < CALLS; ++*call)
        for (int victim = 0; victim < 3; victim++)
            strike_one(SIGKILL, victim, 30, call, "has ended (process ");
    munmap(call, sizeof *call);
}

static void test_stopped(void **state)
{
    int *call = shared_memory(sizeof *call);

    (void)state;
    for (*call = 0; *call < CALLS; ++*call)
        strike_one(SIGSTOP, *call % 3, 0.5, call, "has not come in 0.5 s (process ");
    munmap(call, sizeof *call);
}

/* It ends between its mapping and its joining. */
static void test_ended_early(void **state)
{
    lm_shm *s;
    lm_comm *c;
    lm_err e = { 0 };
    double begin = lm_now();

    (void)state;
    assert_int_equal(lm_shm_new(2, 30, 0, &s, &e), LM_OK);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (!pid) {
        lm_shm_enter(s, 1);
        _exit(0);
    }
    assert_int_equal(lm_shm_join(s, 0, &c, &e), LM_OK);
    assert_int_equal(waitpid(pid, NULL, 0), pid);
    assert_int_equal(lm_comm_barrier(c, &e), LM_EIO);
    assert_non_null(strstr(e.what, "rank 1 of 2 on "));
    assert_non_null(strstr(e.what, " has ended (process "));
    assert_true(lm_now() - begin < 10);
    lm_comm_free(c);
    lm_shm_drop(s);
}

/* ---- segments ---- */

static void test_find(void **state)
{
    lm_shm *s, *other;
    lm_shm_name name;
    lm_err e = { 0 };

    (void)state;
    assert_int_equal(lm_shm_new(0, 1, 0, &s, &e), LM_EUSAGE);
    e = (lm_err){ 0 };
    assert_int_equal(lm_shm_new(2, 1, 0, &s, &e), LM_OK);
    name = lm_shm_name_of(s);
    assert_int_equal(lm_shm_find(&name, &other, &e), LM_OK);
    lm_shm_drop(other);
    name.token++;
    assert_int_equal(lm_shm_find(&name, &other, &e), LM_EIO);
    assert_non_null(strstr(e.what, "is the memory of other ranks"));
    e = (lm_err){ 0 };
    name.fd = 0; /* standard input */
    assert_int_equal(lm_shm_find(&name, &other, &e), LM_EIO);
    assert_null(other);
    e = (lm_err){ 0 };
    name.fd = 999999;
    assert_int_equal(lm_shm_find(&name, &other, &e), LM_EIO);
    lm_shm_drop(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_processes),   cmocka_unit_test(test_threads),
        cmocka_unit_test(test_failures),    cmocka_unit_test(test_killed),
        cmocka_unit_test(test_stopped),     cmocka_unit_test(test_find),
        cmocka_unit_test(test_ended_early),
    };
    return cmocka_run_group_tests_name("comm_shm", tests, NULL, NULL);
}
