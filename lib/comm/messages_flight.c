/* SPDX-License-Identifier: Apache-2.0 */
/* messages_flight.c -- see messages_impl.h. */
#include <errno.h>
#include <sched.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/mem.h"
#include "comm/messages_impl.h"

static const char *const call_name[] = { "barrier",    "all_reduce", "reduce_scatter",
                                         "all_gather", "all_to_all", "broadcast",
                                         "split",      "send",       "recv" };

/* ---- failures ---- */

lm_code msg_state(msg_world *w, lm_err *e)
{
    if (!atomic_load(&w->failed))
        return LM_OK;
    pthread_mutex_lock(&w->lock);
    if (!e->code)
        *e = w->fail.why;
    pthread_mutex_unlock(&w->lock);
    return e->code;
}

/* Send the notice to all others, for a moment only: a missing rank takes none.  With the lock of the world held. */
static void spread(msg_world *w)
{
    uintptr_t request[64];
    lm_err ignored = { 0 };
    double until = lm_now() + 0.2;

    for (int r = 0, n = 0, at; r < w->wire->size; r++) {
        size_t got;

        if (r != w->wire->rank && !w->wire->send(w->wire, r, MSG_CONTROL_TAG, &w->fail,
                                                 sizeof w->fail, false, &request[n], &ignored))
            n++;
        /* A full window, or the end: wait for what is in flight. */
        for (bool full = n == 64 || r == w->wire->size - 1; full && n > 0 && lm_now() < until;) {
            if (w->wire->test(w->wire, request, n, &at, &got, &ignored))
                break;
            if (at >= 0)
                request[at] = request[--n];
            else
                usleep(100);
        }
        n = n == 64 ? 0 : n;
    }
}

/* The lock is held until the wire has stopped: no call of another thread returns before, because its caller then frees what the
 * wire may be writing. */
static void set_failed(msg_world *w, int blamed, const lm_err *why, bool tell)
{
    pthread_mutex_lock(&w->lock);
    if (!atomic_load(&w->failed)) {
        w->fail = (msg_notice){ blamed, *why };
        atomic_store(&w->failed, true);
        if (tell)
            spread(w);
        w->wire->stop(w->wire);
    }
    pthread_mutex_unlock(&w->lock);
}

static lm_code fail_world(msg_world *w, int blamed, const lm_err *why, lm_err *e)
{
    set_failed(w, blamed, why, true);
    return msg_state(w, e);
}

void msg_abort(lm_comm *c, const lm_err *why)
{
    msg_world *w = msg_member_of(c)->world;
    lm_err named = *why, ignored = { 0 };

    lm_err_in(&named, "rank %d of %d on %s", w->wire->rank, w->wire->size, w->host[w->wire->rank]);
    fail_world(w, w->wire->rank, &named, &ignored);
}

lm_code msg_fail_here(msg_member *m, const lm_err *why, lm_err *e)
{
    msg_abort(&m->comm, why);
    return msg_state(m->world, e);
}

/* A call to the wire has failed: its error becomes that of all. */
static lm_code fail_wire(msg_member *m, int peer, msg_call call, const lm_err *why, lm_err *e)
{
    msg_world *w = m->world;
    lm_err all = { 0 };

    errno = 0;
    lm_fail(&all, LM_EIO, call_name[call], "see what it did",
            "rank %d of %d on %s cannot be reached: %s: %.150s", m->name[peer], w->wire->size,
            w->host[m->name[peer]], why->where, why->what);
    return fail_world(w, m->name[peer], &all, e);
}

static lm_code give_up(msg_member *m, int peer, msg_call call, lm_err *e)
{
    msg_world *w = m->world;
    lm_err why = { 0 };

    errno = 0;
    lm_fail(&why, LM_EIO, call_name[call], "see what it did",
            "rank %d of %d on %s has not come in %g s", m->name[peer], w->wire->size,
            w->host[m->name[peer]], m->comm.patience);
    return fail_world(w, m->name[peer], &why, e);
}

/* Another rank may have sent a notice. */
static lm_code look_for_notice(msg_world *w, lm_err *e)
{
    msg_notice got;
    bool there = false;
    lm_err ignored = { 0 };

    if (!w->wire->poll(w->wire, MSG_CONTROL_TAG, &got, sizeof got, &there, &ignored) && there)
        set_failed(w, got.blamed, &got.why, false);
    return msg_state(w, e);
}

lm_code msg_look(lm_comm *c, lm_err *e)
{
    return look_for_notice(msg_member_of(c)->world, e);
}

/* ---- requests ---- */

/* Before a message begins: one that has begun must not be forgotten. */
static lm_code make_room(msg_member *m, msg_batch *b, lm_err *e)
{
    lm_err why = { 0 };

    if (lm_grow(&b->request, &b->cap, b->n + 1, sizeof *b->request, "messages in flight", &why) ||
        lm_grow(&b->about, &b->cap_about, b->n + 1, sizeof *b->about, "messages in flight", &why))
        return msg_fail_here(m, &why, e);
    return LM_OK;
}

static void add(msg_batch *b, uintptr_t request, msg_flight about)
{
    b->request[b->n] = request;
    b->about[b->n++] = about;
}

lm_code msg_send(msg_member *m, msg_batch *b, msg_call call, int to, int tag, const void *data,
                 size_t bytes, lm_err *e)
{
    lm_wire *w = m->world->wire;
    lm_err why = { 0 };
    uintptr_t request;

    if (make_room(m, b, e))
        return e->code;
    if (w->send(w, m->name[to], tag, data, bytes, call == MSG_SEND, &request, &why))
        return fail_wire(m, to, call, &why, e);
    add(b, request, (msg_flight){ .peer = to, .want = SIZE_MAX });
    return LM_OK;
}

lm_code msg_recv(msg_member *m, msg_batch *b, msg_call call, int from, int tag, void *data,
                 size_t bytes, bool is_card, lm_err *e)
{
    lm_wire *w = m->world->wire;
    lm_err why = { 0 };
    uintptr_t request;

    if (make_room(m, b, e))
        return e->code;
    if (w->recv(w, m->name[from], tag, data, bytes, &request, &why))
        return fail_wire(m, from, call, &why, e);
    add(b, request, (msg_flight){ .peer = from, .want = bytes, .is = is_card ? data : NULL });
    return LM_OK;
}

lm_code msg_part(msg_member *m, msg_batch *b, msg_call call, int peer, bool out, char *data,
                 size_t bytes, lm_err *e)
{
    size_t most = m->world->wire->most;
    lm_code rc = LM_OK;

    for (size_t at = 0; at < bytes && !rc; at += most) {
        size_t n = bytes - at < most ? bytes - at : most;

        rc = out ? msg_send(m, b, call, peer, m->tag, data + at, n, e)
                 : msg_recv(m, b, call, peer, m->tag, data + at, n, false, e);
    }
    return rc;
}

static lm_code check_card(msg_member *m, const msg_card *other, int peer, lm_err *e)
{
    const msg_card *mine = &m->mine;
    lm_err why = { 0 };

    if (!memcmp(mine, other, sizeof *mine))
        return LM_OK;
    lm_fail(&why, LM_EBUG, call_name[mine->call], NULL,
            "ranks differ: %s of %zu here, %s of %zu on rank %d of the group",
            call_name[mine->call], (size_t)mine->n,
            other->call <= MSG_RECV ? call_name[other->call] : "?", (size_t)other->n, peer);
    return msg_fail_here(m, &why, e);
}

static lm_code check_arrival(msg_member *m, const msg_flight *f, size_t got, msg_call call,
                             lm_err *e)
{
    lm_err why = { 0 };

    if (f->want == SIZE_MAX || got == f->want)
        return f->is ? check_card(m, f->is, f->peer, e) : LM_OK;
    lm_fail(&why, LM_EBUG, call_name[call], NULL,
            "rank %d sends %s bytes than the %zu that rank %d takes", f->peer,
            got < f->want ? "fewer" : "more", f->want, m->comm.rank);
    return msg_fail_here(m, &why, e);
}

lm_code msg_finish(msg_member *m, msg_batch *b, msg_call call, lm_err *e)
{
    lm_wire *w = m->world->wire;
    lm_comm_wait wait = { 0 };

    for (unsigned idle = 0; b->n > 0; idle++) {
        lm_err why = { 0 };
        size_t got = 0;
        int at = -1;

        if (w->test(w, b->request, (int)b->n, &at, &got, &why))
            return fail_wire(m, b->about[at < 0 ? 0 : at].peer, call, &why, e);
        if (at >= 0) {
            msg_flight f = b->about[at];

            b->n--;
            b->request[at] = b->request[b->n];
            b->about[at] = b->about[b->n];
            if (check_arrival(m, &f, got, call, e))
                return e->code;
            wait = (lm_comm_wait){ 0 };
            idle = 0;
        } else if (idle % 32 == 31) {
            if (look_for_notice(m->world, e))
                return e->code;
            if (lm_comm_wait_is_over(&wait, m->comm.patience * (1 + b->behind / 8.0)))
                return give_up(m, b->about[0].peer, call, e);
            if (idle < 2000)
                sched_yield();
            else
                usleep(idle < 10000 ? 50 : 500);
        }
    }
    return LM_OK;
}

lm_code msg_cards(msg_member *m, msg_batch *b, msg_card mine, lm_err *e)
{
    lm_code rc = msg_state(m->world, e);

    m->mine = mine;
    for (int i = 1; i < m->comm.size && !rc; i++) {
        int r = (m->comm.rank + i) % m->comm.size;

        rc = msg_recv(m, b, (msg_call)mine.call, r, m->tag, &m->card[r], sizeof mine, true, e);
        rc = rc ? rc : msg_send(m, b, (msg_call)mine.call, r, m->tag, &m->mine, sizeof mine, e);
    }
    return rc;
}
