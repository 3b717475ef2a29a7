/* SPDX-License-Identifier: Apache-2.0 */
/* trainer_impl.h -- what the trainer's files share: trainer.c makes and drives it, trainer_step.c takes a step,
 * trainer_numeric.c ends a run whose numbers are not finite, trainer_report.c tells of it, trainer_fit.c knows what fits
 * into memory.  Private to lib/train. */
#ifndef LM_TRAIN_TRAINER_IMPL_H
#define LM_TRAIN_TRAINER_IMPL_H

#include "graph/trace.h"
#include "train/monitor.h"
#include "train/trainer.h"

/* Numbers that a step leaves where it runs. */
typedef struct {
    double loss;    /* sum over the rows of all micro-batches */
    double sumsq;   /* of the gradients */
    double weights; /* sum of squares of the weights, for checkpoints */
} step_numbers;

/* Rows of a trace; those of the graph's phases come first. */
enum {
    TRACE_OPTIMIZER = LM_PHASE_UPDATE,
    TRACE_DATA,
    TRACE_CHECKPOINT,
    TRACE_WRITER,
};

/* What one step found out. */
typedef struct {
    double loss, norm, lr, seconds, flops;
    int64_t tokens;
    bool logged;
    lm_monitor_reading reading;
} step_info;

struct lm_trainer {
    lm_trainer_opts o;
    lm_trainer_io io;
    lm_backend *b;
    lm_program *program;
    bool own_program; /* made here */
    lm_train_state s;
    lm_evaluator eval;
    lm_feed *train_feed, *val_feed;
    /* On the host one micro-batch, which is filled when its turn comes.  On a device `sets` times those of a step, two:
     * while it works on one set, the host draws the other and sends it on a stream of its own. */
    lm_batch *batch;
    int sets, set; /* set: of the next step */
    bool drawn;    /* that one is filled and on its way */
    int64_t valid[2];
    double flops[2]; /* of the step, with attention as far as it looks (lm_config_pair_flops) */
    lm_stream *copies;
    void *input;       /* on a device: the micro-batch under way, where every one of them is read */
    lm_mirror numbers; /* step_numbers */
    lm_marks *marks;   /* around the parts of an optimiser step */
    lm_rotary rope;
    lm_monitor *monitor;
    lm_ckpt *ckpt;
    lm_memory_plan plan;

    lm_trace *trace; /* of the one step; NULL: none, or written */
    lm_out *trace_out;
    bool tracing;       /* now */
    bool traced;        /* the step is over: what is missing is the end of its checkpoint */
    bool trace_writing; /* which belongs to it */

    lm_train_result r;
    double started, last_save;
    struct {
        bool stop, save, enough; /* signals; signals and the clock; the clock of a measurement */
    } asked;
    double last_line;      /* when the run last said how far it is (lm_sink.beat) */
    step_info last;        /* of the last step that was done */
    size_t free_before;    /* bytes of the device before anything was allocated */
    int64_t saved, saving; /* step of the last checkpoint, of the one without a record; -1: none */
    double val_bytes_per_token; /* of the validation set; 0: unknown */
};

static inline bool trainer_has_one_batch(const lm_trainer *t)
{
    return t->b->host_memory;
}

/* ---- trainer_step.c ---- */

lm_code trainer_marks(lm_trainer *t, lm_err *e); /* once: those of a step */
lm_code trainer_step(lm_trainer *t, step_info *i, lm_err *e);

/* Run a section of the update, for step number `step`. */
lm_code trainer_update(lm_trainer *t, lm_section_id s, int64_t step, lm_err *e);
/* What is evaluated and saved takes the parameters' place, and back; nothing where it is them. */
lm_code trainer_show(lm_trainer *t, lm_err *e);
lm_code trainer_hide(lm_trainer *t, lm_err *e);

/* ---- trainer_numeric.c ---- */

/* LM_ENUMERIC: the `what` of step `step` is `value`; names the tensor of the weights that is not finite, if
 * one is, and the last checkpoint whose weights and states all are.  Overwrites the blocks: the run is over. */
lm_code trainer_numeric_stop(lm_trainer *t, int64_t step, const char *what, double value,
                             lm_err *e);

/* ---- trainer_report.c ---- */

lm_code trainer_report_step(lm_trainer *t, const step_info *i, lm_err *e);
/* The record of the last step, when the run ended at one that has none yet. */
lm_code trainer_report_last(lm_trainer *t, lm_err *e);
lm_code trainer_report_eval(lm_trainer *t, double loss, lm_err *e);
/* The newest checkpoint is whole: its writing is part of the trace if its beginning was. */
void trainer_trace_saved(lm_trainer *t);
/* Write the trace when all that belongs to it is known; `end`: whatever is missing. */
lm_code trainer_write_trace(lm_trainer *t, bool end, lm_err *e);
/* The share of the peak that so many FLOP/s are; NAN where the peak is unknown. */
double trainer_share(const lm_trainer *t, double flops_per_second);

/* ---- trainer_fit.c ---- */

/* Does the plan fit into the memory that is free?  Fails: LM_ELIMIT with both numbers, and the
 * first change of options that would fit. */
lm_code trainer_fit(const lm_trainer *t, lm_err *e);

#endif
