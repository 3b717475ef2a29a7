/* SPDX-License-Identifier: Apache-2.0 */
/* threads.h -- ranks that are threads of one process.
 *
 * Ranks read and write each other's memory: a sum of n ranks moves each element once in and once out. */
#ifndef LM_COMM_THREADS_H
#define LM_COMM_THREADS_H

#include "comm/comm.h"

enum { LM_THREAD_RANKS = 256 };

/* A rank's work; returns e->code.  c belongs to the caller of lm_threads_run. */
typedef lm_code lm_rank_fn(void *ctx, lm_comm *c, lm_err *e);

/* Run fn on `ranks` threads at once, each with its communicator of all of them, and wait for all.  timeout: seconds that a rank
 * waits for another one before all fail; 0: without bound.
 * Fails: the error of the rank that failed first, where it happened prefixed with "rank r of n"; LM_ELIMIT without threads. */
lm_code lm_threads_run(int ranks, double timeout, lm_rank_fn *fn, void *ctx, lm_err *e);

#endif
