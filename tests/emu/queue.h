/* SPDX-License-Identifier: Apache-2.0 */
/* queue.h -- streams and graphs of the emulation: queue.c, event.c, graph.c.
 *
 * A stream is a list of work of one device.  A position in a list is the number of pieces appended before it; the
 * mark of an event is such a number.  A graph is a list that is kept.  The lock of device.c
 * protects all of them. */
#ifndef LM_EMU_QUEUE_H
#define LM_EMU_QUEUE_H

#include <pthread.h>

#include "emu_impl.h"

typedef struct work {
    struct work *next;
    emu_gate ready; /* NULL: it always is */
    emu_work run, drop;
    size_t bytes; /* of data */
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
    pthread_t owner; /* the thread that captures */
    bool spoiled, gated;
};
struct CUgraphExec_st {
    struct CUgraph_st *graph;
};

struct CUstream_st {
    struct CUstream_st *next;
    unsigned flags;
    int device;
    list items;
    uint64_t put, done;
    struct CUgraph_st *capture; /* list that gets the work during a capture */
    bool loose;                 /* captured work that the origin has not waited for */
};

/* All streams; the first is the default stream. */
LM_EMU_HIDDEN extern struct CUstream_st *emu_streams, emu_legacy;

/* Zeros. */
LM_EMU_HIDDEN void *emu_allocate(size_t bytes);
/* Drop the work of a list. */
LM_EMU_HIDDEN void emu_empty(list *l);
/* Execute the work on s before `until` as far as it is ready; true if all of it is done. */
LM_EMU_HIDDEN bool emu_advance(struct CUstream_st *s, uint64_t until);
/* Wait until it is. */
LM_EMU_HIDDEN void emu_reach(struct CUstream_st *s, uint64_t until);
/* The stream of a handle; NULL if there is none. */
LM_EMU_HIDDEN struct CUstream_st *emu_stream(cudaStream_t s);

/* graph.c: remove a user; no stream is captured into g after this */
LM_EMU_HIDDEN void emu_graph_leave(struct CUgraph_st *g);
LM_EMU_HIDDEN void emu_end_capture(struct CUgraph_st *g);

#endif
