/* SPDX-License-Identifier: Apache-2.0 */
/* messages.c -- see messages.h. */
#include "comm/messages.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/mem.h"
#include "comm/messages_impl.h"

enum {
    SCRATCH = 16 << 20,
    SMALL = 16 << 10, /* an operand that every rank combines for itself */
    FLIGHT = 4,       /* pieces of one message from rank to rank */
};

static size_t sum_before(const size_t *n, int rank)
{
    size_t sum = 0;

    for (int r = 0; r < rank; r++)
        sum += n[r];
    return sum;
}

static void copy(void *to, const void *from, size_t bytes)
{
    if (bytes && to != from)
        memcpy(to, from, bytes);
}

/* ---- calls ---- */

/* Rank r reads r-1, r-2, r-4, ... back: after as many rounds, all have come. */
static lm_code messages_barrier(lm_comm *c, lm_err *e)
{
    msg_member *m = msg_member_of(c);
    lm_code rc = msg_state(m->world, e);

    m->mine = (msg_card){ .call = MSG_BARRIER };
    for (int step = 1; step < c->size && !rc; step *= 2) {
        int to = (c->rank + step) % c->size, from = (c->rank - step + c->size) % c->size;

        rc = msg_recv(m, m->batch, MSG_BARRIER, from, m->tag, &m->card[from], sizeof(msg_card),
                      true, e);
        rc =
            rc ? rc : msg_send(m, m->batch, MSG_BARRIER, to, m->tag, &m->mine, sizeof(msg_card), e);
        rc = rc ? rc : msg_finish(m, m->batch, MSG_BARRIER, e);
        m->batch->behind++;
    }
    m->batch->behind = 0;
    return rc;
}

/* give and take may be of different ranks in the same order of messages for each pair. */
static lm_code exchange(msg_member *m, msg_card mine, const char *in, const size_t *give, bool same,
                        char *out, const size_t *take, lm_err *e)
{
    msg_call call = (msg_call)mine.call;
    lm_code rc = msg_cards(m, m->batch, mine, e);

    for (int i = 1; i < m->comm.size && !rc; i++) {
        int r = (m->comm.rank + i) % m->comm.size,
            q = (m->comm.rank - i + m->comm.size) % m->comm.size;
        char *from = (char *)in + (same ? 0 : sum_before(give, r));

        rc = msg_part(m, m->batch, call, q, false, out + sum_before(take, q), take[q], e);
        rc = rc ? rc : msg_part(m, m->batch, call, r, true, from, give[r], e);
    }
    return rc ? rc : msg_finish(m, m->batch, call, e);
}

static lm_code messages_all_to_all(lm_comm *c, const void *in, const size_t *give, void *out,
                                   const size_t *take, lm_err *e)
{
    msg_member *m = msg_member_of(c);
    size_t own = give[c->rank];
    lm_err why = { 0 };

    if (own != take[c->rank]) {
        lm_fail(&why, LM_EBUG, "all_to_all", NULL,
                "rank %d gives %zu bytes to itself, and takes %zu", c->rank, own, take[c->rank]);
        return msg_fail_here(m, &why, e);
    }
    copy((char *)out + sum_before(take, c->rank), (const char *)in + sum_before(give, c->rank),
         own);
    return exchange(m, (msg_card){ .call = MSG_ALL_TO_ALL }, in, give, false, out, take, e);
}

static lm_code gather(msg_member *m, msg_call call, const void *in, void *out, const size_t *bytes,
                      lm_err *e)
{
    int me = m->comm.rank;

    copy((char *)out + sum_before(bytes, me), in, bytes[me]);
    for (int r = 0; r < m->comm.size; r++)
        m->bytes[0][r] = bytes[me];
    return exchange(m, (msg_card){ .call = call, .n = sum_before(bytes, m->comm.size) }, in,
                    m->bytes[0], true, out, bytes, e);
}

static lm_code messages_all_gather(lm_comm *c, const void *in, void *out, const size_t *bytes,
                                   lm_err *e)
{
    return gather(msg_member_of(c), MSG_ALL_GATHER, in, out, bytes, e);
}

/* From the root along the branches of a binary tree over the ranks behind it. */
static lm_code messages_broadcast(lm_comm *c, void *data, size_t bytes, int root, lm_err *e)
{
    msg_member *m = msg_member_of(c);
    int me = (c->rank - root + c->size) % c->size, step = 1; /* behind the root */
    lm_code rc = msg_state(m->world, e);

    m->mine = (msg_card){ .call = MSG_BROADCAST, .n = bytes };
    for (; step < c->size && !(me & step); step *= 2)
        ;
    if (me) {
        int from = (me - step + root) % c->size;

        rc = rc ? rc
                : msg_recv(m, m->batch, MSG_BROADCAST, from, m->tag, &m->card[from],
                           sizeof(msg_card), true, e);
        rc = rc ? rc : msg_part(m, m->batch, MSG_BROADCAST, from, false, data, bytes, e);
        m->batch->behind = __builtin_popcount((unsigned)me) - 1;
        rc = rc ? rc : msg_finish(m, m->batch, MSG_BROADCAST, e);
        m->batch->behind = 0;
    }
    for (step /= 2; step > 0 && !rc; step /= 2) {
        int to = (me + step + root) % c->size;

        if (me + step >= c->size)
            continue;
        rc = msg_send(m, m->batch, MSG_BROADCAST, to, m->tag, &m->mine, sizeof(msg_card), e);
        rc = rc ? rc : msg_part(m, m->batch, MSG_BROADCAST, to, true, data, bytes, e);
    }
    return rc ? rc : msg_finish(m, m->batch, MSG_BROADCAST, e);
}

/* ---- reductions ---- */

typedef struct {
    msg_member *m;
    msg_call call;
    const char *in;
    char *out;
    const size_t *count;
    size_t size, piece; /* bytes of an element; elements of a piece */
    lm_dtype type;
    lm_comm_op op;
} reduction;

static size_t in_piece(size_t n, size_t k, size_t piece)
{
    size_t at = k * piece;

    return at >= n ? 0 : n - at < piece ? n - at : piece;
}

/* Where the piece of rank r is received: the halves of the scratch alternate. */
static char *received(const reduction *x, size_t k, int r)
{
    return (char *)x->m->scratch +
           ((k % 2) * (size_t)x->m->comm.size + (size_t)r) * x->piece * x->size;
}

static lm_code post_piece(reduction *x, size_t k, lm_err *e)
{
    msg_member *m = x->m;
    msg_batch *b = &m->batch[k % 2];
    int me = m->comm.rank;
    lm_code rc = LM_OK;

    for (int i = 1; i < m->comm.size && !rc; i++) {
        int r = (me + i) % m->comm.size, q = (me - i + m->comm.size) % m->comm.size;
        char *from = (char *)x->in + (sum_before(x->count, r) + k * x->piece) * x->size;

        rc = msg_part(m, b, x->call, q, false, received(x, k, q),
                      in_piece(x->count[me], k, x->piece) * x->size, e);
        rc = rc ? rc
                : msg_part(m, b, x->call, r, true, from,
                           in_piece(x->count[r], k, x->piece) * x->size, e);
    }
    return rc;
}

static lm_code combine_piece(reduction *x, size_t k, const void **part, lm_err *e)
{
    msg_member *m = x->m;
    int me = m->comm.rank;

    if (msg_finish(m, &m->batch[k % 2], x->call, e))
        return e->code;
    for (int r = 0; r < m->comm.size; r++)
        part[r] = received(x, k, r);
    part[me] = x->in + (sum_before(x->count, me) + k * x->piece) * x->size;
    lm_comm_tree(part, m->comm.size, 0, in_piece(x->count[me], k, x->piece), x->type, x->op,
                 x->out + k * x->piece * x->size);
    return LM_OK;
}

/* Scratch for what all ranks send at once. */
static lm_code make_scratch(msg_member *m, size_t bytes, lm_err *e)
{
    if (bytes <= m->scratch_bytes)
        return LM_OK;
    lm_free(m->scratch);
    m->scratch = NULL;
    m->scratch_bytes = 0;
    if (lm_alloc_n(&m->scratch, bytes, 1, "scratch of reductions", e))
        return msg_fail_here(m, e, e);
    m->scratch_bytes = bytes;
    return LM_OK;
}

static lm_code reduce_parts(msg_member *m, msg_call call, const void *in, void *out,
                            const size_t *count, lm_dtype d, lm_comm_op op, lm_err *e)
{
    size_t n = (size_t)m->comm.size, size = lm_dtype_size(d), longest = 0, steps;
    reduction x = { m, call, in, out, count, size, 0, d, op };
    const void **part = NULL;
    lm_code rc;

    for (size_t r = 0; r < n; r++)
        longest = count[r] > longest ? count[r] : longest;
    x.piece = m->world->scratch / 2 / n / 64 * 64 / size;
    x.piece = x.piece < 64 ? 64 : x.piece > longest ? longest + !longest : x.piece;
    steps = (longest + x.piece - 1) / x.piece;
    if (make_scratch(m, 2 * n * x.piece * size, e))
        return e->code;
    if (lm_alloc_n(&part, n, sizeof *part, "parts of ranks", e))
        return msg_fail_here(m, e, e);
    rc = msg_cards(m, m->batch,
                   (msg_card){ call, (uint32_t)d << 8 | (uint32_t)op, sum_before(count, (int)n) },
                   e);
    for (size_t k = 0; k <= steps && !rc; k++) {
        if (k < steps)
            rc = post_piece(&x, k, e);
        if (k > 0 && !rc)
            rc = combine_piece(&x, k - 1, part, e);
    }
    lm_free(part);
    return rc ? rc : msg_finish(m, m->batch, call, e);
}

static lm_code messages_reduce_scatter(lm_comm *c, const void *in, void *out, const size_t *count,
                                       lm_dtype d, lm_comm_op op, lm_err *e)
{
    return reduce_parts(msg_member_of(c), MSG_REDUCE_SCATTER, in, out, count, d, op, e);
}

/* Everyone gets all operands, and combines them for itself. */
static lm_code reduce_small(msg_member *m, const void *in, void *out, size_t n, lm_dtype d,
                            lm_comm_op op, lm_err *e)
{
    size_t ranks = (size_t)m->comm.size, bytes = n * lm_dtype_size(d);
    size_t room = (bytes + 63) / 64 * 64; /* of each operand */
    const void **part = NULL;

    if (make_scratch(m, ranks * room + 64, e))
        return e->code;
    if (lm_alloc_n(&part, ranks, sizeof *part, "parts of ranks", e))
        return msg_fail_here(m, e, e);
    lm_code rc =
        msg_cards(m, m->batch, (msg_card){ MSG_ALL_REDUCE, (uint32_t)d << 8 | (uint32_t)op, n }, e);
    for (int r = 0; r < m->comm.size && !rc; r++) {
        char *place = (char *)m->scratch + (size_t)r * room;

        part[r] = place;
        if (r == m->comm.rank) {
            copy(place, in, bytes); /* out may be in, while in is being sent */
            continue;
        }
        rc = msg_part(m, m->batch, MSG_ALL_REDUCE, r, false, place, bytes, e);
    }
    for (int r = 0; r < m->comm.size && !rc; r++)
        if (r != m->comm.rank)
            rc = msg_part(m, m->batch, MSG_ALL_REDUCE, r, true,
                          (char *)m->scratch + (size_t)m->comm.rank * room, bytes, e);
    rc = rc ? rc : msg_finish(m, m->batch, MSG_ALL_REDUCE, e);
    if (!rc && n)
        lm_comm_tree(part, m->comm.size, 0, n, d, op, out);
    lm_free(part);
    return rc;
}

static lm_code messages_all_reduce(lm_comm *c, const void *in, void *out, size_t n, lm_dtype d,
                                   lm_comm_op op, lm_err *e)
{
    msg_member *m = msg_member_of(c);
    size_t size = lm_dtype_size(d), *count = m->bytes[1], ranks = (size_t)c->size;

    if (n * size <= SMALL)
        return reduce_small(m, in, out, n, d, op, e);
    for (size_t r = 0; r < ranks; r++)
        count[r] = n / ranks + (r < n % ranks);
    char *mine = (char *)out + sum_before(count, c->rank) * size;
    if (reduce_parts(m, MSG_ALL_REDUCE, in, mine, count, d, op, e))
        return e->code;
    for (size_t r = 0; r < ranks; r++)
        count[r] *= size;
    return gather(m, MSG_ALL_REDUCE, mine, out, count, e);
}

/* ---- messages ---- */

/* Some pieces at once, in a batch of their own: the other direction may be used by another thread. */
static lm_code message(msg_member *m, msg_call call, int peer, char *data, size_t bytes, lm_err *e)
{
    msg_batch b = { 0 };
    size_t most = m->world->wire->most, at = 0;
    lm_code rc = msg_state(m->world, e);

    for (bool more = true; more && !rc; more = at < bytes) {
        for (int i = 0; i < FLIGHT && !rc && (at < bytes || (!bytes && !i)); i++) {
            size_t n = bytes - at < most ? bytes - at : most;

            rc = call == MSG_SEND ? msg_send(m, &b, call, peer, m->tag + 1, data + at, n, e)
                                  : msg_recv(m, &b, call, peer, m->tag + 1, data + at, n, false, e);
            at += n;
        }
        rc = rc ? rc : msg_finish(m, &b, call, e);
    }
    lm_free(b.request);
    lm_free(b.about);
    return rc;
}

static lm_code messages_send(lm_comm *c, int to, const void *data, size_t bytes, lm_err *e)
{
    return message(msg_member_of(c), MSG_SEND, to, (char *)data, bytes, e);
}

static lm_code messages_recv(lm_comm *c, int from, void *data, size_t bytes, lm_err *e)
{
    return message(msg_member_of(c), MSG_RECV, from, data, bytes, e);
}

/* ---- groups ---- */

static const lm_transport messages_transport;

static void drop_world(msg_world *w)
{
    if (atomic_fetch_sub(&w->users, 1) != 1)
        return;
    if (!w->keep)
        w->wire->close(w->wire, atomic_load(&w->failed));
    pthread_mutex_destroy(&w->lock);
    lm_free(w->host);
    lm_free(w);
}

static void messages_free(lm_comm *c)
{
    msg_member *m = msg_member_of(c);
    msg_world *w = m->world;

    for (int i = 0; i < 2; i++) {
        lm_free(m->batch[i].request);
        lm_free(m->batch[i].about);
        lm_free(m->bytes[i]);
    }
    lm_free(m->scratch);
    lm_free(m->card);
    lm_free(m->name);
    lm_free(m);
    drop_world(w);
}

static lm_code new_member(msg_world *w, int rank, int size, int tag, msg_member **out, lm_err *e)
{
    msg_member *m;
    size_t n = (size_t)size;

    if (lm_alloc_n(&m, 1, sizeof *m, "a rank", e))
        return e->code;
    *m = (msg_member){ .comm = { &messages_transport, rank, size, w->timeout },
                       .world = w,
                       .tag = tag };
    atomic_fetch_add(&w->users, 1);
    if (lm_alloc_n(&m->name, n, sizeof *m->name, "a rank", e) ||
        lm_alloc_n(&m->card, n, sizeof *m->card, "a rank", e) ||
        lm_alloc_n(&m->bytes[0], n, sizeof **m->bytes, "a rank", e) ||
        lm_alloc_n(&m->bytes[1], n, sizeof **m->bytes, "a rank", e)) {
        messages_free(&m->comm);
        return e->code;
    }
    *out = m;
    return LM_OK;
}

typedef struct {
    int color, key, name, tag;
} wish;

/* Ranks of this color by key, then rank, out of a group's wishes. */
static void name_members(const wish *all, int size, int color, int me, int *name, int *rank,
                         int *count)
{
    int n = 0;

    *rank = 0;
    for (int r = 0; r < size; r++) {
        int at = 0;

        if (all[r].color != color)
            continue;
        for (int q = 0; q < size; q++)
            at += all[q].color == color &&
                  (all[q].key < all[r].key || (all[q].key == all[r].key && q < r));
        if (name)
            name[at] = all[r].name;
        *rank = r == me ? at : *rank;
        n++;
    }
    *count = n;
}

/* Groups of different colors share no rank, so they may have one tag: the next that no member has used. */
static lm_code make_group(msg_member *m, const wish *all, int color, msg_member **out, lm_err *e)
{
    msg_world *w = m->world;
    int tag = 0, rank, n;

    for (int r = 0; r < m->comm.size; r++)
        tag = all[r].tag > tag ? all[r].tag : tag;
    atomic_store(&w->next_tag, tag + 2);
    if (color < 0)
        return LM_OK;
    if (tag + 1 >= w->wire->tags)
        return lm_fail(e, LM_ELIMIT, "split", NULL, "%d groups are more than %s can tell apart",
                       tag / 2, w->wire->name);
    name_members(all, m->comm.size, color, m->comm.rank, NULL, &rank, &n);
    if (new_member(w, rank, n, tag, out, e))
        return e->code;
    name_members(all, m->comm.size, color, m->comm.rank, (*out)->name, &rank, &n);
    return LM_OK;
}

static lm_code messages_split(lm_comm *c, int color, int key, lm_comm **out, lm_err *e)
{
    msg_member *m = msg_member_of(c), *child = NULL;
    size_t n = (size_t)c->size;
    wish mine = { color < 0 ? -1 : color, key, m->name[c->rank], atomic_load(&m->world->next_tag) },
         *all = NULL;

    if (lm_alloc_n(&all, n, sizeof *all, "a group of ranks", e))
        return msg_fail_here(m, e, e);
    for (size_t r = 0; r < n; r++)
        m->bytes[1][r] = sizeof *all;
    if (!gather(m, MSG_SPLIT, &mine, all, m->bytes[1], e) &&
        make_group(m, all, mine.color, &child, e))
        msg_fail_here(m, e, e);
    lm_free(all);
    *out = child ? &child->comm : NULL;
    return e->code;
}

/* The lowest rank of this host that is not itself the cause. */
static bool messages_reports(lm_comm *c)
{
    const msg_world *w = msg_member_of(c)->world;
    int me = w->wire->rank, blamed = atomic_load(&w->failed) ? w->fail.blamed : -1;

    for (int r = 0; r < me; r++)
        if (r != blamed && !strcmp(w->host[r], w->host[me]))
            return false;
    return true;
}

static const lm_transport messages_transport = {
    .name = "mpi",
    .barrier = messages_barrier,
    .all_reduce = messages_all_reduce,
    .reduce_scatter = messages_reduce_scatter,
    .all_gather = messages_all_gather,
    .all_to_all = messages_all_to_all,
    .broadcast = messages_broadcast,
    .send = messages_send,
    .recv = messages_recv,
    .split = messages_split,
    .abort = msg_abort,
    .look = msg_look,
    .reports = messages_reports,
    .free = messages_free,
};

/* Every rank learns the host of every other one. */
static lm_code open_world(msg_world *w, msg_member **out, lm_err *e)
{
    size_t n = (size_t)w->wire->size;
    char mine[MSG_HOST] = "";
    msg_member *m;

    if (lm_alloc_n(&w->host, n, sizeof *w->host, "ranks", e) ||
        new_member(w, w->wire->rank, w->wire->size, MSG_FIRST_TAG, &m, e))
        return e->code;
    for (size_t r = 0; r < n; r++) {
        m->name[r] = (int)r;
        m->bytes[1][r] = MSG_HOST;
        snprintf(w->host[r], MSG_HOST, "an unknown host");
    }
    if (gethostname(mine, sizeof mine - 1))
        snprintf(mine, sizeof mine, "?");
    if (gather(m, MSG_ALL_GATHER, mine, w->host, m->bytes[1], e)) {
        messages_free(&m->comm);
        return e->code;
    }
    *out = m;
    return LM_OK;
}

lm_code lm_messages_open(lm_wire *wire, double timeout, size_t scratch, bool keep, lm_comm **out,
                         lm_err *e)
{
    msg_world *w;
    msg_member *m = NULL;

    *out = NULL;
    if (lm_alloc_n(&w, 1, sizeof *w, "ranks", e))
        return e->code;
    w->wire = wire;
    w->timeout = timeout;
    w->scratch = scratch ? scratch : SCRATCH;
    w->keep = true;
    atomic_store(&w->users, 1);
    atomic_store(&w->next_tag, MSG_FIRST_TAG + 2);
    pthread_mutex_init(&w->lock, NULL);
    if (!open_world(w, &m, e)) {
        w->keep = keep;
        *out = &m->comm;
    }
    drop_world(w);
    return e->code;
}
