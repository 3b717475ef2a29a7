/* SPDX-License-Identifier: Apache-2.0 */
/* par.h -- one persistent pool of threads, and the loops that run on it.
 *
 * Kernels never create threads: they receive an lm_par and split a range.  Chunks are handed out
 * dynamically, so a kernel must give the same bits whichever thread takes which chunk: write
 * disjoint outputs, and reduce over fixed blocks in a fixed order, never per worker. Workers
 * spin for some microseconds, then sleep on a futex: a loop costs about 1-2 us when the pool is
 * warm. */
#ifndef LM_BASE_PAR_H
#define LM_BASE_PAR_H

#include <stdint.h>

#include "base/err.h"

typedef struct lm_par lm_par;

/* A pool of `threads` workers, the caller counted (1 = no thread is created; 0 = the cores of the
 * affinity mask, bounded by the cgroup's quota).  Threads are pinned when they cover the mask. */
lm_code lm_par_new(lm_par **out, int threads, lm_err *e);
void lm_par_free(lm_par *p);
int lm_par_threads(const lm_par *p); /* p NULL: 1 */
int lm_cpu_count(void);              /* the number that 0 means above */

/* begin <= i < end; worker in [0, lm_par_threads), for indexing per-worker scratch only. */
typedef void (*lm_par_fn)(void *ctx, int64_t begin, int64_t end, int worker);

/* Call fn over [0, n) in chunks of `grain` (the last may be short); returns when all are done.  p
 * may be NULL (runs here, as one thread).  Calls do not nest: a call from inside fn runs in its
 * caller, as the same worker if p is the same pool, as worker 0 if not. */
void lm_par_for(lm_par *p, int64_t n, int64_t grain, lm_par_fn fn, void *ctx);

/* Run fn(ctx, worker, worker+1, worker) once on every worker, all at the same time (per-thread
 * set-up such as tile configuration, and kernels that keep their own static split). */
void lm_par_each(lm_par *p, lm_par_fn fn, void *ctx);

/* An order-preserving pipeline: read() makes items, work() runs on any thread, write() sees them in
 * order, one call at a time, on whichever worker is free (read() likewise).  At most `depth` items
 * in flight.  read sets *item to NULL at the end. The first failure stops all three and is returned
 * in *e; drop (may be NULL) frees the items not written. */
typedef struct {
    lm_code (*read)(void *ctx, void **item, lm_err *e);
    lm_code (*work)(void *ctx, void *item, int worker, lm_err *e);
    lm_code (*write)(void *ctx, void *item, lm_err *e); /* takes the item over */
    void (*drop)(void *ctx, void *item);
    void *ctx;
    int depth;
} lm_pipe_ops;
lm_code lm_par_pipe(lm_par *p, const lm_pipe_ops *ops, lm_err *e);

#endif
