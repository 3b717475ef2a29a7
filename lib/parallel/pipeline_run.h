/* SPDX-License-Identifier: Apache-2.0 */
/* pipeline_run.h -- runs the row of a rank in a pipeline schedule, and carries what crosses the borders of stages.
 *
 * What a step is, and what crosses a border, is the caller's.  Results leave, as copies, as soon as their step is complete,
 * and receives begin one step ahead, on threads of their own (comm/lane.h), so that both go on while the rank computes.  A
 * stage has slots: a micro-batch is in one of them from its first message, or forward, to the end of its backward.
 *
 * A stage has one rank, or two with a copy of its weights each: the first half of the micro-batches then takes one way through
 * the ranks, the second half the other way, and ranks are twins: either has the stages of the other.  A rank takes the
 * micro-batches of a stage in their order: lm_pipeline_check_run. */
#ifndef LM_PARALLEL_PIPELINE_RUN_H
#define LM_PARALLEL_PIPELINE_RUN_H

#include "comm/comm.h"
#include "parallel/pipeline.h"

typedef struct {
    void *data;
    size_t bytes;
} lm_pipe_part;

typedef struct {
    void *ctx;
    /* Run a step whose micro-batch is in this slot of its stage; what it reads of other stages is there. */
    lm_code (*compute)(void *ctx, const lm_pipe_step *s, int slot, lm_err *e);
    /* Number k of what crosses the border behind stage `border`, down with the forward or up with the backward: where the
     * sender, or the receiver, has it in a slot.  Both have the same sizes.  False: there are not so many. */
    bool (*part)(void *ctx, int border, bool up, bool sender, int slot, size_t k,
                 lm_pipe_part *out);
} lm_pipe_work;

/* Check that a schedule can be run.  Fails: LM_EUSAGE naming the first step that is not so. */
lm_code lm_pipeline_check_run(const lm_pipeline *p, lm_err *e);
/* 2 if stages have two ranks each, otherwise 1. */
int lm_pipeline_ways(const lm_pipeline *p);
/* The way of a micro-batch: 0, or 1. */
int lm_pipeline_way(const lm_pipeline *p, int ways, int64_t micro);
/* rank[0..stages-1]: that of each stage in the micro-batches of a way. */
void lm_pipeline_ranks(const lm_pipeline *p, int way, int *rank);
/* True if it has gradients of inputs and weights apart. */
bool lm_pipeline_is_apart(const lm_pipeline *p);
/* *slots: of a stage, what a rank needs; 0 if it does not have the stage.  Fails: for memory. */
lm_code lm_pipeline_slots(const lm_pipeline *p, int stage, int rank, int *slots, lm_err *e);

typedef struct lm_pipe_runner lm_pipe_runner;

/* c: the ranks of the schedule in its order.  All are borrowed.  Collective. */
lm_code lm_pipe_runner_new(const lm_pipeline *p, const lm_pipe_work *w, lm_comm *c,
                           lm_pipe_runner **out, lm_err *e);
void lm_pipe_runner_free(lm_pipe_runner *r); /* after a failure, lm_comm_abort comes first */

/* Run the row.  Fails: as `compute` and messages. */
lm_code lm_pipe_runner_run(lm_pipe_runner *r, lm_err *e);
/* Run the forward of one micro-batch through the stages that this rank has in way 0, in slot 0 of each, by another work whose
 * borders are w->part's: an evaluation. */
lm_code lm_pipe_runner_forward(lm_pipe_runner *r, const lm_pipe_work *w, lm_err *e);

/* So far: seconds of steps, of whole rows, that a rank waited for others in them, and bytes that it gave. */
typedef struct {
    double busy, all, bytes;
} lm_pipe_use;
lm_pipe_use lm_pipe_runner_used(const lm_pipe_runner *r);
void lm_pipe_runner_patience(lm_pipe_runner *r, double seconds);

#endif
