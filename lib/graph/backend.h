/* SPDX-License-Identifier: Apache-2.0 */
/* backend.h -- where a graph runs: memory, streams and a table of kernels.
 *
 * The CPU backend is in libcore.  Others are loadable modules (libcore-cuda.so) that fill the same
 * structure, opened by name when asked for (lm_backend_open); nothing above this interface knows
 * which one it has, but for `host_memory`: whether pointers of alloc can be read by the host.
 *
 * A stream is an order of execution.  The host's own order is the only stream of the CPU, where
 * every call is complete when it returns; there all streams are NULL.  On a device, calls put work on
 * a stream and return; kernels of graphs go to `main`.  Failures of the device surface in sync, with
 * the device's reason, and stay: whatever is called afterwards fails too, and freeing still works. */
#ifndef LM_GRAPH_BACKEND_H
#define LM_GRAPH_BACKEND_H

#include <stddef.h>

#include "base/err.h"
#include "kernels/kernel.h"
#include "numeric/format.h"

typedef struct lm_backend lm_backend;
typedef struct lm_marks lm_marks;         /* points in time on a stream */
typedef struct lm_recording lm_recording; /* work that was put on a stream, to be put there again */

struct lm_backend {
    const char *name;   /* "cpu", "cuda:0"                                                     */
    const char *device; /* the processor or card, with its driver: "NVIDIA H200, sm_90, ..."   */
    const char *detail; /* the path of its kernels: "amx, 2 threads", "plain": for facts lines */
    lm_par *par;        /* host threads (kernels of the CPU); of a device's backend: NULL      */
    int threads;        /* what work() of kernels is asked for                                 */
    bool host_memory;   /* memory of alloc can be read and written by the host                 */
    lm_stream *main;    /* where graphs run; NULL: the host's own order                        */

    /* ---- memory ---- */
    /* Zeroed.  Fails: LM_ELIMIT with the bytes asked for and those free. */
    lm_code (*alloc)(lm_backend *b, size_t bytes, const char *purpose, void **out, lm_err *e);
    void (*free)(lm_backend *b, void *p, size_t bytes);
    /* Host memory that copies to and from the device run fast and in the background from (pinned);
     * ordinary memory on the CPU.  Zeroed. */
    lm_code (*host_alloc)(lm_backend *b, size_t bytes, const char *purpose, void **out, lm_err *e);
    void (*host_free)(lm_backend *b, void *p, size_t bytes);
    /* Bytes of alloc's memory that are free now, and in all. */
    lm_code (*memory)(lm_backend *b, size_t *free_bytes, size_t *total, lm_err *e);
    lm_code (*zero)(lm_backend *b, void *p, size_t bytes, lm_stream *s, lm_err *e);
    /* Either side may be host or backend memory; done in stream order.  A host side must stay as it
     * is until then. */
    lm_code (*copy)(lm_backend *b, void *dst, const void *src, size_t bytes, lm_stream *s,
                    lm_err *e);

    /* ---- order ---- */
    /* One more stream beside main (copies, snapshots); NULL on the CPU. */
    lm_code (*stream_new)(lm_backend *b, lm_stream **out, lm_err *e);
    void (*stream_free)(lm_backend *b, lm_stream *s);
    /* What is put on s from now on waits for all that is on `first` now. */
    lm_code (*follow)(lm_backend *b, lm_stream *s, lm_stream *first, lm_err *e);
    /* Wait for everything on s (NULL: on all streams). */
    lm_code (*sync)(lm_backend *b, lm_stream *s, lm_err *e);
    /* The numbers of the runs that follow on s, for kernels that read them on the device (dropout);
     * kernels on the host read call->step.  Not recorded: a replay has the numbers given before it. */
    lm_code (*step)(lm_backend *b, const lm_step *step, lm_stream *s, lm_err *e);

    /* ---- time ---- */
    lm_code (*marks_new)(lm_backend *b, int n, lm_marks **out, lm_err *e);
    void (*marks_free)(lm_backend *b, lm_marks *m);
    /* The i-th mark is the time at which s gets here. */
    void (*mark)(lm_backend *b, lm_marks *m, int i, lm_stream *s);
    /* Wait for marks 0 to n-1, and their seconds since mark 0. */
    lm_code (*marks_read)(lm_backend *b, lm_marks *m, int n, double *seconds, lm_err *e);
    /* A named stretch of the host's time line for the device's own profiler (NVTX); NULL ends it. */
    void (*range)(lm_backend *b, const char *name);

    /* ---- recordings (CUDA graphs); NULL where the backend has none ---- */
    /* What is put on s from here to record_end is not done but kept.  Neither allocations nor waits
     * may lie between them. */
    lm_code (*record_begin)(lm_backend *b, lm_stream *s, lm_err *e);
    lm_code (*record_end)(lm_backend *b, lm_stream *s, lm_recording **out, lm_err *e);
    lm_code (*replay)(lm_backend *b, lm_recording *r, lm_stream *s, lm_err *e);
    void (*recording_free)(lm_backend *b, lm_recording *r);

    /* ---- kernels ---- */
    const lm_kernel *(*kernel)(lm_backend *b, const char *op, lm_dtype act);
    /* Whether kernels of `op` for activations of type `act` read their i-th operand in the codes of f
     * (numeric/code_rows.h).  NULL: none does; such weights become numbers when they are loaded. */
    bool (*codes)(lm_backend *b, const char *op, int i, lm_dtype act, const lm_format *f);
    /* Whether the joined operator `op` (lib/op/fuse.h) has a kernel of its own here that serves this
     * call, whose operands have shapes but no data.  False: its parts run one by one. */
    bool (*joins)(lm_backend *b, const char *op, lm_dtype act, const lm_call *c);
    /* FLOP/s of matrix products in `act` that this device can reach, for MFU: measured here in some
     * tens of milliseconds on random data, or from a table; 0: unknown. */
    double (*peak_flops)(lm_backend *b, lm_dtype act);
    /* What the path that `detail` names could not do so far, in one line that is NULL when there is
     * nothing to tell: slower kernels came in its place.  Lives until the next call. */
    const char *(*shortfall)(lm_backend *b);
    /* What other kernels, which were not asked for, could do better here, in one line that names the variable
     * to set; NULL: nothing, or kernels were chosen. */
    const char *(*advice)(lm_backend *b);
    void (*close)(lm_backend *b);
};

/* The CPU at `level` on the pool `par` (borrowed; may be NULL: one thread). */
lm_code lm_backend_cpu(lm_cpu_level level, lm_par *par, lm_backend **out, lm_err *e);
void lm_backend_close(lm_backend *b);

/* ---- by name ---- */

typedef struct {
    const char *device;         /* "cpu", "cuda", "cuda:1" */
    lm_cpu_level cpu;           /* cpu: as lm_backend_cpu */
    lm_par *par;                /* likewise */
    const char *kernels;        /* cuda: "plain", "tensor", "tf32" (stream.h); NULL: the default */
    bool deterministic;         /* the same bits again on the same device */
    const char *const *modules; /* folders where modules are looked for, NULL-terminated */
} lm_backend_opts;

/* Fails: LM_EUSAGE for a device of no known kind or a bad number; LM_EIO when the module is not
 * there (names the folders), is of another version, or the device cannot be used (the driver's
 * reason).  Never another device than the one asked for. */
lm_code lm_backend_open(const lm_backend_opts *o, lm_backend **out, lm_err *e);

/* Whether this is the name of a device: "cpu", "cuda", "cuda:N". */
bool lm_device_named(const char *device);

/* What a module exports under the name LM_MODULE_SYMBOL. */
typedef struct {
    const char *version; /* LM_VERSION of its build: must be that of the library */
    size_t backend_size; /* sizeof(lm_backend) likewise */
    uint32_t contracts;  /* a checksum of this header and of kernels' contracts, likewise */
    lm_code (*open)(const lm_backend_opts *o, lm_backend **out, lm_err *e);
} lm_module;
#define LM_MODULE_SYMBOL "lm_module_cuda"

#endif
