/* SPDX-License-Identifier: Apache-2.0 */
/* exec.h -- memory for a graph's activations, and running it.
 *
 * The plan places every activation and every kernel's scratch in one arena, by liveness: greedy by
 * size with best fit.  The executor turns the list into a flat array of kernel calls once; a run
 * walks it and allocates nothing, except where data tell of more rows than the plan has room for
 * (lm_graph_find_rows): then it makes another plan, moves what it still needs, and goes on. */
#ifndef LM_GRAPH_EXEC_H
#define LM_GRAPH_EXEC_H

#include "graph/backend.h"
#include "graph/graph.h"

typedef struct {
    size_t *offset; /* of each value, by number: in the arena, or its slot; SIZE_MAX: in neither */
    int32_t
        *slot; /* likewise: 1 + the number of its slot, 0: the arena; NULL: no value is in a slot */
    size_t *slot_bytes; /* of each slot */
    int n_slots;
    size_t *work_offset;      /* of each node's scratch; SIZE_MAX: none */
    size_t *work_bytes;       /* of it */
    const lm_kernel **kernel; /* of each node */
    size_t bytes;             /* of the arena */
    size_t lower_bound;       /* the largest sum of live bytes at one node: no plan is smaller */
    size_t work_peak;         /* the largest scratch of one node */
    lm_vid *keep;             /* what it was asked to keep */
    int n_keep;
    double room; /* lm_graph.room; 0: values have the shapes of the graph */
} lm_plan;

/* Plan `g` for a backend (kernels say what scratch they need).  `keep`: activations that must
 * survive the whole run because the caller reads them afterwards.  Fails: LM_EUSAGE when the
 * backend lacks a kernel (names it). */
lm_code lm_plan_make(const lm_graph *g, lm_backend *b, const lm_vid *keep, int n_keep, lm_plan *out,
                     lm_err *e);
/* The same where some values lie in blocks of the caller's, slots, which may be others in each run of a part of the list
 * (lm_exec_slot).  slot: by value, 1 + the number of its slot, below n_slots; 0: none. */
lm_code lm_plan_make_slots(const lm_graph *g, lm_backend *b, const int32_t *slot, int n_slots,
                           lm_plan *out, lm_err *e);
/* The plan that keeps what `like` does, without slots, with another room. */
lm_code lm_plan_make_roomier(const lm_graph *g, lm_backend *b, const lm_plan *like, double room,
                             lm_plan *out, lm_err *e);
void lm_plan_fini(lm_plan *p);

typedef struct lm_exec lm_exec;

/* Prepare `g` to run on `b`: make the plan and allocate its arena.  g and b are borrowed. */
lm_code lm_exec_new(const lm_graph *g, lm_backend *b, const lm_vid *keep, int n_keep, lm_exec **out,
                    lm_err *e);
/* The same in the arena of `with` when that is large enough (otherwise in a new one); `with` may be
 * NULL.  The two must never run at the same time, nor keep values over each other's runs; `with`
 * must live longer. */
lm_code lm_exec_new_sharing(const lm_graph *g, lm_backend *b, const lm_vid *keep, int n_keep,
                            lm_exec *with, lm_exec **out, lm_err *e);
/* The same by a plan that was made of `g` for `b`, with what it keeps; borrowed. */
lm_code lm_exec_new_planned(const lm_graph *g, lm_backend *b, const lm_plan *plan, lm_exec *with,
                            lm_exec **out, lm_err *e);
void lm_exec_free(lm_exec *x);
/* Bytes of its arena; 0 if it runs in another one's. */
size_t lm_exec_bytes(const lm_exec *x);

/* Set the memory of a value that is not an activation; each such value that a node uses must be
 * bound before the first run.  A view lies in the memory of its value and is not bound. */
void lm_exec_bind(lm_exec *x, lm_vid v, void *data);
/* Set the memory of slot number `slot`, at a multiple of 128 bytes: in all runs from now on.  On the host. */
void lm_exec_slot(lm_exec *x, int slot, void *base);
/* Memory of a value: the bound pointer, or its address in the arena (valid after a run for kept
 * values), or in its slot. */
void *lm_exec_data(const lm_exec *x, lm_vid v);

/* Run the whole list on the backend's main stream.  On a device this returns before the run is
 * complete, and failures of the device are reported by the backend's sync.  Fails: LM_EBUG if a
 * value is not bound; errors of the backend; the first failure of an exchange with other ranks (step->links). */
lm_code lm_exec_run(lm_exec *x, const lm_step *step, lm_err *e);
/* The same for nodes [first, last), and of those with a condition (lm_node.when) only where it holds: due[when],
 * NULL: everywhere. */
lm_code lm_exec_run_part(lm_exec *x, size_t first, size_t last, const bool *due,
                         const lm_step *step, lm_err *e);

/* Measure the time of each node in later runs.  On by default where memory is the host's (it costs
 * nothing there); on a device a timed run waits until it is complete. */
lm_code lm_exec_timing(lm_exec *x, bool on, lm_err *e);

/* The last run, node by node: seconds from the beginning of its part to the node's beginning and end.  False:
 * that run was not timed or passed the node over, or there is no node k. */
typedef struct {
    const lm_node *node;
    double begin, end, flops, bytes; /* by the operator's cost rule */
} lm_exec_span;
bool lm_exec_span_at(const lm_exec *x, size_t k, lm_exec_span *out);

/* Seconds spent so far in timed runs, by phase and by operator. */
typedef struct {
    const char *op;
    lm_phase phase;
    double seconds, flops;
    int64_t calls;
} lm_exec_time;
/* Lines in falling order of seconds; borrowed until the next call.  Returns their number. */
size_t lm_exec_times(lm_exec *x, const lm_exec_time **out);
/* Set these sums to zero: measurements begin after a warm-up. */
void lm_exec_times_reset(lm_exec *x);

#endif
