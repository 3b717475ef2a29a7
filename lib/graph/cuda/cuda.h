/* SPDX-License-Identifier: Apache-2.0 */
/* cuda.h -- internal to the CUDA backend: its state, and how failures of the runtime are reported.
 *
 * The files: backend.c opens and closes, memory.c, order.c (streams, waiting, step numbers), time.c,
 * record.c, group.c and nccl.c (exchanges), device.c (what cards can do), error.c.  The contract of all of it is graph/backend.h. */
#ifndef LM_GRAPH_CUDA_CUDA_H
#define LM_GRAPH_CUDA_CUDA_H

#include <cuda_runtime_api.h>
#include <stdatomic.h>

#include "graph/backend.h"
#include "kernels/cuda/stream.h"

enum { STEP_ENTRIES = 128 };

/* A stream and the way step numbers take to it: the host fills an entry of pinned memory, the device
 * copies that to where its kernels read, in stream order.  An entry is used again when its copy is
 * done, which a host less than STEP_ENTRIES runs ahead never waits for. */
typedef struct cuda_stream cuda_stream;
struct cuda_stream {
    lm_stream s;      /* first: kernels get this */
    cudaEvent_t here; /* for streams that follow */
    lm_step *entries;
    cudaEvent_t sent[STEP_ENTRIES];
    int64_t steps; /* sent so far */
    cuda_stream *next;
};

typedef struct cuda_group cuda_group; /* group.c */

typedef struct {
    lm_backend b; /* first: the interface is cast to this */
    int index, sms, cc;
    size_t shared_max;
    lm_cuda_level level;
    bool deterministic, by_default; /* by_default: the level was not chosen */
    struct lm_cuda_lt *lt;
    cuda_stream *streams; /* main is the last of the list */
    cuda_group *groups;
    lm_err ended; /* code LM_OK: the groups are whole, or there are none */
    /* The first failure of the device, and every call's answer from then on. */
    _Atomic(int) lost;
    char name[32], device[192], detail[64], model[128], shortfall[224], advice[320];
} cuda_backend;

static inline cuda_backend *cuda_of(lm_backend *b)
{
    return (cuda_backend *)b;
}
/* The stream behind an interface's pointer: NULL means main. */
static inline cuda_stream *cuda_stream_of(lm_backend *b, lm_stream *s)
{
    return (cuda_stream *)(s ? s : b->main);
}

/* ---- error.c ---- */

/* Make the device the thread's own; fails once the device is lost. */
lm_code cuda_enter(cuda_backend *c, lm_err *e);
/* What a call of the runtime answered, while `doing` ("copying").  A failure here is the device's
 * end: it is kept, unless it affects only a recording.  An earlier launch that failed without a
 * report is found here too. */
lm_code cuda_did(cuda_backend *c, cudaError_t answer, const char *doing, lm_err *e);
/* Say why, without the device being lost by it. */
lm_code cuda_refused(cuda_backend *c, cudaError_t answer, const char *doing, lm_err *e);
/* Used when freeing: errors are ignored. */
void cuda_quiet(cudaError_t answer);

/* ---- the members of lm_backend, by file ---- */

void cuda_fill_memory(lm_backend *b);
void cuda_fill_order(lm_backend *b);
void cuda_fill_time(lm_backend *b);
void cuda_fill_record(lm_backend *b);
void cuda_fill_groups(lm_backend *b);

/* order.c: wait for an event, or for all work on a stream if it is NULL; in groups also for failures of other ranks. */
lm_code cuda_await(cuda_backend *c, cudaStream_t s, cudaEvent_t event, const char *doing,
                   lm_err *e);

/* group.c: the first failure of an exchange so far; end all exchanges, without results. */
lm_code cuda_groups_look(cuda_backend *c, lm_err *e);
void cuda_groups_end(cuda_backend *c);

/* Whether what is put on the stream now is kept by a recording. */
bool cuda_recording(const cuda_stream *s);
/* Kernels, copies and fills that a replay puts on the stream.  Exported for measurements. */
__attribute__((visibility("default"))) size_t lm_cuda_recording_nodes(const lm_recording *r);

/* ---- device.c ---- */

/* Dense FLOP/s of matrix products on the card of this name with so many multiprocessors, 0: not in
 * the table.  tf32: of F32 products whose factors are rounded to TF32. */
double cuda_peak(const char *name, int sms, lm_dtype act, bool tf32);

#endif
