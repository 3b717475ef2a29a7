/* SPDX-License-Identifier: Apache-2.0 */
/* queue.c -- streams of the emulated device: lists of work, executed when the program waits for
 * it. */
#include <stdlib.h>
#include <string.h>

#include "queue.h"

enum { QUEUE_MAX = 1024 }; /* pieces of work that a stream may queue */

struct CUstream_st emu_legacy;
struct CUstream_st *emu_streams = &emu_legacy;

void *emu_allocate(size_t bytes)
{
    void *p = calloc(1, bytes);
    if (!p)
        abort();
    return p;
}

/* ---- lists of work ---- */

static void append(list *l, emu_gate ready, emu_work run, emu_work drop, const void *data,
                   size_t bytes)
{
    work *w = malloc(sizeof *w + bytes);
    if (!w)
        abort();
    *w = (work){ .ready = ready, .run = run, .drop = drop, .bytes = bytes };
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

void emu_empty(list *l)
{
    while (l->first) {
        work *w = l->first;
        l->first = w->next;
        discard(w);
    }
}

bool emu_advance(struct CUstream_st *s, uint64_t until)
{
    while (s->done < until && s->items.first) {
        work *w = s->items.first;
        if (w->ready && !emu_broken() && !w->ready(w->data))
            return false;
        s->items.first = w->next;
        s->done++;
        if (!emu_broken())
            w->run(w->data);
        discard(w);
    }
    return true;
}

void emu_reach(struct CUstream_st *s, uint64_t until)
{
    while (!emu_advance(s, until))
        emu_wait();
}

/* Streams may come and go while one waits. */
void emu_drain(void)
{
    struct CUstream_st *s = emu_streams;
    while (s) {
        const bool mine = s == &emu_legacy || s->device == emu_device();
        if (mine && !emu_advance(s, s->put)) {
            emu_wait();
            s = emu_streams;
        } else {
            s = s->next;
        }
    }
}

void emu_drop(void)
{
    for (struct CUstream_st *s = emu_streams; s; s = s->next) {
        emu_empty(&s->items);
        s->done = s->put;
    }
}

static bool blocking(const struct CUstream_st *s)
{
    return s != &emu_legacy && !(s->flags & cudaStreamNonBlocking);
}

/* The default stream and the ones that block wait for each other. */
static cudaError_t meet_legacy(struct CUstream_st *s)
{
    if (blocking(s)) {
        emu_reach(&emu_legacy, emu_legacy.put);
        return cudaSuccess;
    }
    if (s != &emu_legacy)
        return cudaSuccess;
    for (struct CUstream_st *o = emu_streams; o; o = o->next) {
        if (!blocking(o))
            continue;
        if (o->capture) {
            o->capture->spoiled = true;
            return cudaErrorStreamCaptureImplicit;
        }
        emu_reach(o, o->put);
    }
    return cudaSuccess;
}

struct CUstream_st *emu_stream(cudaStream_t s)
{
    if (!s || s == cudaStreamLegacy)
        return &emu_legacy;
    for (struct CUstream_st *o = emu_streams; o; o = o->next)
        if (o == s)
            return o;
    return NULL;
}

bool emu_elsewhere(const void *p, cudaStream_t handle)
{
    const struct CUstream_st *s = emu_stream(handle);
    const int of = emu_memory_device(p);
    return s && s != &emu_legacy && of >= 0 && of != s->device;
}

cudaError_t emu_put(cudaStream_t handle, emu_work run, emu_work drop, const void *data,
                    size_t bytes)
{
    return emu_put_gate(handle, NULL, run, drop, data, bytes);
}

cudaError_t emu_put_gate(cudaStream_t handle, emu_gate ready, emu_work run, emu_work drop,
                         const void *data, size_t bytes)
{
    struct CUstream_st *s = emu_stream(handle);
    if (!s)
        return cudaErrorInvalidResourceHandle;
    if (s->capture) {
        if (s->capture->spoiled)
            return cudaErrorStreamCaptureInvalidated;
        append(&s->capture->items, ready, run, drop, data, bytes);
        s->capture->gated |= ready != NULL;
        s->loose = s != s->capture->origin;
        return cudaSuccess;
    }
    cudaError_t code = meet_legacy(s);
    if (code)
        return code;
    append(&s->items, ready, run, drop, data, bytes);
    s->put++;
    if (emu_set.eager || s->put - s->done > QUEUE_MAX)
        emu_advance(s, s->put);
    return cudaSuccess;
}

cudaError_t emu_uncaptured(void)
{
    cudaError_t code = cudaSuccess;
    for (struct CUstream_st *s = emu_streams; s; s = s->next)
        if (s->capture && s->capture->mode != cudaStreamCaptureModeRelaxed &&
            (s->capture->mode != cudaStreamCaptureModeThreadLocal ||
             pthread_equal(s->capture->owner, pthread_self()))) {
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
        *s = emu_allocate(sizeof **s);
        (*s)->flags = flags;
        (*s)->device = emu_device();
        (*s)->next = emu_legacy.next;
        emu_legacy.next = *s;
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

cudaError_t cudaStreamDestroy(cudaStream_t handle)
{
    emu_enter();
    struct CUstream_st *s = emu_stream(handle);
    if (!s || s == &emu_legacy)
        return emu_leave(cudaErrorInvalidResourceHandle);
    if (s->capture && s->capture->origin == s) {
        struct CUgraph_st *g = s->capture;
        emu_end_capture(g);
        emu_graph_leave(g);
    }
    emu_reach(s, s->put);
    struct CUstream_st **at = &emu_streams;
    while (*at != s)
        at = &(*at)->next;
    *at = s->next;
    free(s);
    return emu_leave(cudaSuccess);
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle)
{
    emu_enter();
    struct CUstream_st *s = emu_stream(handle);
    if (!s)
        return emu_leave(cudaErrorInvalidResourceHandle);
    if (s->capture) {
        s->capture->spoiled = true;
        return emu_leave(cudaErrorStreamCaptureUnsupported);
    }
    cudaError_t code = meet_legacy(s);
    if (!code)
        emu_reach(s, s->put);
    return emu_leave(code);
}

/* Reports once that work is in progress, so that a caller has to query again. */
cudaError_t cudaStreamQuery(cudaStream_t handle)
{
    emu_enter();
    struct CUstream_st *s = emu_stream(handle);
    if (!s)
        return emu_leave(cudaErrorInvalidResourceHandle);
    if (s->capture) {
        s->capture->spoiled = true;
        return emu_leave(cudaErrorStreamCaptureUnsupported);
    }
    bool busy = s->done < s->put;
    emu_advance(s, s->put);
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
