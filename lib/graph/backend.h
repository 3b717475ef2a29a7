/* SPDX-License-Identifier: Apache-2.0 */
/* backend.h -- the interface between graphs and the machine that runs them, in six groups:
 *
 *   device   properties, measurements and advice
 *   memory   allocation, copies
 *   queue    streams: orders of execution, their synchronisation and timing
 *   capture  work recorded once and replayed
 *   groups   exchanges with other devices
 *   kernel   the functions of operators
 *
 * The CPU backend is in libcore.  Others are loadable modules (libcore-cuda.so) that fill the same
 * structure; lm_backend_open opens them by name.  Code above this interface does not depend on the
 * kind of backend, except by `host_memory`: whether the host can read pointers of alloc.
 *
 * A stream is an order of execution.  On the CPU the only stream is the host's own order, in which
 * every call is complete when it returns; all streams are then NULL.  On a device, calls enqueue
 * work on a stream and return; kernels of graphs run on `main`.  Failures of the device are
 * reported by sync, with the device's reason, and are permanent: all later calls fail too, but
 * freeing still works.
 *
 * Threads: one host thread at a time. */
#ifndef LM_GRAPH_BACKEND_H
#define LM_GRAPH_BACKEND_H

#include <stddef.h>

#include "base/err.h"
#include "base/module.h"
#include "kernels/kernel.h"
#include "numeric/format.h"

typedef struct lm_backend lm_backend;
typedef struct lm_marks lm_marks;         /* points in time on a stream       */
typedef struct lm_recording lm_recording; /* work of a stream, for replays    */

/* What the ranks of a group have in common before they meet. */
typedef struct {
    char data[128];
} lm_group_id;

struct lm_backend {
    /* ---- device ---- */
    const char *name;   /* "cpu", "cuda:0"                                                     */
    const char *device; /* the processor or card, with its driver: "NVIDIA H200, sm_90, ..."   */
    const char *detail; /* the path of its kernels: "amx, 2 threads", "plain": for facts lines */
    lm_par *par;        /* host threads of the CPU's kernels; NULL for a device                */
    int threads;        /* the number that work() of kernels receives                          */
    lm_cpu_level cpu;   /* the level of kernels on the host, for a device of those beside it   */
    bool host_memory;   /* the host can read and write memory of alloc                         */
    /* The other ranks along each axis of the mesh, by lm_axis, for runs whose step names none; set by their owner.  NULL: there
     * are none. */
    struct lm_links *const *links;
    /* FLOP/s of matrix products in `act` that this device can reach, for MFU: measured here in some
     * tens of milliseconds on random data, or from a table; 0: unknown. */
    double (*peak_flops)(lm_backend *b, lm_dtype act);
    /* One line on what the path in `detail` could not do so far, so that slower kernels ran instead;
     * NULL: nothing.  Valid until the next call. */
    const char *(*shortfall)(lm_backend *b);
    /* One line on what other kernels could do better here, with the variable that selects them; NULL:
     * nothing, or the kernels were chosen by the user. */
    const char *(*advice)(lm_backend *b);
    /* The n-th device behind this one, opened with the same options: for the n-th of ranks that are threads.  NULL: not
     * supported. */
    lm_code (*behind)(lm_backend *b, int n, lm_backend **out, lm_err *e);
    void (*close)(lm_backend *b);

    /* ---- memory ---- */
    /* Zeroed.  Fails: LM_ELIMIT with the bytes requested and free. */
    lm_code (*alloc)(lm_backend *b, size_t bytes, const char *purpose, void **out, lm_err *e);
    void (*free)(lm_backend *b, void *p, size_t bytes);
    /* Host memory with fast copies to and from the device in the background (pinned); ordinary
     * memory on the CPU.  Zeroed. */
    lm_code (*host_alloc)(lm_backend *b, size_t bytes, const char *purpose, void **out, lm_err *e);
    void (*host_free)(lm_backend *b, void *p, size_t bytes);
    /* Bytes of alloc's memory that are free now, and in total. */
    lm_code (*memory)(lm_backend *b, size_t *free_bytes, size_t *total, lm_err *e);
    lm_code (*zero)(lm_backend *b, void *p, size_t bytes, lm_stream *s, lm_err *e);
    /* Either side may be host or backend memory; copied in stream order.  A host side must not change
     * until then. */
    lm_code (*copy)(lm_backend *b, void *dst, const void *src, size_t bytes, lm_stream *s,
                    lm_err *e);

    /* ---- queue ---- */
    lm_stream *main; /* where graphs run; NULL: the host's own order */
    /* Another stream beside main (copies, snapshots); NULL on the CPU. */
    lm_code (*stream_new)(lm_backend *b, lm_stream **out, lm_err *e);
    void (*stream_free)(lm_backend *b, lm_stream *s);
    /* Work enqueued on s from now on waits for all work enqueued on `first` so far. */
    lm_code (*follow)(lm_backend *b, lm_stream *s, lm_stream *first, lm_err *e);
    /* Wait for all work on s (NULL: on all streams). */
    lm_code (*sync)(lm_backend *b, lm_stream *s, lm_err *e);
    /* The numbers of the following runs on s, for kernels that read them on the device (dropout);
     * kernels on the host read call->step.  Not recorded: a replay uses the last numbers set. */
    lm_code (*step)(lm_backend *b, const lm_step *step, lm_stream *s, lm_err *e);
    /* n points in time. */
    lm_code (*marks_new)(lm_backend *b, int n, lm_marks **out, lm_err *e);
    void (*marks_free)(lm_backend *b, lm_marks *m);
    /* Set mark i to the time at which s reaches this point. */
    void (*mark)(lm_backend *b, lm_marks *m, int i, lm_stream *s);
    /* Wait for marks 0 to n-1; their seconds since mark 0. */
    lm_code (*marks_read)(lm_backend *b, lm_marks *m, int n, double *seconds, lm_err *e);
    /* Begin a named range of the host's time line in the device's own profiler (NVTX); NULL ends it. */
    void (*range)(lm_backend *b, const char *name);

    /* ---- capture (CUDA graphs); NULL: not supported ---- */
    /* Work enqueued on s from here to record_end is recorded instead of executed.  Allocations and
     * waits are not allowed in between. */
    lm_code (*record_begin)(lm_backend *b, lm_stream *s, lm_err *e);
    lm_code (*record_end)(lm_backend *b, lm_stream *s, lm_recording **out, lm_err *e);
    lm_code (*replay)(lm_backend *b, lm_recording *r, lm_stream *s, lm_err *e);
    void (*recording_free)(lm_backend *b, lm_recording *r);

    /* ---- groups of devices, of which each is one rank's (graph/links.h uses these); NULL: not supported ---- */
    /* On one rank, before the others join. */
    lm_code (*group_new)(lm_backend *b, lm_group_id *id, lm_err *e);
    /* What a rank needs by itself: it does not wait for others, which may have failed.  Calls of *out, once it has joined, put exchanges between memory of the devices on s, and can
     * be recorded; all calls of a group are on one stream.  Sums have the order and the bits of lib/comm if the backend is
     * deterministic.  Fails: LM_EIO when the library of the group is missing or fails, LM_EUSAGE for devices that cannot be a
     * group. */
    lm_code (*group_open)(lm_backend *b, int rank, int size, lm_stream *s, struct lm_links **out,
                          lm_err *e);
    /* Become a rank of the group; waits for all of them.  Fails: LM_EIO as group_open. */
    lm_code (*group_join)(lm_backend *b, struct lm_links *l, const lm_group_id *id, lm_err *e);
    /* Also of what has not joined. */
    void (*group_leave)(lm_backend *b, struct lm_links *l);
    /* Set by the owner: called from time to time while the host waits for work that may depend on other ranks, with the seconds
     * that it has waited.  A failure ends the waiting, and all exchanges of this backend; all later calls fail with it. */
    lm_code (*watch)(void *ctx, double waited, lm_err *e);
    void *watch_ctx;

    /* ---- kernel ----
     * A kernel is chosen by operator, type of the activations (lm_node_act) and format of the weight:
     * `kernel` takes the first two, `codes` all three.  A weight in a format for which `codes` is
     * false is decoded to the graph's type when it is loaded, so every format runs everywhere. */
    /* The kernel of an operator for activations of type `act`; NULL: none. */
    const lm_kernel *(*kernel)(lm_backend *b, const char *op, lm_dtype act);
    /* True if kernels of `op` for activations of type `act` read their i-th operand in the codes of f
     * (numeric/code_rows.h).  NULL: none do. */
    bool (*codes)(lm_backend *b, const char *op, int i, lm_dtype act, const lm_format *f);
    /* True if kernels of `op` for activations of type `act` read their i-th operand in panels
     * (kernels/panels.h).  NULL: none. */
    bool (*panels)(lm_backend *b, const char *op, int i, lm_dtype act);
    /* True if the joined operator `op` (lib/op/fuse.h) has a kernel of its own for this call, whose
     * operands have shapes but no data.  False: its parts run separately. */
    bool (*joins)(lm_backend *b, const char *op, lm_dtype act, const lm_call *c);
};

/* The CPU at `level` on the pool `par` (borrowed; may be NULL: one thread). */
lm_code lm_backend_cpu(lm_cpu_level level, lm_par *par, lm_backend **out, lm_err *e);
void lm_backend_close(lm_backend *b);

/* Record the work that `run` enqueues on the main stream of a backend with recordings.  Fails: the first
 * reason, of `run` or of the backend; *out is NULL, and nothing was enqueued. */
lm_code lm_record(lm_backend *b, lm_code (*run)(void *ctx, lm_err *e), void *ctx,
                  lm_recording **out, lm_err *e);

/* ---- by name ---- */

typedef struct {
    const char *device;         /* "cpu", "cuda", "cuda:1" */
    lm_cpu_level cpu;           /* lm_backend.cpu */
    lm_par *par;                /* cpu: see lm_backend_cpu */
    const char *kernels;        /* cuda: "plain", "tensor", "tf32" (stream.h); NULL: the default */
    bool deterministic;         /* the same bits in each run on the same device */
    const char *const *modules; /* folders in which modules are searched, NULL-terminated */
} lm_backend_opts;

/* Fails: LM_EUSAGE for an unknown kind of device or a bad number; LM_EIO when the module is missing
 * (names the folders), has another version, or the device cannot be used (the driver's
 * reason).  Never opens another device. */
lm_code lm_backend_open(const lm_backend_opts *o, lm_backend **out, lm_err *e);

/* True for the name of a device: "cpu", "cuda", "cuda:N". */
bool lm_device_named(const char *device);

/* The symbol LM_MODULE_SYMBOL of a module. */
typedef struct {
    lm_module_head
        head; /* the size of lm_backend; a checksum of this header and of kernels' contracts */
    lm_code (*open)(const lm_backend_opts *o, lm_backend **out, lm_err *e);
} lm_module;
#define LM_MODULE_SYMBOL "lm_module_cuda"

#endif
