/* SPDX-License-Identifier: Apache-2.0 */
/* trace.h -- a time line as a Chrome trace: JSON that chrome://tracing and Perfetto show.
 *
 * Rows are named and numbered from 0; an event lies in a row and has a name, a beginning and an end
 * in seconds of lm_now.  The first failure is kept and returned by lm_trace_write. */
#ifndef LM_GRAPH_TRACE_H
#define LM_GRAPH_TRACE_H

#include "base/file.h"
#include "graph/exec.h"

typedef struct lm_trace lm_trace;

/* `process` is the name of the whole ("train"), or of one of several, number `number` from 1. */
lm_code lm_trace_new(const char *process, int number, lm_trace **out, lm_err *e);
void lm_trace_free(lm_trace *t);

/* Times count from `zero`; without this call from the beginning of the first event. */
void lm_trace_zero(lm_trace *t, double zero);
void lm_trace_row(lm_trace *t, int row, const char *name);
void lm_trace_span(lm_trace *t, int row, const char *name, double begin, double end);

/* Nodes [first, last) of the last run of `x`, which executes `g` and was timed; `begin`: when that run
 * began.  They go to rows row + phase, with layer, parameter, FLOP/s and bytes/s (by the operators' cost
 * rules).  micro: the run's number among those of its step; -1: it has none. */
void lm_trace_exec(lm_trace *t, int row, const lm_graph *g, const lm_exec *x, size_t first,
                   size_t last, int64_t micro, double begin);

/* The events of another process as text, and: take them, as it took those.  No event may be added to the one that gave them. */
lm_code lm_trace_give(lm_trace *t, const char **text, size_t *len, lm_err *e);
void lm_trace_take(lm_trace *t, const char *text, size_t len);

/* Write the whole to a file, which is left open; no event may be added afterwards. */
lm_code lm_trace_write(lm_trace *t, lm_out *out, lm_err *e);

#endif
