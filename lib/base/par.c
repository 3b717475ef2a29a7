/* SPDX-License-Identifier: Apache-2.0 */
/* par.c -- the pool.
 *
 * One 64-bit word holds the number of the job and the next chunk.  A worker claims a chunk by
 * compare-and-swap on the whole word, so a claim can only succeed for the job whose fields the
 * worker has read; a worker that wakes up late finds the word closed, and no other worker waits for
 * it.  A loop ends when every chunk is reported done, not when every worker has taken part.
 *
 * Every wait polls for some microseconds, then sleeps on a futex. */
#include "base/par.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/cgroup.h"
#include "base/clock.h"
#include "base/mem.h"

#define CHUNK_BITS   40
#define CHUNK_MASK   ((UINT64_C(1) << CHUNK_BITS) - 1) /* also: closed */
#define MOST_CLAIMS  ((int64_t)1 << 20)                /* more chunks are claimed several at once */
#define SPIN_SECONDS 50e-6

enum { MOST_THREADS = 1024 };

typedef enum { JOB_FOR, JOB_EACH, JOB_QUIT } job_kind;

typedef struct {
    pthread_t thread;
    struct lm_par *par;
    int id, cpu; /* cpu -1: not pinned */
} worker;

struct lm_par {
    int n, started;
    bool spin;
    worker *workers; /* [n], 0 is the caller */
    pthread_mutex_t lock;

    /* Written by the caller while the word is closed, read after it is open. */
    _Atomic(lm_par_fn) fn;
    _Atomic(void *) ctx;
    _Atomic int64_t end, grain, batch, claims;
    _Atomic int kind;
    _Atomic uint64_t job;

    _Alignas(64) _Atomic uint64_t word; /* job number << 40 | next claim */
    _Alignas(64) _Atomic uint32_t bell; /* rung for each job; workers sleep on it */
    _Atomic uint32_t sleeping;
    _Alignas(64) _Atomic uint32_t done; /* claims reported; the caller sleeps on it */
    _Atomic uint32_t caller_sleeps;
};

/* The worker number while this thread runs a job, otherwise -1; and the pool of that job. */
static _Thread_local int running = -1;
static _Thread_local const lm_par *running_in;

static void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    sched_yield();
#endif
}

static void futex_wait(_Atomic uint32_t *at, uint32_t seen)
{
    syscall(SYS_futex, at, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
}

static void futex_wake(_Atomic uint32_t *at, int n)
{
    syscall(SYS_futex, at, FUTEX_WAKE_PRIVATE, n, NULL, NULL, 0);
}

/* Poll *at for some microseconds: true as soon as it is `value` (or, with `change`, is not). */
static bool spin_on(const lm_par *p, _Atomic uint32_t *at, uint32_t value, bool change)
{
    double until = 0;

    for (int i = 0; p->spin; i++) {
        if ((atomic_load_explicit(at, memory_order_acquire) == value) != change)
            return true;
        relax();
        if (i % 64 == 63) {
            double now = lm_now();

            if (until == 0)
                until = now + SPIN_SECONDS;
            if (now > until)
                break;
        }
    }
    return (atomic_load_explicit(at, memory_order_acquire) == value) != change;
}

static void sleep_on_bell(lm_par *p, uint32_t seen)
{
    atomic_fetch_add(&p->sleeping, 1);
    while (atomic_load(&p->bell) == seen)
        futex_wait(&p->bell, seen);
    atomic_fetch_sub(&p->sleeping, 1);
}

static void run_chunks(lm_par_fn fn, void *ctx, int64_t begin, int64_t end, int64_t grain, int who)
{
    for (int64_t at = begin; at < end; at += grain)
        fn(ctx, at, end - at > grain ? at + grain : end, who);
}

static void report_done(lm_par *p, uint32_t total)
{
    if (atomic_fetch_add(&p->done, 1) + 1 == total && atomic_load(&p->caller_sleeps))
        futex_wake(&p->done, 1);
}

/* Claim and run chunks of the open loop.  The fields are read before the claim: a claim that
 * succeeds proves that the word, hence the job, has not changed since. */
static void take_chunks(lm_par *p, uint64_t w, int who)
{
    for (;;) {
        int64_t claims = p->claims, end = p->end, grain = p->grain, step = p->batch * p->grain;
        int64_t claim = (int64_t)(w & CHUNK_MASK);
        lm_par_fn fn = p->fn;
        void *ctx = p->ctx;

        /* The word may already belong to a job of another kind, whose bell this worker has not seen
         * yet. */
        if (p->kind != JOB_FOR || claim >= claims)
            return;
        if (!atomic_compare_exchange_weak(&p->word, &w, w + 1))
            continue;
        run_chunks(fn, ctx, claim * step, claim + 1 == claims ? end : (claim + 1) * step, grain,
                   who);
        report_done(p, (uint32_t)claims);
        w = atomic_load(&p->word);
    }
}

/* Take part in the open job, if it is still open; false when the pool ends. */
static bool answer(lm_par *p, int who, uint64_t *last)
{
    for (;;) {
        uint64_t w = atomic_load(&p->word), job = p->job;
        int kind = p->kind;
        lm_par_fn fn = p->fn;
        void *ctx = p->ctx;

        if ((w & CHUNK_MASK) == CHUNK_MASK)
            return true;
        if (kind == JOB_FOR) {
            take_chunks(p, w, who);
            return true;
        }
        if (atomic_load(&p->word) != w) /* the fields belong to another job */
            continue;
        if (kind == JOB_QUIT)
            return false;
        if (job != *last) { /* once */
            *last = job;
            fn(ctx, who, who + 1, who);
            report_done(p, (uint32_t)p->n - 1);
        }
        return true;
    }
}

static void pin(int cpu)
{
    cpu_set_t set;

    if (cpu < 0 || cpu >= CPU_SETSIZE)
        return;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    pthread_setaffinity_np(pthread_self(), sizeof set, &set);
}

static void *work(void *arg)
{
    worker *me = arg;
    lm_par *p = me->par;
    uint32_t seen = 0; /* the bell's value at the last look */
    uint64_t last = 0;

    pin(me->cpu);
    running = me->id;
    running_in = p;
    do {
        if (!spin_on(p, &p->bell, seen, true))
            sleep_on_bell(p, seen);
        seen = atomic_load(&p->bell);
    } while (answer(p, me->id, &last));
    return NULL;
}

static void store_relaxed(_Atomic int64_t *at, int64_t v)
{
    atomic_store_explicit(at, v, memory_order_relaxed);
}

/* Fill in the job, open the word, ring.  Called only while the word is closed. */
static void open_job(lm_par *p, job_kind kind, lm_par_fn fn, void *ctx, int wake)
{
    uint64_t job = ++p->job;

    atomic_store_explicit(&p->kind, kind, memory_order_relaxed);
    atomic_store_explicit(&p->fn, fn, memory_order_relaxed);
    atomic_store_explicit(&p->ctx, ctx, memory_order_relaxed);
    atomic_store_explicit(&p->done, 0, memory_order_relaxed);
    atomic_store_explicit(&p->word, job << CHUNK_BITS, memory_order_release);
    atomic_fetch_add(&p->bell, 1);
    if (atomic_load(&p->sleeping))
        futex_wake(&p->bell, wake);
}

static void close_job(lm_par *p, uint32_t total)
{
    if (!spin_on(p, &p->done, total, false)) {
        uint32_t d;

        atomic_store(&p->caller_sleeps, 1);
        while ((d = atomic_load(&p->done)) != total)
            futex_wait(&p->done, d);
        atomic_store(&p->caller_sleeps, 0);
    }
    atomic_store_explicit(&p->word, CHUNK_MASK, memory_order_relaxed);
    atomic_thread_fence(memory_order_release); /* closed before the next job's fields */
}

int lm_par_threads(const lm_par *p)
{
    return p ? p->n : 1;
}

void lm_par_for(lm_par *p, int64_t n, int64_t grain, lm_par_fn fn, void *ctx)
{
    int64_t chunks, batch, claims;

    if (n <= 0)
        return;
    grain = grain < 1 ? 1 : grain;
    if (lm_par_threads(p) == 1 || n <= grain || running >= 0 || pthread_mutex_trylock(&p->lock)) {
        /* Workers of another pool, or of none, are counted from 0: ctx has scratch for those alone. */
        run_chunks(fn, ctx, 0, n, grain, running >= 0 && running_in == p ? running : 0);
        return;
    }
    chunks = (n - 1) / grain + 1;
    batch = (chunks - 1) / MOST_CLAIMS + 1;
    claims = (chunks - 1) / batch + 1;
    store_relaxed(&p->end, n);
    store_relaxed(&p->grain, grain);
    store_relaxed(&p->batch, batch);
    store_relaxed(&p->claims, claims);
    running = 0;
    running_in = p;
    open_job(p, JOB_FOR, fn, ctx, claims - 1 < p->n ? (int)claims - 1 : p->n);
    take_chunks(p, atomic_load(&p->word), 0);
    close_job(p, (uint32_t)claims);
    running = -1;
    pthread_mutex_unlock(&p->lock);
}

void lm_par_each(lm_par *p, lm_par_fn fn, void *ctx)
{
    int n = lm_par_threads(p);

    if (n == 1 || running >= 0) {
        for (int i = 0; i < n; i++)
            fn(ctx, i, i + 1, i);
        return;
    }
    pthread_mutex_lock(&p->lock);
    running = 0;
    running_in = p;
    open_job(p, JOB_EACH, fn, ctx, p->n);
    fn(ctx, 0, 1, 0);
    close_job(p, (uint32_t)n - 1);
    running = -1;
    pthread_mutex_unlock(&p->lock);
}

/* The affinity mask that the process started with: pinning the workers must not narrow it. */
static pthread_once_t once = PTHREAD_ONCE_INIT;
static cpu_set_t start_mask;

static void read_mask(void)
{
    if (sched_getaffinity(0, sizeof start_mask, &start_mask)) { /* more than 1024 processors */
        CPU_ZERO(&start_mask);
        for (long i = 0; i < sysconf(_SC_NPROCESSORS_ONLN) && i < CPU_SETSIZE; i++)
            CPU_SET(i, &start_mask);
    }
}

int lm_cpu_count(void)
{
    double quota = lm_cgroup_cpus();
    int n;

    pthread_once(&once, read_mask);
    n = CPU_COUNT(&start_mask);
    if (quota > 0 && quota < n)
        n = (int)quota + (quota > (int)quota);
    return n < 1 ? 1 : n > MOST_THREADS ? MOST_THREADS : n;
}

static lm_code start_threads(lm_par *p, lm_err *e)
{
    sigset_t all, before;
    int rc = 0, cpu = -1;
    bool pinned = CPU_COUNT(&start_mask) == p->n;

    /* Workers block signals, so that the main thread handles them, except those that a thread
     * itself causes: SIGPIPE for a lost reader, SIGBUS for a truncated mapped input. */
    sigfillset(&all);
    sigdelset(&all, SIGPIPE);
    sigdelset(&all, SIGBUS);
    sigdelset(&all, SIGSEGV);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (p->started = 1; p->started < p->n && !rc; p->started += !rc) {
        worker *w = &p->workers[p->started];

        *w = (worker){ .par = p, .id = p->started, .cpu = -1 };
        for (int skip = p->started == 1 ? 2 : 1; pinned && skip; skip--) {
            do { /* the caller counts as the thread of the first processor but is not pinned */
                cpu++;
            } while (!CPU_ISSET(cpu, &start_mask));
            w->cpu = cpu;
        }
        rc = pthread_create(&w->thread, NULL, work, w);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (rc)
        return lm_fail(e, LM_ELIMIT, "threads", "use fewer threads", "thread %d of %d: error %d",
                       p->started + 1, p->n, rc);
    return LM_OK;
}

lm_code lm_par_new(lm_par **out, int threads, lm_err *e)
{
    lm_par *p = NULL;
    int cores = lm_cpu_count();
    lm_code rc;

    if (threads < 0 || threads > MOST_THREADS)
        return lm_fail(e, LM_EUSAGE, "threads", NULL, "%d requested, 0 to %d are possible", threads,
                       MOST_THREADS);
    rc = lm_alloc_n(&p, 1, sizeof *p, "the thread pool", e);
    if (rc)
        return rc;
    p->n = threads ? threads : cores;
    p->spin = p->n <= cores;
    p->started = 1;
    atomic_store(&p->word, CHUNK_MASK);
    pthread_mutex_init(&p->lock, NULL);
    rc = lm_alloc_n(&p->workers, (size_t)p->n, sizeof *p->workers, "the thread pool", e);
    rc = rc ? rc : start_threads(p, e);
    if (rc) {
        lm_par_free(p);
        return rc;
    }
    *out = p;
    return LM_OK;
}

void lm_par_free(lm_par *p)
{
    if (!p)
        return;
    if (p->started > 1)
        open_job(p, JOB_QUIT, NULL, NULL, p->n);
    for (int i = 1; i < p->started; i++)
        pthread_join(p->workers[i].thread, NULL);
    pthread_mutex_destroy(&p->lock);
    lm_free(p->workers);
    lm_free(p);
}
