/* SPDX-License-Identifier: Apache-2.0 */
/* threads.c -- the transport between threads.
 *
 * A collective call: each rank writes its operands on its card, all meet, each works on the operands of all others, and leaves
 * when the last one has done its work.  Waiting is on one condition of the group, in slices, between which the state of the world is
 * looked at, so that a failure anywhere ends every wait; but no rank leaves a call while another may touch its operands. */
#include "comm/threads.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/mem.h"
#include "comm/comm_impl.h"

/* All ranks, whatever groups they are in. */
typedef struct {
    double timeout;
    atomic_bool failed, reported;
    pthread_mutex_t lock; /* of what follows */
    lm_err why;
    int rank; /* the first that failed; -1: none */
} world;

typedef enum {
    BARRIER,
    ALL_REDUCE,
    REDUCE_SCATTER,
    ALL_GATHER,
    ALL_TO_ALL,
    BROADCAST,
    SPLIT
} call_kind;
static const char *const call_name[] = { "barrier",    "all_reduce", "reduce_scatter", "all_gather",
                                         "all_to_all", "broadcast",  "split" };

/* What a rank gives to a collective call. */
typedef struct {
    call_kind call;
    const void *in;
    void *out;
    size_t n;           /* elements or bytes, where every rank has as many */
    unsigned of;        /* type and operation, or the root */
    const size_t *give; /* of all_to_all */
    int color, key;     /* of split */
} card;

/* From one rank to another; empty while data is NULL. */
typedef struct {
    const void *data;
    size_t bytes;
    bool copied; /* the receiver reads it just now */
} message;

struct member;

typedef struct {
    world *world;
    int size;
    pthread_mutex_t lock;
    pthread_cond_t moved;
    int arrived;            /* at the present meeting */
    unsigned long meetings; /* so far */
    int working;            /* ranks that have met, and may still touch the operands of others */
    atomic_int members;     /* that are not freed */
    card *card;             /* [size] */
    message *message;       /* [size, size]: from, to */
    struct member **child;  /* [size], of split: the new view of each rank */
} group;

/* A rank's view of a group. */
typedef struct member {
    lm_comm comm;
    group *group;
    int name; /* rank in the world */
} member;

static member *member_of(lm_comm *c)
{
    return (member *)c;
}

/* ---- failures ---- */

static void fail_world(world *w, int rank, const lm_err *why)
{
    pthread_mutex_lock(&w->lock);
    if (!atomic_load(&w->failed)) {
        w->why = *why;
        w->rank = rank;
        atomic_store(&w->failed, true);
    }
    pthread_mutex_unlock(&w->lock);
}

static lm_code world_error(world *w, lm_err *e)
{
    pthread_mutex_lock(&w->lock);
    if (!e->code)
        *e = w->why;
    pthread_mutex_unlock(&w->lock);
    return e->code;
}

static lm_code give_up(member *m, const char *what, lm_err *e)
{
    lm_err why = { 0 };

    lm_fail(&why, LM_EIO, what, "see what the others do",
            "rank %d has waited %g s for another rank", m->name, m->comm.patience);
    fail_world(m->group->world, m->name, &why);
    return world_error(m->group->world, e);
}

/* ---- waiting, with the group's lock held ---- */

/* Wait a slice for news; LM_EIO if the world has failed, or the time is over. */
static lm_code wait_slice(member *m, lm_comm_wait *wait, const char *what, lm_err *e)
{
    group *g = m->group;
    struct timespec until;

    if (atomic_load(&g->world->failed))
        return world_error(g->world, e);
    if (lm_comm_wait_is_over(wait, m->comm.patience))
        return give_up(m, what, e);
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_nsec += 50000000;
    if (until.tv_nsec >= 1000000000) {
        until.tv_nsec -= 1000000000;
        until.tv_sec++;
    }
    pthread_cond_timedwait(&g->moved, &g->lock, &until);
    return LM_OK;
}

/* This rank has done its work, or will not do it; wait for that of all others, which ends even after a failure. */
static void part(group *g)
{
    pthread_mutex_lock(&g->lock);
    if (--g->working == 0)
        pthread_cond_broadcast(&g->moved);
    while (g->working > 0)
        pthread_cond_wait(&g->moved, &g->lock);
    pthread_mutex_unlock(&g->lock);
}

static lm_code meet(member *m, const char *what, lm_err *e)
{
    group *g = m->group;
    lm_comm_wait wait = { 0 };
    lm_code rc = LM_OK;

    pthread_mutex_lock(&g->lock);
    if (atomic_load(&g->world->failed)) { /* a group of one does not wait, so it would not notice */
        pthread_mutex_unlock(&g->lock);
        return world_error(g->world, e);
    }
    unsigned long mine = g->meetings;
    if (++g->arrived == g->size) {
        g->arrived = 0;
        g->working = g->size;
        g->meetings++;
        pthread_cond_broadcast(&g->moved);
    }
    while (!rc && g->meetings == mine)
        rc = wait_slice(m, &wait, what, e);
    if (rc)
        g->arrived--; /* the others do not meet without this rank */
    pthread_mutex_unlock(&g->lock);
    return rc;
}

/* ---- collective calls ---- */

static unsigned kind(lm_dtype d, lm_comm_op op)
{
    return (unsigned)d << 8 | (unsigned)op;
}

/* Show the card, meet, and compare with the others': the same call of the same kind, with the same number where `equal`. */
static lm_code begin(member *m, card c, bool equal, lm_err *e)
{
    group *g = m->group;

    g->card[m->comm.rank] = c;
    if (meet(m, call_name[c.call], e))
        return e->code;
    for (int r = 0; r < g->size; r++) {
        const card *other = &g->card[r];

        if (other->call != c.call || other->of != c.of || (equal && other->n != c.n)) {
            lm_err why = { 0 };

            lm_fail(&why, LM_EBUG, call_name[c.call], NULL,
                    "ranks differ: %s of %zu here, %s of %zu on rank %d of the group%s",
                    call_name[c.call], c.n, call_name[other->call], other->n, r,
                    other->call != c.call || other->n != c.n ? ""
                    : c.call == BROADCAST                    ? ", which has another root"
                                                             : ", of another type or operation");
            fail_world(g->world, m->name, &why);
            part(g);
            return world_error(g->world, e);
        }
    }
    return LM_OK;
}

static lm_code end(member *m)
{
    part(m->group);
    return LM_OK;
}

static lm_code threads_barrier(lm_comm *c, lm_err *e)
{
    member *m = member_of(c);
    return begin(m, (card){ .call = BARRIER }, true, e) ? e->code : end(m);
}

/* The operands of all ranks. */
static void gather_in(const group *g, const void *in[])
{
    for (int r = 0; r < g->size; r++)
        in[r] = g->card[r].in;
}

/* Rank r combines the r-th part, which no other rank reads, and writes it to all. */
static lm_code threads_all_reduce(lm_comm *c, const void *in, void *out, size_t n, lm_dtype d,
                                  lm_comm_op op, lm_err *e)
{
    member *m = member_of(c);
    group *g = m->group;
    const void *part[LM_THREAD_RANKS];
    size_t size = lm_dtype_size(d), each = (n + (size_t)g->size - 1) / (size_t)g->size,
           first = each * (size_t)c->rank;

    if (begin(m, (card){ .call = ALL_REDUCE, .in = in, .out = out, .n = n, .of = kind(d, op) },
              true, e))
        return e->code;
    gather_in(g, part);
    if (first < n) {
        size_t count = n - first < each ? n - first : each;
        char *mine = (char *)out + first * size;

        lm_comm_tree(part, g->size, first, count, d, op, mine);
        for (int r = 0; r < g->size; r++)
            if (r != c->rank)
                memcpy((char *)g->card[r].out + first * size, mine, count * size);
    }
    return end(m);
}

static size_t sum_before(const size_t *n, int rank)
{
    size_t sum = 0;

    for (int r = 0; r < rank; r++)
        sum += n[r];
    return sum;
}

static lm_code threads_reduce_scatter(lm_comm *c, const void *in, void *out, const size_t *count,
                                      lm_dtype d, lm_comm_op op, lm_err *e)
{
    member *m = member_of(c);
    const void *part[LM_THREAD_RANKS];
    card mine = {
        .call = REDUCE_SCATTER, .in = in, .n = sum_before(count, c->size), .of = kind(d, op)
    };

    if (begin(m, mine, true, e))
        return e->code;
    gather_in(m->group, part);
    bool big = count[c->rank] * lm_dtype_size(d) >= LM_COMM_BIG;
    (big ? lm_comm_tree_past : lm_comm_tree)(part, c->size, sum_before(count, c->rank),
                                             count[c->rank], d, op, out);
    return end(m);
}

static void copy(void *to, const void *from, size_t bytes)
{
    if (bytes && to != from)
        memcpy(to, from, bytes);
}

static lm_code threads_all_gather(lm_comm *c, const void *in, void *out, const size_t *bytes,
                                  lm_err *e)
{
    member *m = member_of(c);

    if (begin(m, (card){ .call = ALL_GATHER, .in = in, .n = sum_before(bytes, c->size) }, true, e))
        return e->code;
    for (int k = 0; k < c->size; k++) {
        int r = (c->rank + k) % c->size; /* ranks begin at different ones */
        copy((char *)out + sum_before(bytes, r), m->group->card[r].in, bytes[r]);
    }
    return end(m);
}

static lm_code threads_all_to_all(lm_comm *c, const void *in, const size_t *give, void *out,
                                  const size_t *take, lm_err *e)
{
    member *m = member_of(c);

    if (begin(m, (card){ .call = ALL_TO_ALL, .in = in, .give = give }, true, e))
        return e->code;
    for (int k = 0; k < c->size; k++) {
        int r = (c->rank + k) % c->size;
        const card *from = &m->group->card[r];

        if (from->give[c->rank] != take[r]) {
            lm_err why = { 0 };

            lm_fail(&why, LM_EBUG, "all_to_all", NULL,
                    "rank %d gives %zu bytes to rank %d, which takes %zu", r, from->give[c->rank],
                    c->rank, take[r]);
            fail_world(m->group->world, m->name, &why);
            part(m->group);
            return world_error(m->group->world, e);
        }
        copy((char *)out + sum_before(take, r),
             (const char *)from->in + sum_before(from->give, c->rank), take[r]);
    }
    return end(m);
}

static lm_code threads_broadcast(lm_comm *c, void *data, size_t bytes, int root, lm_err *e)
{
    member *m = member_of(c);

    if (begin(m, (card){ .call = BROADCAST, .in = data, .n = bytes, .of = (unsigned)root }, true,
              e))
        return e->code;
    copy(data, m->group->card[root].in, bytes);
    return end(m);
}

/* ---- messages ---- */

static message *between(group *g, int from, int to)
{
    return &g->message[(size_t)from * (size_t)g->size + (size_t)to];
}

static lm_code threads_send(lm_comm *c, int to, const void *data, size_t bytes, lm_err *e)
{
    member *m = member_of(c);
    group *g = m->group;
    message *box = between(g, c->rank, to);
    lm_comm_wait wait = { 0 };
    static const char nothing; /* of no bytes, data may be NULL */
    lm_code rc = LM_OK;

    pthread_mutex_lock(&g->lock);
    *box = (message){ .data = data ? data : &nothing, .bytes = bytes };
    pthread_cond_broadcast(&g->moved);
    while (box->data && (!rc || box->copied)) {
        if (rc)
            pthread_cond_wait(&g->moved, &g->lock);
        else
            rc = wait_slice(m, &wait, "send", e);
    }
    *box = (message){ 0 };
    pthread_mutex_unlock(&g->lock);
    return rc;
}

static lm_code threads_recv(lm_comm *c, int from, void *data, size_t bytes, lm_err *e)
{
    member *m = member_of(c);
    group *g = m->group;
    message *box = between(g, from, c->rank);
    lm_comm_wait wait = { 0 };
    lm_code rc = LM_OK;

    pthread_mutex_lock(&g->lock);
    while (!rc && !box->data)
        rc = wait_slice(m, &wait, "recv", e);
    message got = *box;
    box->copied = !rc && got.bytes == bytes;
    pthread_mutex_unlock(&g->lock);
    if (rc)
        return rc;
    if (got.bytes != bytes) {
        lm_err why = { 0 };

        lm_fail(&why, LM_EBUG, "recv", NULL, "rank %d sends %zu bytes to rank %d, which takes %zu",
                from, got.bytes, c->rank, bytes);
        fail_world(g->world, m->name, &why);
        return world_error(g->world, e);
    }
    copy(data, got.data, bytes);
    pthread_mutex_lock(&g->lock);
    *box = (message){ 0 };
    pthread_cond_broadcast(&g->moved);
    pthread_mutex_unlock(&g->lock);
    return LM_OK;
}

/* ---- groups ---- */

static const lm_transport threads_transport;

static void free_group(group *g)
{
    pthread_mutex_destroy(&g->lock);
    pthread_cond_destroy(&g->moved);
    lm_free(g->card);
    lm_free(g->message);
    lm_free(g->child);
    lm_free(g);
}

static void threads_free(lm_comm *c)
{
    group *g = member_of(c)->group;

    lm_free(c);
    if (atomic_fetch_sub(&g->members, 1) == 1)
        free_group(g);
}

/* A group of `size` ranks without members. */
static lm_code new_group(world *w, int size, group **out, lm_err *e)
{
    group *g;
    size_t n = (size_t)size;
    pthread_condattr_t clock;

    if (lm_alloc_n(&g, 1, sizeof *g, "a group of ranks", e))
        return e->code;
    pthread_mutex_init(&g->lock, NULL);
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(&g->moved, &clock);
    pthread_condattr_destroy(&clock);
    g->world = w;
    g->size = size;
    if (lm_alloc_n(&g->card, n, sizeof *g->card, "a group of ranks", e) ||
        lm_alloc_n(&g->message, n * n, sizeof *g->message, "a group of ranks", e) ||
        lm_alloc_n(&g->child, n, sizeof *g->child, "a group of ranks", e)) {
        free_group(g);
        return e->code;
    }
    *out = g;
    return LM_OK;
}

static lm_code new_member(group *g, int rank, int name, member **out, lm_err *e)
{
    if (lm_alloc_n(out, 1, sizeof **out, "a rank", e))
        return e->code;
    **out = (member){ .comm = { &threads_transport, rank, g->size, g->world->timeout },
                      .group = g,
                      .name = name };
    atomic_fetch_add(&g->members, 1);
    return LM_OK;
}

/* Ranks of the group by key, then rank, that have this color. */
static int sort_color(const group *g, int color, int order[])
{
    int n = 0;

    for (int r = 0; r < g->size; r++) {
        int at = n;

        if (g->card[r].color != color)
            continue;
        for (; at > 0 && g->card[order[at - 1]].key > g->card[r].key; at--)
            order[at] = order[at - 1];
        order[at] = r;
        n++;
    }
    return n;
}

/* The first rank of a color makes the group and all its members. */
static lm_code make_children(member *m, const int *order, int n, lm_err *e)
{
    group *g;

    if (new_group(m->group->world, n, &g, e))
        return e->code;
    for (int i = 0; i < n; i++)
        if (new_member(g, i, -1, &m->group->child[order[i]], e)) {
            if (i == 0) /* the last member frees it */
                free_group(g);
            return e->code;
        }
    return LM_OK;
}

static lm_code threads_split(lm_comm *c, int color, int key, lm_comm **out, lm_err *e)
{
    member *m = member_of(c);
    group *g = m->group;
    int order[LM_THREAD_RANKS], n;

    g->child[c->rank] = NULL;
    if (begin(m, (card){ .call = SPLIT, .color = color, .key = key }, true, e))
        return e->code;
    n = sort_color(g, color, order);
    if (color >= 0 && order[0] == c->rank && make_children(m, order, n, e))
        fail_world(g->world, m->name, e);
    (void)end(m);
    if (color >= 0 && g->child[c->rank]) {
        g->child[c->rank]->name = m->name;
        *out = &g->child[c->rank]->comm;
    }
    return color >= 0 && !*out ? world_error(g->world, e) : LM_OK;
}

static void threads_abort(lm_comm *c, const lm_err *why)
{
    fail_world(member_of(c)->group->world, member_of(c)->name, why);
}

static lm_code threads_look(lm_comm *c, lm_err *e)
{
    world *w = member_of(c)->group->world;
    return atomic_load(&w->failed) ? world_error(w, e) : LM_OK;
}

static bool threads_reports(lm_comm *c)
{
    return !atomic_exchange(&member_of(c)->group->world->reported, true);
}

static const lm_transport threads_transport = {
    .name = "threads",
    .barrier = threads_barrier,
    .all_reduce = threads_all_reduce,
    .reduce_scatter = threads_reduce_scatter,
    .all_gather = threads_all_gather,
    .all_to_all = threads_all_to_all,
    .broadcast = threads_broadcast,
    .send = threads_send,
    .recv = threads_recv,
    .split = threads_split,
    .abort = threads_abort,
    .look = threads_look,
    .reports = threads_reports,
    .free = threads_free,
};

/* ---- running ---- */

typedef struct {
    pthread_t thread;
    member *member;
    lm_rank_fn *fn;
    void *ctx;
} runner;

static void *run_rank(void *p)
{
    runner *r = p;
    lm_err e = { 0 };

    if (r->fn(r->ctx, &r->member->comm, &e))
        lm_comm_abort(&r->member->comm, &e);
    return NULL;
}

/* Make the members; run them; *began: threads that exist. */
static lm_code run_all(group *g, runner *run, lm_rank_fn *fn, void *ctx, int *began, lm_err *e)
{
    for (int r = 0; r < g->size; r++) {
        run[r] = (runner){ .fn = fn, .ctx = ctx };
        if (new_member(g, r, r, &run[r].member, e))
            return e->code;
    }
    for (; *began < g->size; ++*began) {
        int failed = pthread_create(&run[*began].thread, NULL, run_rank, &run[*began]);

        if (failed) {
            errno = failed;
            lm_fail(e, LM_ELIMIT, "ranks", NULL, "thread %d of %d cannot be created", *began,
                    g->size);
            fail_world(g->world, *began, e);
            return e->code;
        }
    }
    return LM_OK;
}

lm_code lm_threads_run(int ranks, double timeout, lm_rank_fn *fn, void *ctx, lm_err *e)
{
    world w = { .timeout = timeout, .lock = PTHREAD_MUTEX_INITIALIZER, .rank = -1 };
    runner *run = NULL;
    group *g;
    int began = 0;

    if (ranks < 1 || ranks > LM_THREAD_RANKS)
        return lm_fail(e, LM_EUSAGE, "ranks", NULL, "%d: 1 to %d can be threads of one process",
                       ranks, LM_THREAD_RANKS);
    if (new_group(&w, ranks, &g, e))
        return e->code;
    if (lm_alloc_n(&run, (size_t)ranks, sizeof *run, "ranks", e)) {
        free_group(g);
        return e->code;
    }
    (void)run_all(g, run, fn, ctx, &began, e);
    for (int r = 0; r < began; r++)
        pthread_join(run[r].thread, NULL);
    if (!e->code && atomic_load(&w.failed)) {
        *e = w.why;
        lm_err_in(e, "rank %d of %d", w.rank, ranks);
    }
    if (!run[0].member)
        free_group(g);
    for (int r = 0; r < ranks; r++)
        lm_comm_free(run[r].member ? &run[r].member->comm : NULL);
    lm_free(run);
    return e->code;
}
