/* SPDX-License-Identifier: Apache-2.0 */
/* trainer_ahead.c -- gradients that are added up over the ranks along dp while the backward goes on.
 *
 * A thread adds up ranges in the order in which the backward, or the schedule of a pipeline, completes them (buckets.h), which
 * is the same on all ranks.  It alone uses the communicator until trainer_ahead_end has waited for it.  On a device a stream
 * takes the place of the thread, and the micro-batch and its sums are one recording.  The order of each sum is that of one call
 * for all: so are its bits. */
#include <errno.h>
#include <pthread.h>
#include <string.h>

#include "base/clock.h"
#include "base/mem.h"
#include "train/trainer_impl.h"

typedef struct {
    double began, ended;
} span;

struct trainer_ahead {
    lm_trainer *t;
    lm_bucket *bucket;
    span *span; /* when each was added up, in the order in which they are given */
    int *queue; /* of buckets of this step, */
    int n;
    bool *is_given; /* and by bucket */
    bool reduced;   /* on a device those of this step are */
    pthread_t thread;
    bool running;
    pthread_mutex_t lock; /* of what follows */
    pthread_cond_t moved;
    int given, done; /* of the queue */
    bool ends;
    lm_err failure;
    double hidden; /* seconds of sums for which nothing waited, so far */
    /* on a device: micro-batches with sums, of the first of a leaf and of others */
    struct {
        bool ran;
        lm_recording *recorded;
    } device[2];
    bool unrecorded; /* one was refused */
};

static void *run(void *ctx)
{
    trainer_ahead *a = ctx;
    pthread_mutex_lock(&a->lock);
    for (;;) {
        while (a->done == a->given && !a->ends)
            pthread_cond_wait(&a->moved, &a->lock);
        if (a->done == a->given)
            break;
        const int k = a->done;
        lm_err e = a->failure;
        pthread_mutex_unlock(&a->lock);
        a->span[k].began = lm_now();
        if (!e.code)
            trainer_share_take(a->t, a->bucket[a->queue[k]].from, a->bucket[a->queue[k]].end, &e);
        a->span[k].ended = lm_now();
        pthread_mutex_lock(&a->lock);
        a->failure = e;
        a->done++;
        pthread_cond_broadcast(&a->moved);
    }
    pthread_mutex_unlock(&a->lock);
    return NULL;
}

/* Bucket k is complete. */
static void give(trainer_ahead *a, int k)
{
    pthread_mutex_lock(&a->lock);
    a->is_given[k] = true;
    a->queue[a->given++] = k;
    pthread_cond_broadcast(&a->moved);
    pthread_mutex_unlock(&a->lock);
}

/* Until all are added up. */
static lm_code wait_for_all(trainer_ahead *a, lm_err *e)
{
    lm_trainer *t = a->t;
    const double began = lm_now();
    double busy = 0;
    pthread_mutex_lock(&a->lock);
    while (a->done < a->given)
        pthread_cond_wait(&a->moved, &a->lock);
    const lm_err failure = a->failure;
    pthread_mutex_unlock(&a->lock);
    const double waited = lm_now() - began;
    for (int k = 0; k < a->given; k++) {
        busy += a->span[k].ended - a->span[k].began;
        trainer_trace_exchange(t, TRACE_HIDDEN, "gradients", a->span[k].began, a->span[k].ended,
                               began);
    }
    a->hidden += busy > waited ? busy - waited : 0;
    a->given = a->done = 0;
    memset(a->is_given, 0, (size_t)a->n * sizeof *a->is_given);
    if (failure.code)
        *e = failure;
    return failure.code;
}

/* ---- for the trainer ---- */

/* Not of sums of several leaves, which are complete behind the last one. */
static bool serves(const lm_trainer *t)
{
    return t->along[LM_AXIS_DP] && t->o.leaves == t->ranks && !t->io.objective &&
           (t->b->host_memory || (!t->pipe && !t->program->train->addends.n));
}

lm_code trainer_ahead_new(lm_trainer *t, lm_err *e)
{
    const lm_store_block *g = lm_store_find(t->s.store, LM_KEPT_GRAD, 0);
    trainer_ahead *a = NULL;
    if (!serves(t) || !g)
        return LM_OK;
    if (lm_alloc_n(&a, 1, sizeof *a, "sums of gradients", e))
        return e->code;
    a->t = t;
    t->ahead = a;
    pthread_mutex_init(&a->lock, NULL);
    pthread_cond_init(&a->moved, NULL);
    if (lm_buckets_make(t->program->train, g->count, &a->bucket, &a->n, e) ||
        lm_alloc_n(&a->span, (size_t)a->n + 1, sizeof *a->span, "sums of gradients", e) ||
        lm_alloc_n(&a->queue, (size_t)a->n + 1, sizeof *a->queue, "sums of gradients", e) ||
        lm_alloc_n(&a->is_given, (size_t)a->n + 1, sizeof *a->is_given, "sums of gradients", e) ||
        !t->b->host_memory)
        return e->code;
    const int failed = pthread_create(&a->thread, NULL, run, a);
    a->running = !failed;
    errno = failed;
    return failed ? lm_fail(e, LM_ELIMIT, "sums of gradients", NULL, "a thread cannot be created")
                  : LM_OK;
}

void trainer_ahead_fini(lm_trainer *t)
{
    trainer_ahead *a = t->ahead;
    if (!a)
        return;
    if (a->running) {
        pthread_mutex_lock(&a->lock);
        a->ends = true;
        pthread_cond_broadcast(&a->moved);
        pthread_mutex_unlock(&a->lock);
        pthread_join(a->thread, NULL);
    }
    pthread_mutex_destroy(&a->lock);
    pthread_cond_destroy(&a->moved);
    for (int i = 0; i < 2; i++)
        if (a->device[i].recorded)
            t->b->recording_free(t->b, a->device[i].recorded);
    lm_free(a->bucket);
    lm_free(a->span);
    lm_free(a->queue);
    lm_free(a->is_given);
    lm_free(a);
    t->ahead = NULL;
}

double trainer_ahead_hidden(const lm_trainer *t)
{
    return t->ahead ? t->ahead->hidden : 0;
}

/* ---- on a device ---- */

typedef struct {
    lm_trainer *t;
    lm_section_id section;
    const lm_step *step;
} device_run;

/* Each bucket is added up on the stream of sums behind what the main stream has been given so far. */
static lm_code run_buckets(void *ctx, lm_err *e)
{
    const device_run *r = ctx;
    lm_trainer *t = r->t;
    lm_backend *b = t->b;
    const trainer_ahead *a = t->ahead;
    const lm_section *all = &t->program->section[r->section];
    size_t at = all->first;
    for (int k = 0; k < a->n; k++) {
        const size_t end = a->bucket[k].last + 1;
        if (lm_program_run_nodes(t->program, r->section, at, end, r->step, e) ||
            b->follow(b, t->summing, b->main, e) ||
            trainer_share_take(t, a->bucket[k].from, a->bucket[k].end, e))
            return e->code;
        at = end > at ? end : at;
    }
    return lm_program_run_nodes(t->program, r->section, at, all->last, r->step, e) ||
                   b->follow(b, b->main, t->summing, e)
               ? e->code
               : LM_OK;
}

/* After a refusal all steps run without one. */
static lm_code record(const device_run *r, lm_recording **out, lm_err *e)
{
    lm_trainer *t = r->t;
    lm_err refused = { 0 };
    if (!lm_record(t->b, run_buckets, (void *)(uintptr_t)r, out, &refused))
        return LM_OK;
    t->ahead->unrecorded = true;
    lm_log(t->io.sink, LM_LOG_WARN, "%s: sums of gradients run without a recording: %s", t->b->name,
           refused.what);
    return t->b->sync(t->b, t->b->main, e); /* tells if the device is lost */
}

static lm_code run_on_device(lm_trainer *t, lm_section_id s, const lm_step *step, lm_err *e)
{
    const int i = s == LM_SECTION_FIRST;
    trainer_ahead *a = t->ahead;
    const device_run r = { t, s, step };
    if (t->b->record_begin && a->device[i].ran && !a->unrecorded && !lm_program_timed(t->program)) {
        if (!a->device[i].recorded && record(&r, &a->device[i].recorded, e))
            return e->code;
        if (a->device[i].recorded)
            return t->b->step(t->b, step, t->b->main, e) ||
                           t->b->replay(t->b, a->device[i].recorded, t->b->main, e)
                       ? e->code
                       : LM_OK;
    }
    a->device[i].ran = true;
    return run_buckets((void *)(uintptr_t)&r, e);
}

lm_code trainer_ahead_run(lm_trainer *t, lm_section_id s, int64_t i, const lm_step *step, lm_err *e)
{
    const lm_section *all = &t->program->section[s];
    trainer_ahead *a = t->ahead;
    size_t at = all->first;
    if (!a || i + 1 < t->micros)
        return lm_program_run(t->program, s, step, e);
    if (!t->b->host_memory) {
        a->reduced = true;
        return run_on_device(t, s, step, e);
    }
    for (int k = 0; k < a->n && !a->bucket[k].late; k++) {
        const size_t end = a->bucket[k].last + 1;
        if (lm_program_run_nodes(t->program, s, at, end, step, e))
            return e->code;
        give(a, k);
        at = end > at ? end : at;
    }
    return lm_program_run_nodes(t->program, s, at, all->last, step, e);
}

void trainer_ahead_stage(lm_trainer *t, int stage)
{
    trainer_ahead *a = t->ahead;
    for (int k = 0; a && k < a->n; k++)
        if (a->bucket[k].stage == stage && !a->bucket[k].late)
            give(a, k);
}

lm_code trainer_ahead_end(lm_trainer *t, bool *done, lm_err *e)
{
    trainer_ahead *a = t->ahead;
    *done = a && a->n;
    if (a && !t->b->host_memory) {
        *done = a->reduced;
        a->reduced = false;
        return LM_OK;
    }
    if (!*done)
        return LM_OK;
    for (int k = 0; k < a->n; k++)
        if (!a->is_given[k])
            give(a, k);
    return wait_for_all(a, e);
}

void trainer_ahead_drop(lm_trainer *t, const lm_err *why)
{
    lm_err unseen = { 0 };
    const bool sums = t->ahead && t->ahead->given;
    if (sums || (t->gatherer && lm_gatherer_busy(t->gatherer)))
        trainer_ranks_abort(t, why);
    if (sums)
        wait_for_all(t->ahead, &unseen);
}
