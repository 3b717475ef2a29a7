/* SPDX-License-Identifier: Apache-2.0 */
/* lane.c -- a thread that sends or receives what is in its queue. */
#include "comm/lane.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>

#include "base/mem.h"

/* Room for a copy of a message. */
typedef struct copy {
    struct copy *next; /* in the list of unused ones */
    size_t room;
    char data[];
} copy;

typedef struct {
    void *data;
    size_t bytes;
    copy *own; /* holds the data; NULL: the caller does */
} message;

struct lm_lane {
    lm_comm *comm;
    int peer;
    bool out;
    pthread_t thread;
    pthread_mutex_t lock; /* of what follows */
    pthread_cond_t moved;
    message *queue; /* message number k is queue[(k - 1) % cap] */
    size_t cap;
    copy *unused;
    uint64_t begun, done; /* numbers */
    bool ends;
    lm_err failure;
};

static void *run(void *ctx)
{
    lm_lane *l = ctx;
    pthread_mutex_lock(&l->lock);
    for (;;) {
        while (l->done == l->begun && !l->ends)
            pthread_cond_wait(&l->moved, &l->lock);
        if (l->done == l->begun)
            break;
        const message m = l->queue[l->done % l->cap];
        lm_err e = l->failure;
        pthread_mutex_unlock(&l->lock);
        if (!e.code && l->out)
            lm_comm_send(l->comm, l->peer, m.data, m.bytes, &e);
        else if (!e.code)
            lm_comm_recv(l->comm, l->peer, m.data, m.bytes, &e);
        pthread_mutex_lock(&l->lock);
        l->failure = e;
        l->done++;
        if (m.own) {
            m.own->next = l->unused;
            l->unused = m.own;
        }
        pthread_cond_broadcast(&l->moved);
    }
    pthread_mutex_unlock(&l->lock);
    return NULL;
}

lm_code lm_lane_new(lm_comm *c, int peer, bool out, lm_lane **lane, lm_err *e)
{
    lm_lane *l = NULL;
    *lane = NULL;
    if (lm_alloc_n(&l, 1, sizeof *l, "messages", e))
        return e->code;
    l->comm = c;
    l->peer = peer;
    l->out = out;
    pthread_mutex_init(&l->lock, NULL);
    pthread_cond_init(&l->moved, NULL);
    const int failed = pthread_create(&l->thread, NULL, run, l);
    if (!failed) {
        *lane = l;
        return LM_OK;
    }
    errno = failed;
    lm_fail(e, LM_ELIMIT, "messages", NULL, "a thread cannot be created");
    pthread_mutex_destroy(&l->lock);
    pthread_cond_destroy(&l->moved);
    lm_free(l);
    return e->code;
}

void lm_lane_free(lm_lane *l)
{
    if (!l)
        return;
    pthread_mutex_lock(&l->lock);
    l->ends = true;
    pthread_cond_broadcast(&l->moved);
    pthread_mutex_unlock(&l->lock);
    pthread_join(l->thread, NULL);
    pthread_mutex_destroy(&l->lock);
    pthread_cond_destroy(&l->moved);
    while (l->unused) {
        copy *next = l->unused->next;
        lm_free(l->unused);
        l->unused = next;
    }
    lm_free(l->queue);
    lm_free(l);
}

/* Twice as many messages may be in the queue. */
static lm_code widen(lm_lane *l, lm_err *e)
{
    const size_t cap = l->cap ? 2 * l->cap : 16;
    message *queue = NULL;
    if (lm_alloc_n(&queue, cap, sizeof *queue, "messages", e))
        return e->code;
    for (uint64_t k = l->done; k < l->begun; k++)
        queue[k % cap] = l->queue[k % l->cap];
    lm_free(l->queue);
    l->queue = queue;
    l->cap = cap;
    return LM_OK;
}

static lm_code begin(lm_lane *l, message m, uint64_t *number, lm_err *e)
{
    lm_code rc = LM_OK;
    pthread_mutex_lock(&l->lock);
    if (l->begun - l->done == l->cap)
        rc = widen(l, e);
    if (!rc) {
        l->queue[l->begun % l->cap] = m;
        *number = ++l->begun;
        pthread_cond_broadcast(&l->moved);
    }
    pthread_mutex_unlock(&l->lock);
    return rc;
}

lm_code lm_lane_take(lm_lane *l, void *data, size_t bytes, uint64_t *number, lm_err *e)
{
    return begin(l, (message){ .data = data, .bytes = bytes }, number, e);
}

/* Take an unused copy with enough room out of its list.  NULL if no copy is large enough. */
static copy *find_copy(lm_lane *l, size_t bytes)
{
    pthread_mutex_lock(&l->lock);
    copy **at = &l->unused;
    while (*at && (*at)->room < bytes)
        at = &(*at)->next;
    copy *found = *at;
    if (found)
        *at = found->next;
    pthread_mutex_unlock(&l->lock);
    return found;
}

lm_code lm_lane_give(lm_lane *l, const void *data, size_t bytes, uint64_t *number, lm_err *e)
{
    copy *c = find_copy(l, bytes);
    if (!c && lm_alloc_n(&c, 1, sizeof *c + bytes, "a message", e))
        return e->code;
    c->room = c->room < bytes ? bytes : c->room;
    if (bytes)
        memcpy(c->data, data, bytes);
    if (begin(l, (message){ c->data, bytes, c }, number, e))
        lm_free(c);
    return e->code;
}

lm_code lm_lane_wait(lm_lane *l, uint64_t number, lm_err *e)
{
    pthread_mutex_lock(&l->lock);
    while (l->done < number)
        pthread_cond_wait(&l->moved, &l->lock);
    if (l->failure.code)
        *e = l->failure;
    pthread_mutex_unlock(&l->lock);
    return e->code;
}
