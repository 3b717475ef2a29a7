/* SPDX-License-Identifier: Apache-2.0 */
/* graph.c -- captures and graphs of the emulated device. */
#include <stdlib.h>

#include "queue.h"

static unsigned long captures;

void emu_graph_leave(struct CUgraph_st *g)
{
    if (g && --g->users == 0) {
        emu_empty(&g->items);
        free(g);
    }
}

void emu_end_capture(struct CUgraph_st *g)
{
    for (struct CUstream_st *s = emu_streams; s; s = s->next)
        if (s->capture == g)
            s->capture = NULL;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, enum cudaStreamCaptureMode mode)
{
    emu_enter();
    struct CUstream_st *s = emu_stream(handle);
    if (!s)
        return emu_leave(cudaErrorInvalidResourceHandle);
    if (s == &emu_legacy)
        return emu_leave(cudaErrorStreamCaptureUnsupported);
    if (s->capture)
        return emu_leave(cudaErrorIllegalState);
    s->capture = emu_allocate(sizeof *s->capture);
    *s->capture = (struct CUgraph_st){
        .users = 1, .origin = s, .id = ++captures, .mode = mode, .owner = pthread_self()
    };
    return emu_leave(cudaSuccess);
}

cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t *graph)
{
    emu_enter();
    *graph = NULL;
    struct CUstream_st *s = emu_stream(handle);
    if (!s)
        return emu_leave(cudaErrorInvalidResourceHandle);
    struct CUgraph_st *g = s->capture;
    if (!g)
        return emu_leave(cudaErrorIllegalState);
    if (g->origin != s)
        return emu_leave(cudaErrorStreamCaptureUnmatched);
    cudaError_t code = g->spoiled ? cudaErrorStreamCaptureInvalidated : cudaSuccess;
    for (struct CUstream_st *o = emu_streams; o && !code; o = o->next)
        if (o->capture == g && o->loose)
            code = cudaErrorStreamCaptureUnjoined;
    emu_end_capture(g);
    if (code)
        emu_graph_leave(g);
    else
        *graph = g;
    return emu_leave(code);
}

cudaError_t cudaStreamIsCapturing(cudaStream_t handle, enum cudaStreamCaptureStatus *status)
{
    emu_enter();
    struct CUstream_st *s = emu_stream(handle);
    if (!s)
        return emu_leave(cudaErrorInvalidResourceHandle);
    *status = !s->capture           ? cudaStreamCaptureStatusNone
              : s->capture->spoiled ? cudaStreamCaptureStatusInvalidated
                                    : cudaStreamCaptureStatusActive;
    return emu_leave(cudaSuccess);
}

/* Returns the number of nodes only. */
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
    *exec = emu_allocate(sizeof **exec);
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
    emu_graph_leave(*(struct CUgraph_st **)data);
}

/* What may wait for other devices is executed piece by piece; each replay has its own state. */
static cudaError_t put_items(const struct CUgraph_st *g, cudaStream_t s)
{
    cudaError_t code = cudaSuccess;
    for (const work *w = g->items.first; w && !code; w = w->next)
        code = emu_put_gate(s, w->ready, w->run, w->drop, w->data, w->bytes);
    return code;
}

cudaError_t cudaGraphUpload(cudaGraphExec_t exec, cudaStream_t s)
{
    emu_enter();
    return emu_leave(exec && emu_stream(s) ? cudaSuccess : cudaErrorInvalidValue);
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t s)
{
    emu_enter();
    if (!exec)
        return emu_leave(cudaErrorInvalidValue);
    if (exec->graph->gated)
        return emu_leave(put_items(exec->graph, s));
    exec->graph->users++;
    cudaError_t code = emu_put(s, run_graph, drop_graph, &exec->graph, sizeof exec->graph);
    if (code)
        emu_graph_leave(exec->graph);
    return emu_leave(code);
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec)
{
    emu_enter();
    if (!exec)
        return emu_leave(cudaErrorInvalidValue);
    emu_graph_leave(exec->graph);
    free(exec);
    return emu_leave(cudaSuccess);
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
    emu_enter();
    if (!graph)
        return emu_leave(cudaErrorInvalidValue);
    emu_graph_leave(graph);
    return emu_leave(cudaSuccess);
}
