/* SPDX-License-Identifier: Apache-2.0 */
/* exec_impl.h -- what an executor is made of.  Private to lib/graph. */
#ifndef LM_GRAPH_EXEC_IMPL_H
#define LM_GRAPH_EXEC_IMPL_H

#include "graph/exec.h"

typedef struct {
    lm_call call;
    lm_kernel_fn run;
    bool live; /* it has operands of which the data tell how many rows there are */
    double seconds, flops, bytes;
    /* in the last run of its part; begin < 0: it was not timed, or passed over */
    double begin, end;
    int64_t calls;
} step_call;

struct lm_exec {
    const lm_graph *g;
    lm_backend *b;
    const lm_plan *plan;
    lm_plan own;     /* where the caller has none */
    lm_arena *arena; /* length of the operands array below */
    step_call *calls;
    void **data; /* by value */
    char *block; /* the activations' arena */
    lm_exec_time *times;
    size_t n_times;
    lm_marks *marks; /* before each node and after the last; NULL: runs are not timed */
    double *at;      /* their seconds in the last timed run, in the order of that run */
    size_t block_bytes;
    lm_exec *with; /* the executor to which the block belongs; NULL: this one */
    bool ready;    /* operands carry the bound pointers */
};

/* Shapes, scratch and kernel of call k by the plan; operands have no memory until they get it (set_operands). */
void lm_exec_lay_call(lm_exec *x, size_t k);
/* Values of the arena lie in x->block. */
void lm_exec_lay_values(lm_exec *x);
lm_code lm_exec_set_operands(lm_exec *x, lm_err *e);

/* ---- rows whose number is in the data ---- */

/* Before a run: if the block of x->with has become another one, run in that. */
void lm_exec_follow(lm_exec *x);
/* Before call k, which x->calls[k].live says to have such rows: give it those that there are; where it makes more than there
 * is room for, plan anew first.  Fails: for memory. */
lm_code lm_exec_set_rows(lm_exec *x, size_t k, const lm_step *now, lm_err *e);

#endif
