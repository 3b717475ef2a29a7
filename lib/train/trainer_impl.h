/* SPDX-License-Identifier: Apache-2.0 */
/* trainer_impl.h -- shared by the trainer's files: trainer.c makes and drives it, trainer_step.c
 * makes a step, trainer_save.c saves, trainer_numeric.c ends a run whose numbers are not finite, trainer_report.c
 * reports, trainer_fit.c checks memory, trainer_ranks.c shares the work, trainer_share.c the update, trainer_train.c
 * starts all ranks.  Private to lib/train. */
#ifndef LM_TRAIN_TRAINER_IMPL_H
#define LM_TRAIN_TRAINER_IMPL_H

#include <stddef.h>

#include "comm/gather.h"
#include "graph/ring.h"
#include "graph/trace.h"
#include "kernels/comm.h"
#include "kernels/route.h"
#include "train/buckets.h"
#include "train/leaves.h"
#include "train/monitor.h"
#include "train/run_tiers.h"
#include "train/trainer.h"

/* Results of a step in memory of the backend. */
typedef struct {
    double loss;                 /* sum over the rows of all micro-batches */
    double aux;                  /* losses of routers, sum over the micro-batches */
    double ahead[LM_MOST_AHEAD]; /* of each module that predicts tokens further on, sum over rows */
    double sumsq;                /* of the gradients */
    double weights;              /* sum of squares of the weights, for checkpoints */
} step_numbers;

/* Rows of a trace; those of the graph's phases come first. */
enum {
    TRACE_OPTIMIZER = LM_PHASE_UPDATE,
    TRACE_DATA,
    TRACE_CHECKPOINT,
    TRACE_WRITER,
    TRACE_COMM,   /* for which the step waits */
    TRACE_HIDDEN, /* during which it computes */
    TRACE_AHEAD,  /* the same of weights that are gathered, beside sums */
};

/* What a rank takes to communicate: seconds, and bytes that it gives along the axes. */
typedef struct {
    double seconds, bytes[LM_AXES];
} rank_use;

/* The results of one step, on the host. */
typedef struct {
    double loss, norm, lr, seconds, flops;
    rank_use used;                       /* of `seconds`, and bytes: in communication */
    double aux;                          /* losses of routers, the mean over micro-batches */
    double ahead[LM_MOST_AHEAD];         /* of each module that predicts tokens further on, */
    int64_t ahead_tokens[LM_MOST_AHEAD]; /* and of how many targets */
    int64_t tokens, micros;
    bool logged;
    bool given_up; /* a stop was requested before it had begun: nothing has changed */
    lm_monitor_reading reading;
} step_info;

/* Those of step_numbers that are summed over micro-batches. */
enum { TRAINER_SUMS = offsetof(step_numbers, sumsq) / sizeof(double) };

/* A folder to which this rank writes checkpoints, or its part of them; the first is the run's own. */
typedef struct {
    lm_ckpt *ckpt;         /* NULL: this rank writes none */
    int64_t every;         /* steps; 0: not by steps */
    double seconds, began; /* 0: not by time; when the last one was begun */
    int64_t saving; /* step of the last one that was begun, while it has no record; -1: none */
    bool parts;     /* the same on all ranks: one whose parts are not known to be written by all */
} trainer_place;
enum { TRAINER_PLACES = 1 + LM_RUN_TIERS, TRAINER_OWN = 1 };

typedef struct trainer_pipe trainer_pipe;

typedef struct trainer_ahead trainer_ahead;

struct lm_trainer {
    lm_trainer_opts o;
    lm_trainer_io io;
    lm_backend *b;
    lm_program *program;
    bool own_program; /* built here */
    lm_train_state s;
    lm_evaluator eval;
    int rank, ranks;         /* along dp */
    bool leads;              /* rank 0 of all */
    lm_comm *along[LM_AXES]; /* the ranks along each axis; NULL: there is one */
    bool is_shared; /* each rank has a part of the model's list (lm_inner_axes), or of its update */
    size_t *parts_of_ranks; /* along dp: counts of one exchange */
    trainer_ahead
        *ahead; /* adds up gradients during the backward; NULL: they are added up behind it */
    lm_links *link[LM_AXES]; /* of the ranks along these axes, for kernels */
    lm_links *
        sums; /* of those along dp, in memory of the backend, on a stream of their own; NULL: it is alone */
    lm_stream *summing; /* that stream; NULL on the host */
    lm_comm *
        gathering; /* another group of them, by which graphs gather parameters; NULL: they do not */
    lm_gatherer *gatherer; /* its thread */
    double summed;         /* bytes that this rank has given to them on a device */
    lm_ring *ring;         /* of those along cp, which their links call; NULL: none */
    int64_t first, micros; /* this rank's micro-batches of a step */
    lm_leaves *leaves;     /* NULL: it has one leaf */
    trainer_pipe *pipe;    /* NULL: it has all layers */
    float **
        apart; /* by addend of the training's model: its memory beside the block, or for that of another rank; NULL */
    double patience; /* seconds that ranks wait for each other in a step; 0: without bound */
    float *losses;   /* of an evaluation batch of one rank; NULL: it is alone */
    lm_feed *train_feed, *val_feed;
    /* On the host one micro-batch, filled before it runs.  On a device `sets` (two) times those of
     * a step: while it processes one set, the host draws the other and sends it on a separate
     * stream. */
    lm_batch *batch;
    int sets, set; /* set: of the next step */
    int64_t held;  /* the first window of the micro-batch that is on the host, or -1 */
    bool drawn;    /* the next set is filled and being sent */
    int64_t valid[2], ahead_valid[2][LM_MOST_AHEAD];
    double flops[2]; /* FLOPs of the step, with visible pairs of attention (lm_config_pair_flops) */
    lm_stream *copies;
    float *rows;     /* objective, on a device: the losses of a micro-batch, on the host */
    void *constants; /* of the update's graph, in memory of the backend */
    size_t constants_bytes;
    void *input;       /* on a device: the memory from which each micro-batch is read */
    lm_mirror numbers; /* step_numbers */
    lm_mirror routed;  /* sums of the program's `routed`; no bytes if there is nothing routed */
    double *shares;    /* of the experts of a layer, for its record */
    float *biases;     /* likewise, for an update */
    lm_marks *marks;   /* around the parts of an optimiser step */
    lm_rotary rope;
    lm_monitor *monitor;
    trainer_place place[TRAINER_PLACES];
    int places;
    bool writes; /* to them */
    lm_memory_plan plan;

    lm_trace *trace; /* of the traced step; NULL: none, or written */
    lm_out *trace_out;
    bool tracing;       /* active */
    bool traced;        /* the step is complete; the end of its checkpoint is missing */
    bool trace_writing; /* its checkpoint */
    bool trace_merged;  /* rank 0 has the events of all ranks */

    lm_train_result r;
    double started, last_save;
    struct {
        bool stop, enough; /* signals; the clock of a measurement */
        unsigned save;     /* a bit for each place: signals and the clock */
    } asked;
    /* the objective could not begin a round on a rank, on this one: the state is that of the last complete step */
    bool refused, refuses;
    double last_line;   /* time of the last progress line (lm_sink.beat) */
    step_info last;     /* of the last complete step */
    size_t free_before; /* bytes of the device before anything was allocated */
    /* in the run's own folder: step of the last checkpoint that was begun, and of the last whole one; -1: none */
    int64_t saved, whole;
    bool copying;               /* the blocks may still be read for the last checkpoint */
    double val_bytes_per_token; /* of the validation set; 0: unknown */
};

static inline bool trainer_has_one_batch(const lm_trainer *t)
{
    return t->b->host_memory || t->io.objective;
}

/* ---- trainer.c ---- */

/* The only place where signals and clocks affect a run; the rest depends only on `asked`, on which all ranks agree here. */
lm_code trainer_ask(lm_trainer *t, lm_err *e);

/* FLOPs of n tokens with so many visible pairs: beside frozen weights the share of the graph's. */
static inline double trainer_flops(const lm_trainer *t, double n, double pairs,
                                   const double near[LM_MOST_WINDOWS])
{
    const lm_config *c = t->io.config;
    return lm_config_pair_flops(c, n, pairs, near) * t->plan.flops_per_token /
           lm_config_train_flops(c, t->o.seq);
}

/* ---- trainer_step.c ---- */

lm_code trainer_marks(lm_trainer *t, lm_err *e); /* once: those of a step */
lm_code trainer_step(lm_trainer *t, step_info *i, lm_err *e);
/* Provide this rank's i-th micro-batch of the step to the graph. */
lm_code trainer_hand_over(lm_trainer *t, int64_t i, lm_err *e);

/* Run a section of the update, for step number `step`. */
lm_code trainer_update(lm_trainer *t, lm_section_id s, int64_t step, lm_err *e);
/* Exchange the parameters for the shown values, and back; does nothing if they are the same. */
lm_code trainer_show(lm_trainer *t, lm_err *e);
lm_code trainer_hide(lm_trainer *t, lm_err *e);

/* ---- trainer_save.c ---- */

/* Writers of checkpoints for all places. */
lm_code trainer_save_new(lm_trainer *t, lm_err *e);
void trainer_save_fini(lm_trainer *t);
/* The places, a bit for each, where a checkpoint of this step is due. */
unsigned trainer_save_due(const lm_trainer *t);
/* Begin a checkpoint of this step at these places. */
lm_code trainer_save(lm_trainer *t, unsigned places, lm_err *e);
/* Let work enqueued from here on change the blocks. */
lm_code trainer_save_copied(lm_trainer *t, lm_err *e);
/* Keep the best model so far: as a checkpoint of this step, to which `best` is linked, or, if the
 * run resumed at this step, as that checkpoint. */
lm_code trainer_save_best(lm_trainer *t, lm_err *e);
/* Write the record of the checkpoint that was being written, if it is complete. */
lm_code trainer_save_report(lm_trainer *t, lm_err *e);
/* Wait for it, and write its record; one that fails has none. */
lm_code trainer_save_end(lm_trainer *t, lm_err *e);
/* In trainer_ask, flags for each place: a checkpoint is asked for (`asked`: bits) or due by the clock of rank 0; this rank's part
 * of one is still being written; and what they are on all ranks. */
lm_code trainer_save_flags(lm_trainer *t, unsigned asked, double now, int32_t *flag, lm_err *e);
lm_code trainer_save_met(lm_trainer *t, const int32_t *flag, lm_err *e);
/* Once, before the first step: whether the state with which the run begins is a checkpoint of the same run, and which one
 * is the best. */
lm_code trainer_save_find(lm_trainer *t, lm_err *e);

/* ---- trainer_ranks.c: nothing to do for one rank with one leaf ---- */

/* Check the ranks and set this one's part of a step. */
lm_code trainer_ranks_set(lm_trainer *t, lm_err *e);
/* Wait for all ranks. */
lm_code trainer_ranks_meet(lm_trainer *t, lm_err *e);
/* Around work that rank 0 does alone, however long it takes, or of which each rank does a part, which took this one so many
 * seconds; the third waits for all ranks. */
void trainer_ranks_pause(lm_trainer *t);
void trainer_ranks_pause_all(lm_trainer *t, double seconds);
lm_code trainer_ranks_go_on(lm_trainer *t, lm_err *e);
/* A step took so long: a process that is missing for much longer has failed. */
void trainer_ranks_pace(lm_trainer *t, double seconds);
/* Make all ranks fail at once, before what this one has begun is finished. */
void trainer_ranks_abort(lm_trainer *t, const lm_err *why);
/* `load`, by rank 0, and what it loaded for all: weights, and of a resumed run states and numbers. */
lm_code trainer_ranks_load(lm_trainer *t, lm_code (*load)(lm_trainer *, lm_err *), lm_err *e);
/* What rank 0 found of the run, for all: whether it holds this step already, and its best checkpoint. */
lm_code trainer_ranks_kept(lm_trainer *t, lm_err *e);
/* Once, when the blocks are there: memory for sums. */
lm_code trainer_ranks_ready(lm_trainer *t, lm_err *e);
void trainer_ranks_fini(lm_trainer *t);
/* Free the groups alone: they are those of the world, which may end before the trainer. */
void trainer_ranks_leave(lm_trainer *t);
/* What ranks cannot share; of the options, `ranks` and the backend alone.  Fails: LM_EUSAGE. */
lm_code trainer_ranks_check(const lm_trainer *t, lm_err *e);
/* So far. */
rank_use trainer_ranks_used(const lm_trainer *t);
/* Micro-batch number i of this rank is done; with the last one the sums are those of all ranks. */
lm_code trainer_ranks_add(lm_trainer *t, int64_t i, const lm_step *step, lm_err *e);
/* Leaf number `leaf` of this rank is in the blocks; and the sums of its leaves become those of all ranks. */
lm_code trainer_ranks_leaf(lm_trainer *t, int64_t leaf, const lm_step *step, lm_err *e);
lm_code trainer_ranks_sum(lm_trainer *t, lm_err *e);
/* The sums of a leaf without micro-batches. */
lm_code trainer_ranks_clear(lm_trainer *t, lm_err *e);
/* Around work of which the ranks have parts that take as long as they take. */
void trainer_ranks_patient(lm_trainer *t, bool on);
/* *n = its sum over all ranks. */
lm_code trainer_ranks_total(lm_trainer *t, double *n, lm_err *e);
/* n[0..count-1] = their sums over the ranks that share the micro-batches. */
lm_code trainer_ranks_count(lm_trainer *t, double *n, size_t count, lm_err *e);
/* flag[i] = the largest of the ranks. */
lm_code trainer_ranks_agree(lm_trainer *t, int32_t *flag, size_t count, lm_err *e);
/* Add the losses of the ranks' batches to *sum, in the order of the ranks, row by row as one rank adds them.  rows: of this
 * rank's evaluation batch; NULL: it has none.  Nothing for one rank, whose evaluator has added its own. */
lm_code trainer_ranks_evaluated(lm_trainer *t, const float *rows, lm_eval_sum *sum, lm_err *e);

/* ---- trainer_pipe.c: ranks along pp; nothing for others ---- */

/* Once, when blocks and executors are there; and for the work between a step's batches and its update. */
lm_code trainer_pipe_new(lm_trainer *t, lm_err *e);
void trainer_pipe_fini(lm_trainer *t);
lm_code trainer_pipe_step(lm_trainer *t, lm_err *e);
/* The batch of the evaluator: *rows of losses, added to *sum, on the rank of the last stage; others keep NULL. */
lm_code trainer_pipe_evaluate(lm_trainer *t, lm_eval_sum *sum, const float **rows, lm_err *e);
/* Behind the last one: all ranks get the sum. */
lm_code trainer_pipe_evaluated(lm_trainer *t, lm_eval_sum *sum, lm_err *e);
/* Add what the stages gave so far, and how long they waited. */
void trainer_pipe_use(const lm_trainer *t, rank_use *sum);
/* The share of the last step's schedule in which ranks waited for each other.  NAN without stages. */
double trainer_pipe_bubble(const lm_trainer *t);
void trainer_pipe_patience(lm_trainer *t, double seconds);

/* ---- trainer_addends.c: nothing for models without gradients apart ---- */

/* Once, when blocks and executors are there; before the first micro-batch of a leaf, and behind its last one. */
lm_code trainer_addends_new(lm_trainer *t, lm_err *e);
void trainer_addends_fini(lm_trainer *t);
void trainer_addends_clear(lm_trainer *t);
lm_code trainer_addends_join(lm_trainer *t, lm_err *e);

/* ---- trainer_share.c ---- */

/* The ranks along dp share the update (lm_trainer_opts.zero). */
bool trainer_shares(const lm_trainer *t);
/* The sums of elements [from, end) of the gradients: of ranks that share them each on the rank whose it is, and what is not
 * this rank's may lose its memory. */
lm_code trainer_share_take(lm_trainer *t, int64_t from, int64_t end, lm_err *e);
/* Those of all of them, unless they are there. */
lm_code trainer_share_reduce(lm_trainer *t, lm_err *e);
/* If ranks share: samples, of which each rank has some, on all; */
lm_code trainer_share_samples(lm_trainer *t, float *sample, lm_err *e);
/* and parameters, which have new values on the ranks whose they are, on all.  Nothing otherwise. */
lm_code trainer_share_gather(lm_trainer *t, lm_err *e);

/* ---- trainer_ahead.c ---- */

/* Once, when the blocks are there. */
lm_code trainer_ahead_new(lm_trainer *t, lm_err *e);
void trainer_ahead_fini(lm_trainer *t);
/* Run this rank's i-th micro-batch of a step; of the last one gradients are added up as they are completed, if they can be. */
lm_code trainer_ahead_run(lm_trainer *t, lm_section_id s, int64_t i, const lm_step *step,
                          lm_err *e);
/* The gradients of one of this rank's stages are complete, except those that another stage adds to. */
void trainer_ahead_stage(lm_trainer *t, int stage);
/* All are; *done: they are added up. */
lm_code trainer_ahead_end(lm_trainer *t, bool *done, lm_err *e);
/* After a failure: others may wait for sums to which this rank will not add. */
void trainer_ahead_drop(lm_trainer *t, const lm_err *why);
/* Seconds of these sums for which nothing waited, so far. */
double trainer_ahead_hidden(const lm_trainer *t);

/* ---- trainer_objective.c ---- */

/* Once: memory for the rows of a micro-batch, and the objective's own preparation. */
lm_code trainer_objective_ready(lm_trainer *t, lm_err *e);
void trainer_objective_fini(lm_trainer *t);
/* Forward and backward of all micro-batches of the step; *i receives its loss, tokens and FLOPs. */
lm_code trainer_objective_step(lm_trainer *t, step_info *i, lm_err *e);
/* *loss of the validation data; *any: it has some. */
lm_code trainer_objective_validate(lm_trainer *t, double *loss, bool *any, lm_err *e);
/* Keep what the objective needs for the next steps in t->s. */
lm_code trainer_objective_save(lm_trainer *t, lm_err *e);
/* Add the objective's fields to a record. */
void trainer_objective_report(lm_trainer *t, bool val);
/* lm_objective.followed; NULL: there is none. */
const char *trainer_followed(const lm_trainer *t, double *value);

/* ---- trainer_experts.c: nothing for models without experts ---- */

lm_code trainer_experts_new(lm_trainer *t, lm_err *e); /* once, when the program is ready */
void trainer_experts_fini(lm_trainer *t);
/* Copy what the routers did in this step to the host, on the main stream; the others read it there. */
lm_code trainer_experts_pull(lm_trainer *t, lm_err *e);
/* Of the fullest expert, for the line of a step; "": there are no experts. */
const char *trainer_experts_note(const lm_trainer *t, const step_info *i, char out[80]);
/* A record of each layer.  meet: ranks along pp take part, and it has the biases of all stages; otherwise others may have
 * ended, and along pp it has no biases. */
lm_code trainer_experts_report(lm_trainer *t, const step_info *i, bool meet, lm_err *e);
/* After a step that changed parameters: biases of routers follow the loads of the step, b_e += rate sign(mean load - load_e)
 * (arXiv:2408.15664). */
lm_code trainer_experts_balance(lm_trainer *t, lm_err *e);
/* The first layer whose router has logits that are not finite, -1: none, and the first expert of these, -1: all are. */
int64_t trainer_experts_bad(const lm_trainer *t, int64_t *expert);

/* ---- trainer_numeric.c ---- */

/* LM_ENUMERIC: the `what` of step `step` is `value`; names the tensor of the weights that is not finite, if
 * one is, and the last checkpoint whose weights and states all are.  Overwrites the blocks: the run is over. */
lm_code trainer_numeric_stop(lm_trainer *t, int64_t step, const char *what, double value,
                             lm_err *e);
/* Complete the failure of lm_ckpt_load: for states that are not finite, which checkpoint to resume from. */
lm_code trainer_numeric_loaded(lm_trainer *t, lm_err *e);

/* ---- trainer_report.c ---- */

lm_code trainer_report_step(lm_trainer *t, step_info *i, lm_err *e);
/* Write the record of the last step, if it has none yet. */
lm_code trainer_report_last(lm_trainer *t, lm_err *e);
lm_code trainer_report_eval(lm_trainer *t, double loss, lm_err *e);
/* ---- trainer_trace.c ---- */

/* Once: of a run that is traced, on each rank; the file on rank 0. */
lm_code trainer_trace_open(lm_trainer *t, lm_err *e);
/* Before and behind the parts of a step; the third of the run is traced, or the last one of a shorter run. */
lm_code trainer_trace_begin(lm_trainer *t, lm_err *e);
lm_code trainer_trace_end(lm_trainer *t, lm_err *e);
/* Of the step that is traced: an exchange for which the rank has waited since `waiting`, in row `hidden` up to then. */
void trainer_trace_exchange(lm_trainer *t, int hidden, const char *what, double began, double ended,
                            double waiting);
/* After each step: that of all ranks becomes one on rank 0. */
lm_code trainer_trace_merge(lm_trainer *t, lm_err *e);
/* Called when the newest checkpoint is complete: adds its writing to the trace if its beginning is
 * in it. */
void trainer_trace_saved(lm_trainer *t);
/* Write the trace when it is complete; `end`: also if parts are missing. */
lm_code trainer_write_trace(lm_trainer *t, bool end, lm_err *e);
/* FLOP/s as a fraction of the peak; NAN if the peak is unknown. */
double trainer_share(const lm_trainer *t, double flops_per_second);

/* ---- trainer_fit.c ---- */

/* The memory of the rank of o->mesh alone, of which p is the program. */
void trainer_plan_rank(const lm_trainer_opts *o, const lm_program *p, bool lmz,
                       lm_memory_plan *out);

/* Check that the plan fits the free memory.  Fails: LM_ELIMIT with both numbers, and the first
 * change of options that would fit. */
lm_code trainer_fit(const lm_trainer *t, lm_err *e);

#endif
