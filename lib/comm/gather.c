/* SPDX-License-Identifier: Apache-2.0 */
/* gather.c -- a thread that gathers what is in its queue. */
#include "comm/gather.h"

#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>

#include "base/clock.h"
#include "base/mem.h"

typedef struct {
    const void *in;
    void *out;
    size_t *bytes;       /* [ranks] its own */
    double began, ended; /* seconds of the clock */
    double waiting;      /* since when the rank waits; INFINITY: it does not yet */
} request;

struct lm_gatherer {
    lm_comm *comm;
    pthread_t thread;
    pthread_mutex_t lock; /* of what follows */
    pthread_cond_t moved;
    request *queue; /* number k is queue[k % cap], until it has been waited for */
    size_t cap;
    uint64_t begun, done, ended; /* numbers: ended: waited for */
    bool ends;
    lm_err failure;
    double busy, waited;    /* seconds of the thread in gathers, and of the rank for them */
    lm_gatherer_seen *seen; /* NULL: no watcher */
    void *ctx;
};

static void *run(void *ctx)
{
    lm_gatherer *g = ctx;
    pthread_mutex_lock(&g->lock);
    for (;;) {
        while (g->done == g->begun && !g->ends)
            pthread_cond_wait(&g->moved, &g->lock);
        if (g->done == g->begun)
            break;
        const request r = g->queue[g->done % g->cap];
        lm_err e = g->failure;
        pthread_mutex_unlock(&g->lock);
        const double began = lm_now();
        if (!e.code)
            lm_comm_all_gather(g->comm, r.in, r.out, r.bytes, &e);
        const double ended = lm_now();
        pthread_mutex_lock(&g->lock);
        request *at = &g->queue[g->done % g->cap]; /* the queue may have grown */
        at->began = began;
        at->ended = ended;
        g->busy += ended - began;
        g->failure = e;
        g->done++;
        pthread_cond_broadcast(&g->moved);
    }
    pthread_mutex_unlock(&g->lock);
    return NULL;
}

lm_code lm_gatherer_new(lm_comm *c, lm_gatherer **out, lm_err *e)
{
    lm_gatherer *g = NULL;
    *out = NULL;
    if (lm_alloc_n(&g, 1, sizeof *g, "gathers", e))
        return e->code;
    g->comm = c;
    pthread_mutex_init(&g->lock, NULL);
    pthread_cond_init(&g->moved, NULL);
    const int failed = pthread_create(&g->thread, NULL, run, g);
    if (!failed) {
        *out = g;
        return LM_OK;
    }
    errno = failed;
    lm_fail(e, LM_ELIMIT, "gathers", NULL, "a thread cannot be created");
    pthread_mutex_destroy(&g->lock);
    pthread_cond_destroy(&g->moved);
    lm_free(g);
    return e->code;
}

static void free_queue(lm_gatherer *g)
{
    for (size_t k = 0; k < g->cap; k++)
        lm_free(g->queue[k].bytes);
    lm_free(g->queue);
}

void lm_gatherer_free(lm_gatherer *g)
{
    if (!g)
        return;
    pthread_mutex_lock(&g->lock);
    g->ends = true;
    pthread_cond_broadcast(&g->moved);
    pthread_mutex_unlock(&g->lock);
    pthread_join(g->thread, NULL);
    pthread_mutex_destroy(&g->lock);
    pthread_cond_destroy(&g->moved);
    free_queue(g);
    lm_free(g);
}

/* Twice as many may be in the queue; the thread reads it under the lock alone. */
static lm_code widen(lm_gatherer *g, lm_err *e)
{
    const size_t cap = g->cap ? 2 * g->cap : 16, ranks = (size_t)lm_comm_size(g->comm);
    request *queue = NULL;
    if (lm_alloc_n(&queue, cap, sizeof *queue, "gathers", e))
        return e->code;
    lm_code rc = LM_OK;
    for (size_t k = 0; !rc && k < cap; k++)
        rc = lm_alloc_n(&queue[k].bytes, ranks, sizeof *queue[k].bytes, "gathers", e);
    for (uint64_t k = g->ended; !rc && k < g->begun; k++) {
        request *to = &queue[k % cap], *from = &g->queue[k % g->cap], own = *to;
        *to = *from; /* with its sizes, which the thread may be reading */
        *from = own;
    }
    request *old = rc ? queue : g->queue;
    for (size_t k = 0; old && k < (rc ? cap : g->cap); k++)
        lm_free(old[k].bytes);
    lm_free(old);
    if (rc)
        return rc;
    g->queue = queue;
    g->cap = cap;
    return LM_OK;
}

lm_code lm_gatherer_begin(lm_gatherer *g, const void *in, void *out, const size_t *bytes, lm_err *e)
{
    lm_code rc = LM_OK;
    pthread_mutex_lock(&g->lock);
    if (g->begun - g->ended == g->cap)
        rc = widen(g, e);
    if (!rc) {
        request *r = &g->queue[g->begun % g->cap];
        r->in = in;
        r->out = out;
        r->waiting = INFINITY;
        memcpy(r->bytes, bytes, (size_t)lm_comm_size(g->comm) * sizeof *bytes);
        g->begun++;
        pthread_cond_broadcast(&g->moved);
    }
    pthread_mutex_unlock(&g->lock);
    return rc;
}

lm_code lm_gatherer_end(lm_gatherer *g, lm_err *e)
{
    const double began = lm_now();
    pthread_mutex_lock(&g->lock);
    if (g->ended == g->begun) {
        pthread_mutex_unlock(&g->lock);
        return lm_fail(e, LM_EBUG, "gathers", NULL, "none has begun");
    }
    while (g->done == g->ended)
        pthread_cond_wait(&g->moved, &g->lock);
    const request r = g->queue[g->ended++ % g->cap];
    g->waited += lm_now() - began;
    if (g->failure.code)
        *e = g->failure;
    pthread_mutex_unlock(&g->lock);
    if (g->seen && !e->code)
        g->seen(g->ctx, r.began, r.ended, r.waiting < began ? r.waiting : began);
    return e->code;
}

void lm_gatherer_settle(lm_gatherer *g)
{
    const double began = lm_now();
    pthread_mutex_lock(&g->lock);
    for (uint64_t k = g->done; k < g->begun; k++) {
        request *r = &g->queue[k % g->cap];
        r->waiting = r->waiting < began ? r->waiting : began;
    }
    while (g->done < g->begun)
        pthread_cond_wait(&g->moved, &g->lock);
    g->waited += lm_now() - began;
    pthread_mutex_unlock(&g->lock);
}

void lm_gatherer_watch(lm_gatherer *g, lm_gatherer_seen *seen, void *ctx)
{
    g->seen = seen;
    g->ctx = ctx;
}

bool lm_gatherer_busy(lm_gatherer *g)
{
    pthread_mutex_lock(&g->lock);
    const bool busy = g->ended < g->begun;
    pthread_mutex_unlock(&g->lock);
    return busy;
}

double lm_gatherer_hidden(lm_gatherer *g)
{
    pthread_mutex_lock(&g->lock);
    const double hidden = g->busy > g->waited ? g->busy - g->waited : 0;
    pthread_mutex_unlock(&g->lock);
    return hidden;
}
