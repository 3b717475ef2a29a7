/* queue.c -- streams of the emulated device: lists of work, done when something waits for it.
 *
 * The end of a list is known by how many pieces have been put there; an event's mark is such a
 * number.  A graph is a list that is kept.  All of it under the lock of device.c. */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "emu_impl.h"

enum { QUEUE_MAX = 1024 }; /* pieces of work that may wait on a stream */

typedef struct work {
    struct work *next;
    emu_work run, drop;
    _Alignas(16) unsigned char data[];
} work;

typedef struct {
    work *first, **end;
} list;

struct CUgraph_st {
    list items;
    int users;
    cudaStream_t origin;
    unsigned long id;
    enum cudaStreamCaptureMode mode;
    bool spoiled;
};
struct CUgraphExec_st {
    struct CUgraph_st *graph;
};

struct CUstream_st {
    struct CUstream_st *next;
    unsigned flags;
    list items;
    uint64_t put, done;
    struct CUgraph_st *capture; /* where work goes instead */
    bool loose;                 /* captured work that the origin has not waited for */
};

/* A point on a stream. */
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

static struct CUstream_st legacy;
static struct CUstream_st *streams = &legacy;
static unsigned long captures;

static void *allocate(size_t bytes)
{
    void *p = calloc(1, bytes);
    if (!p)
        abort();
    return p;
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- lists of work ---- */

static void append(list *l, emu_work run, emu_work drop, const void *data, size_t bytes)
{
    work *w = malloc(sizeof *w + bytes);
    if (!w)
        abort();
    w->next = NULL;
    w->run = run;
    w->drop = drop;
    if (bytes)
        memcpy(w->data, data, bytes);
    if (!l->first)
        l->end = &l->first;
    *l->end = w;
    l->end = &w->next;
}

static void discard(work *w)
{
    if (w->drop)
        w->drop(w->data);
    free(w);
}

static void empty(list *l)
{
    while (l->first) {
        work *w = l->first;
        l->first = w->next;
        discard(w);
    }
}

/* Does what was put on s before `until`. */
static void advance(struct CUstream_st *s, uint64_t until)
{
    while (s->done < until && s->items.first) {
        work *w = s->items.first;
        s->items.first = w->next;
        s->done++;
        if (!emu_broken())
            w->run(w->data);
        discard(w);
    }
}

void emu_drain(void)
{
    for (struct CUstream_st *s = streams; s; s = s->next)
        advance(s, s->put);
}

void emu_drop(void)
{
    for (struct CUstream_st *s = streams; s; s = s->next) {
        empty(&s->items);
        s->done = s->put;
    }
}

static bool blocking(const struct CUstream_st *s)
{
    return s != &legacy && !(s->flags & cudaStreamNonBlocking);
}

/* The default stream and the ones that block wait for each other. */
static cudaError_t meet_legacy(struct CUstream_st *s)
{
    if (blocking(s)) {
        advance(&legacy, legacy.put);
        return cudaSuccess;
    }
    if (s != &legacy)
        return cudaSuccess;
    for (struct CUstream_st *o = streams; o; o = o->next) {
        if (!blocking(o))
            continue;
        if (o->capture) {
            o->capture->spoiled = true;
            return cudaErrorStreamCaptureImplicit;
        }
        advance(o, o->put);
    }
    return cudaSuccess;
}

static struct CUstream_st *known(cudaStream_t s)
{
    if (!s || s == cudaStreamLegacy)
        return &legacy;
    for (struct CUstream_st *o = streams; o; o = o->next)
        if (o == s)
            return o;
    return NULL;
}

cudaError_t emu_put(cudaStream_t handle, emu_work run, emu_work drop, const void *data,
                    size_t bytes)
{
    struct CUstream_st *s = known(handle);
    if (!s)
        return cudaErrorInvalidResourceHandle;
    if (s->capture) {
        if (s->capture->spoiled)
            return cudaErrorStreamCaptureInvalidated;
        append(&s->capture->items, run, drop, data, bytes);
        s->loose = s != s->capture->origin;
        return cudaSuccess;
    }
    cudaError_t code = meet_legacy(s);
    if (code)
        return code;
    append(&s->items, run, drop, data, bytes);
    s->put++;
    if (emu_set.eager || s->put - s->done > QUEUE_MAX)
        advance(s, s->put);
    return cudaSuccess;
}

cudaError_t emu_uncaptured(void)
{
    cudaError_t code = cudaSuccess;
    for (struct CUstream_st *s = streams; s; s = s->next)
        if (s->capture && s->capture->mode != cudaStreamCaptureModeRelaxed) {
            s->capture->spoiled = true;
            code = cudaErrorStreamCaptureUnsupported;
        }
    return code;
}

/* ---- streams ---- */

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned flags)
{
    emu_enter();
    *s = NULL;
    if (!emu_broken() && emu_set.devices > 0) {
        *s = allocate(sizeof **s);
        (*s)->flags = flags;
        (*s)->next = legacy.next;
        legacy.next = *s;
    }
    return emu_leave(cudaSuccess);
}

cudaError_t cudaStreamCreate(cudaStream_t *s)
{
    return cudaStreamCreateWithFlags(s, cudaStreamDefault);
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned flags, int priority)
{
    (void)priority;
    return cudaStreamCreateWithFlags(s, flags);
}

static void graph_leave(struct CUgraph_st *g)
{
    if (g && --g->users == 0) {
        empty(&g->items);
        free(g);
    }
}

static void end_capture(struct CUgraph_st *g)
{
    for (struct CUstream_st *s = streams; s; s = s->next)
        if (s->capture == g)
            s->capture = NULL;
}

cudaError_t cudaStreamDestroy(cudaStream_t handle)
{
    emu_enter();
    struct CUstream_st *s = known(handle);
    if (!s || s == &legacy)
        return emu_leave(cudaErrorInvalidResourceHandle);
    if (s->capture && s->capture->origin == s) {
        struct CUgraph_st *g = s->capture;
        end_capture(g);
        graph_leave(g);
    }
    advance(s, s->put);
    struct CUstream_st **at = &streams;
    while (*at != s)
        at = &(*at)->next;
    *at = s->next;
    free(s);
    return emu_leave(cudaSuccess);
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle)
{
    emu_enter();
    struct CUstream_st *s = known(handle);
    if (!s)
        return emu_leave(cudaErrorInvalidResourceHandle);
    if (s->capture) {
        s->capture->spoiled = true;
        return emu_leave(cudaErrorStreamCaptureUnsupported);
    }
    cudaError_t code = meet_legacy(s);
    if (!code)
        advance(s, s->put);
    return emu_leave(code);
}

/* Says once that work is under way, so that whoever asks has to ask again. */
cudaError_t cudaStreamQuery(cudaStream_t handle)
{
    emu_enter();
    struct CUstream_st *s = known(handle);
    if (!s)
        return emu_leave(cudaErrorInvalidResourceHandle);
    if (s->capture) {
        s->capture->spoiled = true;
        return emu_leave(cudaErrorStreamCaptureUnsupported);
    }
    bool busy = s->done < s->put;
    advance(s, s->put);
    return emu_leave(busy ? cudaErrorNotReady : cudaSuccess);
}

cudaError_t cudaDeviceSynchronize(void)
{
    emu_enter();
    cudaError_t code = emu_uncaptured();
    if (!code)
        emu_drain();
    return emu_leave(code);
}

cudaError_t cudaDeviceReset(void)
{
    emu_enter();
    emu_drain();
    return emu_leave(cudaSuccess);
}

typedef struct {
    cudaHostFn_t fn;
    void *data;
} host_call;

static void run_host(void *data)
{
    const host_call *c = data;
    c->fn(c->data);
}

cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t fn, void *data)
{
    emu_enter();
    host_call c = { fn, data };
    return emu_leave(fn ? emu_put(s, run_host, NULL, &c, sizeof c) : cudaErrorInvalidValue);
}

/* ---- events ---- */

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
static void run_wait(void *data)
{
    mark *m = *(mark **)data;
    if (!m->done)
        advance(m->stream, m->at);
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
        *event = allocate(sizeof **event);
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
    struct CUstream_st *s = known(handle);
    if (!event || !s)
        return emu_leave(cudaErrorInvalidResourceHandle);
    if (s->capture) {
        event->capture = s->capture->id;
        event->from = s;
        return emu_leave(s->capture->spoiled ? cudaErrorStreamCaptureInvalidated : cudaSuccess);
    }
    if (emu_broken())
        return emu_leave(cudaSuccess);
    mark *m = allocate(sizeof *m);
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

/* Both are part of one capture, or the stream joins it now. */
static cudaError_t wait_captured(struct CUstream_st *s, cudaEvent_t event)
{
    struct CUgraph_st *g = NULL;
    for (struct CUstream_st *o = streams; o && !g; o = o->next)
        if (o->capture && o->capture->id == event->capture)
            g = o->capture;
    if (!g)
        return cudaErrorCapturedEvent;
    if (s->capture && s->capture != g) {
        s->capture->spoiled = g->spoiled = true;
        return cudaErrorStreamCaptureIsolation;
    }
    s->capture = g;
    if (known(event->from))
        event->from->loose = false;
    s->loose = s != g->origin;
    return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned flags)
{
    (void)flags;
    emu_enter();
    struct CUstream_st *s = known(handle);
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
    cudaError_t code = emu_put(handle, run_wait, drop_wait, &event->last, sizeof event->last);
    if (code)
        mark_leave(event->last);
    return emu_leave(code);
}

static cudaError_t reach(cudaEvent_t event, bool *busy)
{
    *busy = false;
    if (!event)
        return cudaErrorInvalidResourceHandle;
    if (event->capture)
        return cudaErrorCapturedEvent;
    if (event->last && !event->last->done) {
        *busy = true;
        advance(event->last->stream, event->last->at);
    }
    return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    bool busy;
    emu_enter();
    return emu_leave(reach(event, &busy));
}

/* Says once that it is not there yet. */
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

/* ---- graphs ---- */

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, enum cudaStreamCaptureMode mode)
{
    emu_enter();
    struct CUstream_st *s = known(handle);
    if (!s)
        return emu_leave(cudaErrorInvalidResourceHandle);
    if (s == &legacy)
        return emu_leave(cudaErrorStreamCaptureUnsupported);
    if (s->capture)
        return emu_leave(cudaErrorIllegalState);
    s->capture = allocate(sizeof *s->capture);
    *s->capture = (struct CUgraph_st){ .users = 1, .origin = s, .id = ++captures, .mode = mode };
    return emu_leave(cudaSuccess);
}

cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t *graph)
{
    emu_enter();
    *graph = NULL;
    struct CUstream_st *s = known(handle);
    if (!s)
        return emu_leave(cudaErrorInvalidResourceHandle);
    struct CUgraph_st *g = s->capture;
    if (!g)
        return emu_leave(cudaErrorIllegalState);
    if (g->origin != s)
        return emu_leave(cudaErrorStreamCaptureUnmatched);
    cudaError_t code = g->spoiled ? cudaErrorStreamCaptureInvalidated : cudaSuccess;
    for (struct CUstream_st *o = streams; o && !code; o = o->next)
        if (o->capture == g && o->loose)
            code = cudaErrorStreamCaptureUnjoined;
    end_capture(g);
    if (code)
        graph_leave(g);
    else
        *graph = g;
    return emu_leave(code);
}

cudaError_t cudaStreamIsCapturing(cudaStream_t handle, enum cudaStreamCaptureStatus *status)
{
    emu_enter();
    struct CUstream_st *s = known(handle);
    if (!s)
        return emu_leave(cudaErrorInvalidResourceHandle);
    *status = !s->capture           ? cudaStreamCaptureStatusNone
              : s->capture->spoiled ? cudaStreamCaptureStatusInvalidated
                                    : cudaStreamCaptureStatusActive;
    return emu_leave(cudaSuccess);
}

/* How many there are; nodes themselves cannot be had. */
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *n)
{
    emu_enter();
    if (!graph || nodes || !n)
        return emu_leave(cudaErrorInvalidValue);
    *n = 0;
    for (const work *w = graph->items.first; w; w = w->next)
        ++*n;
    return emu_leave(cudaSuccess);
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long flags)
{
    (void)flags;
    emu_enter();
    *exec = NULL;
    if (!graph)
        return emu_leave(cudaErrorInvalidValue);
    *exec = allocate(sizeof **exec);
    (*exec)->graph = graph;
    graph->users++;
    return emu_leave(cudaSuccess);
}

static void run_graph(void *data)
{
    const struct CUgraph_st *g = *(struct CUgraph_st **)data;
    for (work *w = g->items.first; w && !emu_broken(); w = w->next)
        w->run(w->data);
}
static void drop_graph(void *data)
{
    graph_leave(*(struct CUgraph_st **)data);
}

cudaError_t cudaGraphUpload(cudaGraphExec_t exec, cudaStream_t s)
{
    emu_enter();
    return emu_leave(exec && known(s) ? cudaSuccess : cudaErrorInvalidValue);
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t s)
{
    emu_enter();
    if (!exec)
        return emu_leave(cudaErrorInvalidValue);
    exec->graph->users++;
    cudaError_t code = emu_put(s, run_graph, drop_graph, &exec->graph, sizeof exec->graph);
    if (code)
        graph_leave(exec->graph);
    return emu_leave(code);
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec)
{
    emu_enter();
    if (!exec)
        return emu_leave(cudaErrorInvalidValue);
    graph_leave(exec->graph);
    free(exec);
    return emu_leave(cudaSuccess);
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
    emu_enter();
    if (!graph)
        return emu_leave(cudaErrorInvalidValue);
    graph_leave(graph);
    return emu_leave(cudaSuccess);
}
