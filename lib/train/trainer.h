/* SPDX-License-Identifier: Apache-2.0 */
/* trainer.h -- the training loop: batches -> forward and backward -> gradient norm, clipping ->
 * optimiser, with validation, metrics and checkpoints around it.
 *
 * One optimiser step takes `accumulate` micro-batches.  The loss is the sum over all valid targets
 * of the step divided by their number, whatever micro-batch they fell into, so accumulation changes
 * nothing but memory.  Step order: forward + backward per micro-batch; norm; clip; update
 * (arXiv:1711.05101); BF16 copy refreshed by the same pass.  A non-finite loss or norm stops the
 * run (LM_ENUMERIC): the update itself refuses to change the weights then.  On a device the parts of
 * a step are recorded and replayed, bit for bit what they were; the host draws the next step's
 * batches while this one runs, and waits once a step. */
#ifndef LM_TRAIN_TRAINER_H
#define LM_TRAIN_TRAINER_H

#include "base/progress.h"
#include "format/metrics.h"
#include "format/tensorboard.h"
#include "train/evaluate.h"
#include "train/memory.h"
#include "train/schedule.h"
#include "train/state.h"

typedef struct {
    int64_t batch, seq, accumulate, steps;
    lm_precision precision;
    bool documents, dropout;
    uint64_t seed;
    lm_groups groups; /* optimisers */
    lm_schedule schedule;
    double clip_norm, clip_value;     /* 0: none */
    int64_t eval_every, eval_batches; /* 0: never; eval_batches 0: the whole validation set */
    int64_t save_every;               /* steps; 0: at the end only */
    double save_seconds;              /* or so often; 0: not by time */
    int64_t log_every;
    int64_t patience; /* evaluations without improvement before stopping; 0: off */
    double min_delta;
    double peak_flops;   /* for MFU; 0: unknown */
    double most_seconds; /* end after some steps when so much time has passed (measure.h); 0: no */
    bool timed;          /* take the times of operators where that slows the steps down, too */
} lm_trainer_opts;

/* Where it comes from and goes to.  All borrowed; NULL where absent. */
typedef struct {
    const lm_config *config;
    lm_program *
        program; /* of the same options, config and backend, which no other trainer uses now; NULL: made */
    lm_model_source *weights; /* the start: a model, or a checkpoint's; NULL: fresh ones */
    lm_par *par; /* threads of the host that load; NULL: the backend's, which a device has not */
    const char *resume;      /* checkpoint folder with optimiser and numbers; NULL: a fresh start */
    lm_tokens *train, *val;  /* checked and indexed by the caller; val may be NULL; train NULL:
                                random ids */
    lm_ckpt_opts checkpoint; /* run_dir NULL: no checkpoints */
    lm_metrics *metrics;
    lm_tb *tensorboard;
    double (*wall_clock)(void); /* seconds since 1970, for TensorBoard */
    /* Bytes of text that each token id stands for [vocab], for bits per byte of validation; NULL:
     * not reported. */
    const uint16_t *id_bytes;
    const char *trace; /* file for the time line of one step, the third (trace.h); NULL: none */
    bool force;        /* it may replace what is there */
    lm_sink *sink;
} lm_trainer_io;

typedef enum {
    LM_TRAIN_DONE,
    LM_TRAIN_STOPPED,   /* a signal; a checkpoint was written */
    LM_TRAIN_CONVERGED, /* early stopping */
} lm_train_end;

/* Steps until kernels are loaded, memory is touched and a device replays its recordings. */
enum { LM_TRAIN_WARM = 3 };

typedef struct {
    lm_train_end end;
    int64_t step, tokens, steps_run;
    double loss, val_loss;             /* last; NAN if never */
    double best_val_loss;              /* of the checkpoint that the run's `best` names */
    int64_t best_step;                 /* its step; -1: none */
    double seconds, tokens_per_second; /* the latter: of the time that steps took */
    double mfu;           /* share of the peak by 6 N + 12 L H D T FLOPs a token; NAN: unknown */
    double mfu_attended;  /* the same, of attention only what it looks at */
    double flops;         /* of all steps, by the latter */
    double seconds_begin; /* of the first steps, LM_TRAIN_WARM at most, which are slower */
    double seconds_steps, seconds_data, seconds_eval, seconds_checkpoint;
    bool timed; /* the next three are known */
    double seconds_forward, seconds_backward, seconds_optimizer;
    double device_planned, device_used; /* bytes of a device's memory; 0: none */
} lm_train_result;

typedef struct lm_trainer lm_trainer;

/* Whether a plan fits into the memory that is free here: of the host, as far as its control group may take
 * more, and of the device. */
typedef struct {
    bool fits;
    double host_free, device_free; /* bytes; 0: unknown, and no device */
    bool device;                   /* what it does not fit into is the device's memory */
    char cure[200];                /* the first change of options that would fit; "" when it fits */
} lm_train_verdict;

/* The graphs of such a training, built once for all that follows. */
lm_code lm_trainer_program(const lm_trainer_opts *o, const lm_config *c, bool validation,
                           lm_backend *b, lm_program **out, lm_err *e);
/* What memory it needs.  lmz: checkpoints are. */
void lm_trainer_plan(const lm_trainer_opts *o, const lm_program *p, bool lmz, lm_memory_plan *out);
/* plan: what lm_trainer_plan gave for the same. */
lm_code lm_trainer_verdict(const lm_trainer_opts *o, const lm_program *p, bool lmz,
                           const lm_memory_plan *plan, lm_train_verdict *out, lm_err *e);

/* Allocate, load weights, and on resume the state.  Fails: LM_ELIMIT before anything is allocated
 * when the plan does not fit into the memory that is free, of the host or the device (both numbers,
 * and the first change of options that would fit). */
lm_code lm_trainer_new(const lm_trainer_opts *o, const lm_trainer_io *io, lm_backend *b,
                       lm_trainer **out, lm_err *e);
void lm_trainer_free(lm_trainer *t);

/* Train until `steps`, a signal (lm_stopping) or early stopping; writes a checkpoint at the end of
 * each, and after each evaluation with the lowest loss so far, which the run's `best` then names.  Fails: LM_ENUMERIC on a non-finite loss or gradient (names step and kind; the last
 * checkpoint stays), what I/O says. */
lm_code lm_trainer_run(lm_trainer *t, lm_train_result *r, lm_err *e);

const lm_train_state *lm_trainer_state(const lm_trainer *t);
/* Where the time of the training graph went; as lm_exec_times. */
size_t lm_trainer_times(lm_trainer *t, const lm_exec_time **out);

#endif
