/* SPDX-License-Identifier: Apache-2.0 */
/* shm_segment.c -- segments of shared memory: making, finding, waiting, failing. */
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "base/mem.h"
#include "base/process.h"
#include "comm/shm_impl.h"

enum {
    PIECE = 128 << 10, /* with SHM_SLOTS and two ranks, half of a second-level cache */
    RING = 64 << 10,
    PAGE = 4096,
    SLEEP_NS = 20000000, /* how long a rank sleeps before it looks for failures */
    LOOK_SLEEPS = 3,     /* after so many sleeps also at the other's process */
    SPINS = 200,
    YIELDS = 20,
};

const char *shm_call_name(int call)
{
    static const char *const name[] = { "no call",    "barrier",    "all_reduce", "reduce_scatter",
                                        "all_gather", "all_to_all", "broadcast",  "split",
                                        "send",       "recv" };

    return call >= 0 && call <= SHM_RECV ? name[call] : "?";
}

_Static_assert(sizeof(shm_head) <= PAGE, "the ranks follow the head");

/* ---- segments ---- */

static size_t round_up(size_t n, size_t to)
{
    return (n + to - 1) / to * to;
}

static shm_head lay_out(int ranks, double timeout, size_t piece)
{
    size_t n = (size_t)ranks, least = 64 * n; /* 64 bytes, or a number, for each rank */
    shm_head h = { .ranks = ranks, .timeout = timeout, .ranks_at = PAGE };

    h.piece = round_up(piece ? piece : PIECE, 64);
    h.piece = h.piece < least ? least : h.piece;
    h.ring = piece && piece < RING ? round_up(piece, 64) : RING;
    h.pairs_at = h.ranks_at + n * sizeof(shm_rank);
    h.buffers_at = round_up(h.pairs_at + n * n * sizeof(shm_pair), PAGE);
    h.rings_at = h.buffers_at + n * SHM_SLOTS * (sizeof(shm_card) + h.piece);
    h.bytes = round_up(h.rings_at + n * n * SHM_RING * (sizeof(shm_card) + h.ring), PAGE);
    if (gethostname(h.host, sizeof h.host - 1))
        snprintf(h.host, sizeof h.host, "this machine");
    return h;
}

/* Takes fd, also in failure. */
static lm_code map_segment(int fd, size_t bytes, lm_shm **out, lm_err *e)
{
    lm_shm *s;
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

    if (p == MAP_FAILED) {
        lm_fail(e, LM_ELIMIT, "shared memory", NULL, "cannot map %zu bytes", bytes);
    } else if (!lm_alloc_n(&s, 1, sizeof *s, "shared memory", e)) {
        s->head = p;
        s->fd = fd;
        atomic_init(&s->users, 1);
        *out = s;
        return LM_OK;
    } else {
        munmap(p, bytes);
    }
    close(fd);
    return e->code;
}

lm_code lm_shm_new(int ranks, double timeout, size_t piece, lm_shm **out, lm_err *e)
{
    *out = NULL;
    if (ranks < 1 || ranks > LM_SHM_RANKS)
        return lm_fail(e, LM_EUSAGE, "ranks", NULL, "%d: 1 to %d can share memory", ranks,
                       LM_SHM_RANKS);
    shm_head h = lay_out(ranks, timeout, piece);
    int fd = memfd_create("lmutils ranks", MFD_CLOEXEC);

    if (fd < 0 || ftruncate(fd, (off_t)h.bytes)) {
        lm_fail(e, LM_EIO, "shared memory", NULL, "cannot create %zu bytes", h.bytes);
        if (fd >= 0)
            close(fd);
        return e->code;
    }
    if (map_segment(fd, h.bytes, out, e))
        return e->code;
    if (getrandom(&h.token, sizeof h.token, 0) != sizeof h.token || !h.token)
        h.token = (uint64_t)getpid() << 32 | (uint32_t)fd | 1u;
    memcpy((*out)->head, &h, sizeof h);
    return LM_OK;
}

lm_shm_name lm_shm_name_of(const lm_shm *s)
{
    return s ? (lm_shm_name){ getpid(), s->fd, s->head->token } : (lm_shm_name){ 0 };
}

lm_code lm_shm_find(const lm_shm_name *name, lm_shm **out, lm_err *e)
{
    char path[64];
    struct stat st;
    int fd;

    *out = NULL;
    snprintf(path, sizeof path, "/proc/%lld/fd/%lld", (long long)name->pid, (long long)name->fd);
    fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0)
        return lm_fail(e, LM_EIO, path, NULL, "cannot open the memory of another rank");
    if (fstat(fd, &st) || !S_ISREG(st.st_mode) || st.st_size < PAGE) {
        close(fd);
        errno = 0;
        return lm_fail(e, LM_EIO, path, NULL, "is not the memory of another rank");
    }
    if (map_segment(fd, (size_t)st.st_size, out, e))
        return e->code;
    if ((*out)->head->token == name->token && (*out)->head->bytes == (size_t)st.st_size)
        return LM_OK;
    munmap((*out)->head, (size_t)st.st_size);
    close(fd);
    lm_free(*out);
    *out = NULL;
    errno = 0;
    return lm_fail(e, LM_EIO, path, NULL, "is the memory of other ranks");
}

void lm_shm_drop(lm_shm *s)
{
    if (!s || atomic_fetch_sub(&s->users, 1) != 1)
        return;
    bool failed = atomic_load(&s->head->failed) != SHM_WELL;

    munmap(s->head, s->head->bytes);
    close(s->fd);
    if (s->at_end)
        s->at_end(s->ctx, failed);
    lm_free(s);
}

void lm_shm_at_end(lm_shm *s, void (*fn)(void *ctx, bool failed), void *ctx)
{
    s->at_end = fn;
    s->ctx = ctx;
}

/* ---- members ---- */

/* A group that is split off knows its members before they come. */
static void enter(lm_shm *s, int rank, int name)
{
    shm_rank *r = shm_rank_at(s, rank);

    if (atomic_load(&r->known))
        return;
    r->pid = getpid();
    r->start = lm_process_start(r->pid);
    r->name = name;
    atomic_store(&r->known, 1);
}

void lm_shm_enter(lm_shm *s, int rank)
{
    enter(s, rank, rank);
}

lm_code shm_join(lm_shm *s, lm_shm *world, int rank, int name, lm_comm **out, lm_err *e)
{
    shm_member *m;

    if (lm_alloc_n(&m, 1, sizeof *m, "a rank", e))
        return e->code;
    *m = (shm_member){ .comm = { &shm_transport, rank, s->head->ranks, s->head->timeout },
                       .own = s,
                       .world = world ? world : s };
    atomic_fetch_add(&s->users, 1);
    if (world)
        atomic_fetch_add(&world->users, 1);
    enter(s, rank, name);
    *out = &m->comm;
    return LM_OK;
}

lm_code lm_shm_join(lm_shm *s, int rank, lm_comm **out, lm_err *e)
{
    shm_member absent = { .comm = { &shm_transport, rank, s->head->ranks, s->head->timeout },
                          .own = s,
                          .world = s };

    enter(s, rank, rank);
    if (shm_join(s, NULL, rank, rank, out, e))
        lm_comm_abort(&absent.comm, e); /* the others wait for this rank */
    return e->code;
}

/* ---- failures ---- */

lm_code shm_state(shm_member *m, lm_err *e)
{
    shm_head *h = m->world->head;
    int state = atomic_load(&h->failed);

    if (state == SHM_WELL)
        return LM_OK;
    /* A rank may have been killed while it wrote the reason. */
    for (int i = 0; state == SHM_FAILING && i < 100; i++) {
        usleep(1000);
        state = atomic_load(&h->failed);
    }
    if (state == SHM_FAILED && !e->code)
        *e = h->why;
    errno = 0;
    lm_fail(e, LM_EIO, "ranks", NULL, "one of %d on %s failed, and ended before it gave a reason",
            h->ranks, h->host);
    return e->code;
}

lm_code shm_fail(shm_member *m, const lm_err *why, lm_err *e)
{
    shm_head *h = m->world->head;
    int well = SHM_WELL;

    if (atomic_compare_exchange_strong(&h->failed, &well, SHM_FAILING)) {
        h->why = *why;
        atomic_store(&h->failed, SHM_FAILED);
    }
    return shm_state(m, e);
}

/* The rank `peer` has not come: because of its process, or because the time is over. */
static lm_code give_up(shm_member *m, int peer, shm_call call, lm_process_state state, lm_err *e)
{
    const shm_head *h = m->world->head;
    const shm_rank *r = shm_rank_at(m->own, peer);
    lm_err why = { 0 };
    char about[120];

    if (state == LM_PROCESS_ENDED)
        snprintf(about, sizeof about, "has ended (process %lld)", (long long)r->pid);
    else
        snprintf(about, sizeof about, "has not come in %g s (process %lld%s, in %s)",
                 m->comm.patience, (long long)r->pid,
                 state == LM_PROCESS_STOPPED ? ", stopped" : "",
                 shm_call_name(atomic_load(&r->call)));
    errno = 0;
    lm_fail(&why, LM_EIO, shm_call_name((int)call), "see what it did", "rank %d of %d on %s %s",
            atomic_load(&r->known) ? r->name : peer, h->ranks, h->host, about);
    return shm_fail(m, &why, e);
}

lm_code shm_look(lm_comm *c, lm_err *e)
{
    shm_member *m = (shm_member *)c;

    for (int i = 0; i < c->size && !shm_state(m, e); i++) {
        const shm_rank *r = shm_rank_at(m->own, i);
        if (i != c->rank && atomic_load(&r->known) &&
            lm_process_look(r->pid, r->start) == LM_PROCESS_ENDED)
            return give_up(m, i, SHM_NO_CALL, LM_PROCESS_ENDED, e);
    }
    return e->code;
}

lm_code shm_check_peer(shm_member *m, int peer, shm_call call, lm_err *e)
{
    const shm_rank *r = shm_rank_at(m->own, peer);

    /* A process that is ending closes its files before it counts as ended. */
    for (int i = 0; i < 20; i++, usleep(10000))
        if (lm_process_look(r->pid, r->start) == LM_PROCESS_ENDED)
            return give_up(m, peer, call, LM_PROCESS_ENDED, e);
    return LM_OK;
}

/* ---- waiting ---- */

static bool reached(shm_word *w, uint32_t target)
{
    return (int32_t)(atomic_load_explicit(&w->value, memory_order_acquire) - target) >= 0;
}

void shm_set(shm_word *w, uint32_t value)
{
    atomic_store(&w->value, value);
    if (atomic_load(&w->sleepers))
        syscall(SYS_futex, &w->value, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

static void sleep_on(shm_word *w, uint32_t target)
{
    const struct timespec slice = { .tv_nsec = SLEEP_NS };
    uint32_t seen;

    atomic_fetch_add(&w->sleepers, 1);
    seen = atomic_load(&w->value);
    if ((int32_t)(seen - target) < 0)
        syscall(SYS_futex, &w->value, FUTEX_WAIT, seen, &slice, NULL, 0);
    atomic_fetch_sub(&w->sleepers, 1);
}

/* A peer that has a core of its own comes in moments; one that has to share it comes sooner if this rank lets go. */
static bool spin(const shm_member *m, shm_word *w, uint32_t target)
{
    static atomic_int cores;

    if (!atomic_load(&cores))
        atomic_store(&cores, (int)sysconf(_SC_NPROCESSORS_ONLN));
    for (int i = m->world->head->ranks <= atomic_load(&cores) ? SPINS : 0; i > 0; i--) {
        if (reached(w, target))
            return true;
#ifdef __SSE2__
        _mm_pause();
#endif
    }
    for (int i = 0; i < YIELDS; i++) {
        if (reached(w, target))
            return true;
        sched_yield();
    }
    return reached(w, target);
}

lm_code shm_wait(shm_member *m, shm_word *w, uint32_t target, int peer, shm_call call, lm_err *e)
{
    const shm_rank *r = shm_rank_at(m->own, peer);
    lm_comm_wait wait = { 0 };

    if (spin(m, w, target))
        return LM_OK;
    for (int sleeps = 0;; sleeps++) {
        lm_process_state state = LM_PROCESS_RUNS;

        sleep_on(w, target);
        if (reached(w, target))
            return LM_OK;
        if (shm_state(m, e))
            return e->code;
        bool late = lm_comm_wait_is_over(&wait, m->comm.patience);
        if (atomic_load(&r->known) && (late || sleeps % LOOK_SLEEPS == LOOK_SLEEPS - 1))
            state = lm_process_look(r->pid, r->start);
        /* One that waits itself is not the cause: the rank that waits for that one says so first. */
        if (late && state == LM_PROCESS_RUNS && atomic_load(&r->call) != SHM_NO_CALL)
            late = lm_comm_wait_is_over(&wait, 1.25 * m->comm.patience);
        /* It may have counted and then ended. */
        if ((late || state == LM_PROCESS_ENDED) && !reached(w, target))
            return give_up(m, peer, call, state, e);
    }
}

/* ---- copies ---- */

void shm_copy_out(void *to, const void *from, size_t bytes, size_t whole)
{
#ifdef __SSE2__
    if (whole >= LM_COMM_BIG && bytes >= 4096) {
        size_t head = (size_t)(-(uintptr_t)to & 63), body = (bytes - head) / 64 * 64;
        char *t = (char *)to + head;
        const char *f = (const char *)from + head;

        memcpy(to, from, head);
        for (size_t i = 0; i < body; i += 64)
            for (size_t q = 0; q < 64; q += 16)
                _mm_stream_si128((__m128i *)(t + i + q),
                                 _mm_loadu_si128((const __m128i *)(f + i + q)));
        _mm_sfence();
        memcpy(t + body, f + body, bytes - head - body);
        return;
    }
#endif
    (void)whole;
    memcpy(to, from, bytes);
}
