/* backend.h -- where a graph runs: memory, streams and a table of kernels.
 *
 * The CPU backend is below; others (libcore-cuda.so) fill the same structure.  Streams of the CPU
 * backend are the caller's own order: every call is complete when it returns. */
#ifndef LM_GRAPH_BACKEND_H
#define LM_GRAPH_BACKEND_H

#include <stddef.h>

#include "base/err.h"
#include "kernels/kernel.h"

typedef struct lm_backend lm_backend;
typedef struct lm_stream lm_stream; /* NULL: the default stream */

struct lm_backend {
    const char *name;   /* "cpu"                              */
    const char *detail; /* "amx, 2 threads": for facts lines  */
    lm_par *par;        /* host threads (kernels of the CPU)  */
    int threads;
    bool host_memory; /* memory of alloc can be read and written by the host */

    lm_code (*alloc)(lm_backend *b, size_t bytes, const char *purpose, void **out, lm_err *e);
    void (*free)(lm_backend *b, void *p, size_t bytes);
    lm_code (*zero)(lm_backend *b, void *p, size_t bytes, lm_stream *s, lm_err *e);
    /* Either side may be host or backend memory; done in stream order. */
    lm_code (*copy)(lm_backend *b, void *dst, const void *src, size_t bytes, lm_stream *s,
                    lm_err *e);
    /* Wait for everything submitted on s (NULL: on all streams); failures of kernels surface here.
     */
    lm_code (*sync)(lm_backend *b, lm_stream *s, lm_err *e);
    const lm_kernel *(*kernel)(lm_backend *b, const char *op, lm_dtype act);
    /* FLOP/s of matrix products in `act` that this device can reach, for MFU: measured here in some
     * tens of milliseconds on random data, or from a table; 0: unknown. */
    double (*peak_flops)(lm_backend *b, lm_dtype act);
    void (*close)(lm_backend *b);
};

/* The CPU at `level` on the pool `par` (borrowed; may be NULL: one thread). */
lm_code lm_backend_cpu(lm_cpu_level level, lm_par *par, lm_backend **out, lm_err *e);
void lm_backend_close(lm_backend *b);

#endif
