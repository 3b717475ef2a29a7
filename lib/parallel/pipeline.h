/* SPDX-License-Identifier: Apache-2.0 */
/* pipeline.h -- pipeline schedules as data: which rank computes what in which order.
 *
 * A model is cut into stages 0..S-1, a batch into micro-batches 0..m-1.  A schedule has a row of steps for each rank, which
 * the rank computes in that order; what a step waits for follows from its stage and micro-batch alone:
 *     F(i, s) <- F(i, s - 1)      B(i, s), I(i, s) <- F(i, s) and B or I(i, s + 1)      W(i, s) <- I(i, s)
 * The rank of a stage is where its steps stand, for each micro-batch by itself: DualPipe has two copies of each stage, one for
 * either direction.  The same rows are run, simulated and drawn.
 *
 * Generators and their sources:
 *     gpipe            arXiv:1811.06965: all forwards, then all backwards
 *     1f1b             PipeDream-Flush, arXiv:2006.09503: the same bubble with at most p micro-batches in flight
 *     interleaved:V    arXiv:2104.04473: V stages a rank, a V-th of the bubble
 *     breadth-first:V  arXiv:2211.05953: all micro-batches of a stage before the next stage of the rank
 *     zb-h1, zb-h2     arXiv:2401.10241: gradients of weights apart, as a filling: the memory of 1f1b; twice that, no bubble
 *     zb-v             arXiv:2401.10241, section 6: two stages a rank placed like a V: no bubble in the memory of 1f1b
 *     dualpipe         arXiv:2412.19437 and deepseek-ai/DualPipe: micro-batches from both ends, F and B of two at once
 *     dualpipev        the same folded into a V: one copy of the weights */
#ifndef LM_PARALLEL_PIPELINE_H
#define LM_PARALLEL_PIPELINE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/buf.h"
#include "base/err.h"

typedef enum {
    LM_PIPE_F, /* forward */
    LM_PIPE_B, /* whole backward: gradients of inputs and of weights */
    LM_PIPE_I, /* gradients of inputs */
    LM_PIPE_W, /* gradients of weights */
} lm_pipe_kind;

typedef struct {
    int32_t micro;
    int16_t stage;
    uint8_t kind; /* lm_pipe_kind */
    bool
        joined; /* computed together with the step behind it: F of one micro-batch with B of another */
} lm_pipe_step;

typedef struct {
    lm_pipe_step *step; /* in the order in which the rank computes them */
    size_t n;
} lm_pipe_row;

typedef struct {
    int32_t ranks, stages, micros;
    lm_pipe_row *row; /* [ranks] */
} lm_pipeline;

/* The most of each, and of stages times micro-batches: some 60 bytes each are needed to simulate a schedule. */
enum {
    LM_PIPE_RANKS = 4096,
    LM_PIPE_STAGES = 16384,
    LM_PIPE_MICROS = 1 << 20,
    LM_PIPE_CELLS = 1 << 24
};

/* The generators as a specification names them, NULL-terminated: "gpipe", "interleaved:V", ... */
extern const char *const lm_pipeline_names[];
/* True if the specification begins with a generator's name; otherwise it is a file. */
bool lm_pipeline_is_name(const char *spec);
/* The ranks that have a stage in a generator's schedule: 2 for dualpipe, otherwise 1, also for NULL and a file. */
int lm_pipeline_ranks_of_stage(const char *spec);
/* The schedule of a specification for `ranks` ranks and `micros` micro-batches.  The caller owns it: lm_pipeline_fini.
 * Fails: LM_EUSAGE for a number of ranks or micro-batches that the schedule cannot have, with the nearest that it can. */
lm_code lm_pipeline_make(const char *spec, int64_t ranks, int64_t micros, lm_pipeline *out,
                         lm_err *e);
void lm_pipeline_fini(lm_pipeline *p);

/* Read the form that PyTorch's pipelining reads and writes: a line for each rank, cells separated by commas, each stage, kind and
 * micro-batch, "3F0", two that are computed together as "(0F5;3B2)OVERLAP_F_B", a pause as an empty cell.  Cells of communication
 * and of sharded weights ("1SEND_F0", "2UNSHARD") are left out: they follow from the others.  Complete and unambiguous or
 * LM_EFORMAT: every stage of every micro-batch forward and backward once, on one rank. */
lm_code lm_pipeline_read(const char *text, size_t len, const char *where, lm_pipeline *out,
                         lm_err *e);
/* Append that form. */
lm_code lm_pipeline_write(const lm_pipeline *p, lm_buf *out, lm_err *e);

/* Milliseconds of a stage: forward, gradients of inputs, gradients of weights, and of sending its result to the stage behind it, or
 * the gradient to the one before it, on another rank.  Sending takes no time of the ranks. */
typedef struct {
    double f, b, w, comm;
} lm_pipe_cost;

/* What the simulation of a schedule gives; times in ms. */
typedef struct {
    double **start;  /* [ranks][steps] */
    double makespan; /* from the first step's start to the last one's end */
    double ideal;    /* work of the busiest rank: a makespan without waiting */
    double
        span; /* the longest time of a rank from its own first step to its last: the zero-bubble papers' cost */
    double *busy; /* [ranks] */
    double *idle; /* [ranks] between the rank's first step and its last */
    int32_t *
        inflight; /* [ranks] the most stages of micro-batches that are forward, but not yet wholly backward, at a time */
    int32_t *stage_inflight; /* [stages] the same of one stage: micro-batches */
} lm_pipe_times;

/* The time of a step in a stage of that cost. */
double lm_pipe_took(const lm_pipe_cost *c, lm_pipe_kind kind);

/* Simulate.  cost: [stages].  A pair that is computed together takes the time of both.
 * Fails: LM_EFORMAT naming rank and step where the rows wait for each other in a circle. */
lm_code lm_pipeline_time(const lm_pipeline *p, const lm_pipe_cost *cost, lm_pipe_times *out,
                         lm_err *e);
void lm_pipe_times_fini(lm_pipe_times *t, int32_t ranks);

/* Shares of waiting: of the ideal time (arXiv:2104.04473: (p - 1) / m for 1f1b), of the makespan, and of the longest
 * span of a rank (arXiv:2401.10241). */
double lm_pipe_bubble_ideal(const lm_pipe_times *t);
double lm_pipe_bubble_total(const lm_pipe_times *t);
double lm_pipe_bubble_span(const lm_pipe_times *t);

/* "F", "B", "I" or "W". */
char lm_pipe_letter(lm_pipe_kind k);

#endif
