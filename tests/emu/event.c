/* SPDX-License-Identifier: Apache-2.0 */
/* event.c -- events of the emulated device: points on a stream. */
#include <stdlib.h>
#include <time.h>

#include "queue.h"

typedef struct {
    struct CUstream_st *stream;
    uint64_t at;
    double time;
    int users;
    bool done;
} mark;

struct CUevent_st {
    unsigned flags;
    mark *last;               /* NULL: never recorded */
    unsigned long capture;    /* id of the capture that it was recorded in, or 0 */
    struct CUstream_st *from; /* and on which stream */
};

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void mark_leave(mark *m)
{
    if (m && --m->users == 0)
        free(m);
}

static void run_record(void *data)
{
    mark *m = *(mark **)data;
    m->time = now();
}
static void drop_record(void *data)
{
    mark *m = *(mark **)data;
    m->done = true;
    mark_leave(m);
}
static bool is_reached(void *data)
{
    mark *m = *(mark **)data;
    return m->done || emu_advance(m->stream, m->at);
}
static void run_wait(void *data)
{
    (void)data;
}
static void drop_wait(void *data)
{
    mark_leave(*(mark **)data);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags)
{
    emu_enter();
    *event = NULL;
    if (!emu_broken() && emu_set.devices > 0) {
        *event = emu_allocate(sizeof **event);
        (*event)->flags = flags;
    }
    return emu_leave(cudaSuccess);
}

cudaError_t cudaEventCreate(cudaEvent_t *event)
{
    return cudaEventCreateWithFlags(event, cudaEventDefault);
}

cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    emu_enter();
    if (!event)
        return emu_leave(cudaErrorInvalidResourceHandle);
    mark_leave(event->last);
    free(event);
    return emu_leave(cudaSuccess);
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t handle)
{
    emu_enter();
    struct CUstream_st *s = emu_stream(handle);
    if (!event || !s)
        return emu_leave(cudaErrorInvalidResourceHandle);
    if (s->capture) {
        event->capture = s->capture->id;
        event->from = s;
        return emu_leave(s->capture->spoiled ? cudaErrorStreamCaptureInvalidated : cudaSuccess);
    }
    if (emu_broken())
        return emu_leave(cudaSuccess);
    mark *m = emu_allocate(sizeof *m);
    *m = (mark){ .stream = s, .at = s->put + 1, .users = 2 };
    mark_leave(event->last);
    event->last = m;
    event->capture = 0;
    cudaError_t code = emu_put(handle, run_record, drop_record, &m, sizeof m);
    if (code) {
        m->done = true;
        mark_leave(m);
    }
    return emu_leave(code);
}

/* Both belong to one capture, or the stream joins it. */
static cudaError_t wait_captured(struct CUstream_st *s, cudaEvent_t event)
{
    struct CUgraph_st *g = NULL;
    for (struct CUstream_st *o = emu_streams; o && !g; o = o->next)
        if (o->capture && o->capture->id == event->capture)
            g = o->capture;
    if (!g)
        return cudaErrorCapturedEvent;
    if (s->capture && s->capture != g) {
        s->capture->spoiled = g->spoiled = true;
        return cudaErrorStreamCaptureIsolation;
    }
    s->capture = g;
    if (emu_stream(event->from))
        event->from->loose = false;
    s->loose = s != g->origin;
    return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned flags)
{
    (void)flags;
    emu_enter();
    struct CUstream_st *s = emu_stream(handle);
    if (!event || !s)
        return emu_leave(cudaErrorInvalidResourceHandle);
    if (event->capture)
        return emu_leave(wait_captured(s, event));
    if (!event->last)
        return emu_leave(cudaSuccess);
    if (s->capture) {
        s->capture->spoiled = true;
        return emu_leave(cudaErrorStreamCaptureIsolation);
    }
    event->last->users++;
    cudaError_t code =
        emu_put_gate(handle, is_reached, run_wait, drop_wait, &event->last, sizeof event->last);
    if (code)
        mark_leave(event->last);
    return emu_leave(code);
}

/* As far as work is ready. */
static cudaError_t reach(cudaEvent_t event, bool *busy)
{
    *busy = false;
    if (!event)
        return cudaErrorInvalidResourceHandle;
    if (event->capture)
        return cudaErrorCapturedEvent;
    if (event->last && !event->last->done) {
        *busy = true;
        emu_advance(event->last->stream, event->last->at);
    }
    return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    bool busy;
    emu_enter();
    cudaError_t code = reach(event, &busy);
    while (!code && event->last && !event->last->done) {
        emu_wait();
        code = reach(event, &busy);
    }
    return emu_leave(code);
}

/* Reports once that the event is not complete, so that a caller has to query again. */
cudaError_t cudaEventQuery(cudaEvent_t event)
{
    bool busy;
    emu_enter();
    cudaError_t code = reach(event, &busy);
    return emu_leave(code ? code : busy ? cudaErrorNotReady : cudaSuccess);
}

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t end)
{
    emu_enter();
    if (!start || !end || !start->last || !end->last ||
        ((start->flags | end->flags) & cudaEventDisableTiming))
        return emu_leave(cudaErrorInvalidResourceHandle);
    if (!start->last->done || !end->last->done)
        return emu_leave(cudaErrorNotReady);
    *ms = (float)(1e3 * (end->last->time - start->last->time));
    return emu_leave(cudaSuccess);
}
