/* SPDX-License-Identifier: Apache-2.0 */
/* pipe.c -- the order-preserving pipeline on the pool.
 *
 * Workers have no fixed tasks.  Each takes the first that is possible: write the next item if its
 * turn has come, work on one that was read, read one more.  One thread is therefore enough, and no
 * thread idles while one of the three steps is slow.  Items are kept in a ring by serial number. */
#include <pthread.h>

#include "base/mem.h"
#include "base/par.h"

typedef enum { EMPTY, READ, WORKING, DONE } item_state;

typedef struct {
    void *item;
    item_state state;
} entry;

typedef struct {
    const lm_pipe_ops *ops;
    pthread_mutex_t lock;
    pthread_cond_t change;
    entry *ring;
    int64_t depth, n_read, n_taken, n_written; /* serial numbers */
    bool reading, writing, ended;
    lm_code rc;
    lm_err *err;
} pipe_state;

static entry *entry_of(pipe_state *s, int64_t serial)
{
    return &s->ring[serial % s->depth];
}

/* Record the first failure, which stops all workers; the lock is held. */
static void fail_pipe(pipe_state *s, lm_code rc, const lm_err *e)
{
    if (s->rc)
        return;
    s->rc = rc;
    if (s->err && !s->err->code)
        *s->err = *e;
}

/* Each step is entered and left with the lock held, and releases it during the callback. */
static void write_one(pipe_state *s, lm_err *e)
{
    entry *one = entry_of(s, s->n_written);
    void *item = one->item;
    lm_code rc;

    one->item = NULL;
    s->writing = true;
    pthread_mutex_unlock(&s->lock);
    rc = s->ops->write(s->ops->ctx, item, e);
    pthread_mutex_lock(&s->lock);
    s->writing = false;
    one->state = EMPTY;
    s->n_written++;
    if (rc)
        fail_pipe(s, rc, e);
}

static void work_one(pipe_state *s, int who, lm_err *e)
{
    entry *one = entry_of(s, s->n_taken++);
    lm_code rc;

    one->state = WORKING;
    pthread_mutex_unlock(&s->lock);
    rc = s->ops->work(s->ops->ctx, one->item, who, e);
    pthread_mutex_lock(&s->lock);
    one->state = DONE;
    if (rc)
        fail_pipe(s, rc, e);
}

static void read_one(pipe_state *s, lm_err *e)
{
    void *item = NULL;
    lm_code rc;

    s->reading = true;
    pthread_mutex_unlock(&s->lock);
    rc = s->ops->read(s->ops->ctx, &item, e);
    pthread_mutex_lock(&s->lock);
    s->reading = false;
    if (item) {
        *entry_of(s, s->n_read) = (entry){ item, READ };
        s->n_read++;
    }
    if (rc)
        fail_pipe(s, rc, e);
    else if (!item)
        s->ended = true;
}

static void run_worker(void *ctx, int64_t begin, int64_t end, int who)
{
    pipe_state *s = ctx;

    (void)begin, (void)end;
    pthread_mutex_lock(&s->lock);
    while (!s->rc && !(s->ended && s->n_written == s->n_read)) {
        lm_err e = { 0 };

        if (!s->writing && s->n_written < s->n_taken && entry_of(s, s->n_written)->state == DONE)
            write_one(s, &e);
        else if (s->n_taken < s->n_read)
            work_one(s, who, &e);
        else if (!s->reading && !s->ended && s->n_read - s->n_written < s->depth)
            read_one(s, &e);
        else {
            pthread_cond_wait(&s->change, &s->lock);
            continue;
        }
        pthread_cond_broadcast(&s->change);
    }
    pthread_mutex_unlock(&s->lock);
}

lm_code lm_par_pipe(lm_par *p, const lm_pipe_ops *ops, lm_err *e)
{
    pipe_state s = { .ops = ops, .depth = ops->depth < 1 ? 1 : ops->depth, .err = e };
    lm_code rc = lm_alloc_n(&s.ring, (size_t)s.depth, sizeof *s.ring, "a pipeline", e);

    if (rc)
        return rc;
    pthread_mutex_init(&s.lock, NULL);
    pthread_cond_init(&s.change, NULL);
    lm_par_each(p, run_worker, &s);
    for (int64_t i = 0; i < s.depth; i++) {
        if (s.ring[i].item && ops->drop)
            ops->drop(ops->ctx, s.ring[i].item);
    }
    pthread_cond_destroy(&s.change);
    pthread_mutex_destroy(&s.lock);
    lm_free(s.ring);
    return s.rc;
}
