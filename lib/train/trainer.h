/* SPDX-License-Identifier: Apache-2.0 */
/* trainer.h -- the training loop: batches -> forward and backward -> gradient norm, clipping ->
 * optimiser, with validation, metrics and checkpoints around it.
 *
 * One optimiser step takes `accumulate` micro-batches.  The loss is the sum over all valid targets
 * of the step divided by their number, in any micro-batch, so accumulation changes only memory.
 * Step order: forward + backward per micro-batch; norm; clip; update (arXiv:1711.05101); BF16 copy
 * updated in the same pass.  A non-finite loss or norm stops the run (LM_ENUMERIC): the update then
 * does not change the weights.  On a device the parts of a step are recorded and replayed, with the
 * same bits; the host draws the next step's batches while this one runs, and waits once per
 * step.
 *
 * Ranks along the axis dp of a mesh share the micro-batches of a step, each a contiguous part of them, and add up their sums
 * (leaves.h): losses, weights and states have the same bits for any number of ranks that fits (lm_ranks_fit).  Ranks along pp
 * share the layers, by a schedule (pipe.h), with the same bits again, and those along tp share the weights of each layer and
 * their states (parallel/layouts.h): sums over the parts of a row are in another order than those of one rank, and differ from
 * them by rounding.  Rank 0 reads the inputs and writes the outputs, but of checkpoints each rank writes its part (state.h). */
#ifndef LM_TRAIN_TRAINER_H
#define LM_TRAIN_TRAINER_H

#include "base/progress.h"
#include "comm/comm.h"
#include "format/metrics.h"
#include "format/tensorboard.h"
#include "train/evaluate.h"
#include "train/memory.h"
#include "train/objective.h"
#include "train/pipe.h"
#include "train/run_tiers.h"
#include "train/schedule.h"
#include "train/state.h"

typedef struct {
    int64_t batch, seq, accumulate, steps; /* accumulate: micro-batches of a step, of all ranks */
    /* The ranks: those along dp share the micro-batches, those along tp the weights of each layer.  Of a process that is one of
     * several with its coordinates. */
    lm_mesh mesh;
    const lm_train_pipe
        *pipe; /* with several ranks along pp: their stages and schedule; borrowed */
    const char *pipe_schedule,
        *pipe_stages; /* of lm_train_pipe_ask, from which a session makes it */
    bool rows;        /* along tp each rank also has a part of the rows between the layers */
    int ranks_here;   /* of all, whose memory is that of this machine; 0: all */
    int64_t leaves;   /* of the sums of a step (lm_ranks_fit); 0: as many as ranks along dp */
    /* What the ranks along dp share of what each would have (ZeRO, arXiv:1910.02054): 0: nothing; 1: the states of the
     * optimiser, and of weights that are computed with in BF16 the master copies in F32; 2: gradients, too, which each rank
     * has whole while micro-batches are added up, but not of the last one: a range of them is added up when it is complete.
     * With more leaves than ranks they are whole, and in stages until the last backward of the stage in a step; 3: weights,
     * too, which are gathered for the layers that read them (graph/gather.h). */
    int zero;
    int64_t
        gather_ahead; /* with level 3: layers before the one that reads them; 0: when it is reached */
    /* with an encoder: rows of sources; seq is the length of targets, which are spans, or those of pairs; 0: no encoder */
    int64_t source;
    const lm_span *span; /* of windows of a text; borrowed; NULL: other targets */
    lm_precision precision;
    bool documents, dropout;
    lm_mlm mlm;     /* share > 0: masked language modelling, of windows of a dataset */
    lm_nsp_ids nsp; /* on: of windows of pairs of texts, whose head trains too (lm_build.pairs) */
    bool objective; /* lm_trainer_io.objective is there */
    lm_entropy entropy; /* and gets lm_row_results.entropy, of this kind */
    bool value;         /* and .value, of a value head that trains with the model */
    uint64_t seed;
    lm_groups groups; /* optimisers */
    lm_schedule schedule;
    double clip_norm, clip_value;     /* 0: none */
    int64_t eval_every, eval_batches; /* 0: never; eval_batches 0: the whole validation set */
    int64_t save_every;               /* in steps; 0: only at the end */
    double save_seconds;              /* or in seconds; 0: not by time */
    int64_t places,
        in_memory; /* besides the run's folder, and checkpoints in memory at once (run_tiers.h) */
    int64_t log_every;
    int64_t patience; /* evaluations without improvement before stopping; 0: off */
    double min_delta;
    double peak_flops; /* for MFU; 0: unknown */
    /* end after this time, but not before some steps (measure.h); 0: no limit */
    double most_seconds;
    bool timed; /* time operators even if that slows the steps down */
    /* of the biases of routers that follow loads (lm_moe.score_bias); 0: they stay */
    double bias_rate;
    /* lambda, of the mean loss of modules that predict tokens further on (LM_AHEAD_RUNS); of a session 0: they are kept as
     * they are; negative: 0.1 if the model has them */
    double ahead_weight;
    lm_build build;         /* what trains, and how the rest is kept (lm_program_opts) */
    lm_states_in states_in; /* of the optimiser: likewise */
    const char *states_dir;
    const lm_update_beside *beside; /* of an adapter; borrowed; NULL: none */
    /* Bytes that lm_trainer_io.adapt takes for a short time, and those that it leaves taken. */
    double adapt_room, adapt_keeps;
} lm_trainer_opts;

/* Its inputs and outputs.  All borrowed; NULL if absent. */
typedef struct {
    const lm_config *config;
    lm_comm *comm; /* this rank among those of lm_trainer_opts.mesh; NULL: the only one */
    /* for the same options, config and backend, not used by another trainer; NULL: built here */
    lm_program *program;
    lm_model_source *weights; /* weights of a model or a checkpoint; NULL: fresh ones */
    /* Sets the adapter's tensors of a store that holds the base, before those of `resume` are loaded; NULL: they are
     * drawn. */
    lm_code (*adapt)(void *ctx, lm_store *s, lm_err *e);
    void *adapt_ctx;
    /* After a step that changed parameters, the number `updates` of these, from 1: may change them in the store; what the
     * penalties of lm_trainer_opts.beside were is added to *loss.  ctx: adapt_ctx.  NULL: nothing. */
    lm_code (*after)(void *ctx, lm_store *s, int64_t updates, double *loss, lm_err *e);
    /* threads of the host that load; NULL: the backend's, which a device does not have */
    lm_par *par;
    const char *resume; /* checkpoint folder with optimiser and numbers; NULL: a fresh start */
    /* the loss, and the data of it, in place of those below; NULL: -log p of the targets */
    const lm_objective *objective;
    lm_tokens *train, *val; /* checked and indexed by the caller; val may be NULL; train NULL:
                                random ids */
    /* Examples in windows, in place of `train` and `val`; NULL: none.  Their ids are below `ids` (0: the vocabulary's
     * size), which counts virtual tokens. */
    const lm_packed *packed, *val_packed;
    int64_t ids;
    lm_ckpt_opts checkpoint;   /* run_dir NULL: no checkpoints */
    const lm_run_tiers *tiers; /* places besides that folder; NULL: none */
    lm_metrics *metrics;
    lm_tb *tensorboard;
    double (*wall_clock)(void); /* seconds since 1970, for TensorBoard */
    /* Bytes of text that each token id stands for [vocab], for bits per byte of validation; NULL:
     * not reported. */
    const uint16_t *id_bytes;
    const char *trace; /* file for the time line of one step, the third (trace.h); NULL: none */
    bool force;        /* the file may be replaced */
    lm_sink *sink;
} lm_trainer_io;

typedef enum {
    LM_TRAIN_DONE,
    LM_TRAIN_STOPPED,   /* a signal; a checkpoint was written */
    LM_TRAIN_CONVERGED, /* early stopping */
} lm_train_end;

/* Steps until kernels are loaded, memory is mapped and a device replays its recordings. */
enum { LM_TRAIN_WARM = 3 };

typedef struct {
    lm_train_end end;
    int64_t step, tokens, steps_run;
    double loss, val_loss;             /* of the last step; NAN if none */
    const char *followed;              /* lm_objective.followed: "reward"; NULL: the loss */
    double follow;                     /* its value */
    double best_val_loss;              /* of the checkpoint that the run's `best` names */
    int64_t best_step;                 /* its step; -1: none */
    double seconds, tokens_per_second; /* the latter: seconds of steps only */
    /* fraction of the peak by 6 N + 12 L H D T FLOPs per token; NAN: unknown */
    double mfu;
    double mfu_attended;  /* the same, with the visible pairs of attention only */
    double flops;         /* of all steps, by the latter */
    double seconds_begin; /* of the first steps, LM_TRAIN_WARM at most, which are slower */
    double seconds_steps, seconds_data, seconds_eval, seconds_checkpoint;
    bool timed; /* the next three are set */
    double seconds_forward, seconds_backward, seconds_optimizer;
    double device_planned, device_used; /* bytes of a device's memory; 0: none */
} lm_train_result;

typedef struct lm_trainer lm_trainer;

/* Whether a plan fits the free memory: of the host, within the limit of its control group, and of
 * the device. */
typedef struct {
    bool fits;
    double host_free, device_free; /* bytes; 0: unknown, and no device */
    bool device;                   /* the memory that is too small is the device's */
    char cure
        [200]; /* the first change of ranks, batch, type or length that would fit; "" when it fits */
} lm_train_verdict;

/* Set the coordinates of rank `rank` of a mesh, and check that the model can be split along its axes.  Fails: LM_EUSAGE naming
 * the axis, with the nearest size that it can have. */
lm_code lm_trainer_place(lm_trainer_opts *o, const lm_config *c, int rank, lm_err *e);

/* True if `ranks` can share steps of `accumulate` micro-batches whose sums have `leaves` leaves: leaves divides the
 * micro-batches, ranks divides the leaves, and each of several ranks has a power of two of them, so that its own tree is a
 * part of the whole one. */
bool lm_ranks_fit(int64_t ranks, int64_t accumulate, int64_t leaves);

/* What the ranks of the mesh do that devices do not: the name of an axis, or of a way to share positions; NULL: each rank may have
 * a device. */
const char *lm_trainer_host_axis(const lm_mesh *mesh);
/* The same for a training, whose steps may have another number of micro-batches each where an objective makes them. */
bool lm_trainer_ranks_fit(const lm_trainer_opts *o, int64_t ranks, int64_t leaves);

/* The graphs of such a training, built once. */
lm_code lm_trainer_program(const lm_trainer_opts *o, const lm_config *c, bool validation,
                           lm_backend *b, lm_program **out, lm_err *e);
/* Its memory.  lmz: checkpoints are .lmz files. */
void lm_trainer_plan(const lm_trainer_opts *o, const lm_program *p, bool lmz, lm_memory_plan *out);
/* plan: the result of lm_trainer_plan for the same options. */
lm_code lm_trainer_verdict(const lm_trainer_opts *o, const lm_program *p, bool lmz,
                           const lm_memory_plan *plan, lm_train_verdict *out, lm_err *e);

/* Allocate, load weights, and on resume the state.  Fails: LM_ELIMIT before anything is allocated
 * when the plan does not fit the free memory of the host or the device (both numbers, and the
 * change of lm_train_verdict.cure). */
lm_code lm_trainer_new(const lm_trainer_opts *o, const lm_trainer_io *io, lm_backend *b,
                       lm_trainer **out, lm_err *e);
void lm_trainer_free(lm_trainer *t);

/* Train until `steps`, a signal (lm_stopping) or early stopping; writes a checkpoint at the end of
 * each, and after each evaluation with the lowest loss so far, which the run's `best` then names.
 * Fails: LM_ENUMERIC on a non-finite loss or gradient (names step and kind; the last checkpoint is
 * kept), errors of I/O, and what an objective fails with: if a round could not begin, the steps before it
 * are kept in a checkpoint. */
lm_code lm_trainer_run(lm_trainer *t, lm_train_result *r, lm_err *e);
/* lm_trainer_new and lm_trainer_run: with io->comm as the rank that this process is; otherwise on a thread for each rank, each
 * with a host backend of its own that has as many threads as `b`, which is rank 0's; with one rank on the caller's.  `ready`
 * (may be NULL) is called in between, on rank 0.  *out: the trainer of this process, of threads that of rank 0, which the
 * caller frees, also after a failure, while io->comm is there.
 * Fails: as these and `ready`, with several ranks the error of the first that failed, prefixed with "rank r of n";
 * LM_EUSAGE for ranks that do not fit, or with a device, and threads with an objective of one rank alone. */
lm_code lm_trainer_train(const lm_trainer_opts *o, const lm_trainer_io *io, lm_backend *b,
                         lm_code (*ready)(void *ctx, lm_err *e), void *ctx, lm_trainer **out,
                         lm_train_result *r, lm_err *e);
/* Step of the last whole checkpoint of the run folder, resumed or written; -1: none. */
int64_t lm_trainer_saved(const lm_trainer *t);

/* The time of the training graph by operator; as lm_exec_times. */
size_t lm_trainer_times(lm_trainer *t, const lm_exec_time **out);

#endif
