/* SPDX-License-Identifier: Apache-2.0 */
/* state.h -- the state of a training run that outlives the process, the store and a few numbers;
 * and its checkpoints.
 *
 * A checkpoint is a folder run/step-NNNNNN (folder_run.h): the model in F32 (the master weights), or the adapter in a
 * folder as PEFT's, the optimiser's states by tensor name in optimizer.safetensors, and state.json.  A thread writes
 * it.  In the host's memory it writes directly from the live blocks, without a copy: forward and
 * backward only read them, and the next optimiser step waits until the bytes are written.  On a
 * device the blocks are first copied to pinned memory of the host, on a separate stream; the next
 * optimiser step waits on the device until the copy is done, and the host does not wait.  fsync,
 * rename and pruning follow in the background.  With `lmz` the same files go to one
 * run/step-NNNNNN.lmz (lmz.h), coded on a small pool of the writer's own.
 *
 * Several ranks write one folder together, the same files: each its part of the bytes, on a thread of its own (an .lmz is
 * written by rank 0 alone).  Rank 0 begins a checkpoint, the others join it; when the parts of all are done, rank 0
 * publishes it. */
#ifndef LM_TRAIN_STATE_H
#define LM_TRAIN_STATE_H

#include "base/json.h"
#include "model/store.h"
#include "train/program.h"

typedef struct {
    const lm_model *model; /* borrowed */
    const char *optimizer; /* its groups as text (groups.h); borrowed */
    lm_backend *backend;
    lm_store *store; /* master copy, gradients, states of the optimiser */

    int64_t step, tokens; /* optimiser steps done, targets trained on */
    int64_t updates;      /* steps that had targets: those without one change nothing */
    int64_t sample;       /* windows used so far */
    double seconds;       /* seconds of training, over all resumes */
    double best_loss;     /* of validation, by more than the delta of early stopping */
    int64_t bad_evals;    /* evaluations since then */
    double best_val;   /* the lowest of validation whose checkpoint is in the run; INFINITY: none */
    int64_t best_step; /* its step, which the run's `best` names; -1: none */
    int64_t evaluated; /* step of the last complete evaluation; -1: none */
    lm_buf objective; /* JSON text of an objective (objective.h), for objective.json; empty: none */
    json_t *resumed;  /* the same of the checkpoint that was loaded; NULL: it has none */
} lm_train_state;

/* par: threads of the host that load and draw; NULL: the backend's. */
lm_code lm_train_state_new(const lm_program *p, lm_par *par, lm_train_state *s, lm_err *e);
void lm_train_state_fini(lm_train_state *s);

/* An adapter whose file depends on the states: its configuration, the plan of its tensors, and their numbers, of the store
 * as it is written.  The parameters are then among the states, too (lm_store_opts.twice), and are resumed from there. */
typedef struct {
    void *ctx;
    lm_code (*config)(void *ctx, const lm_store *s, lm_buf *out, lm_err *e);
    lm_code (*plan)(void *ctx, const lm_store *s, lm_st_plan *plan, lm_err *e);
    lm_code (*write)(void *ctx, const lm_store *s, lm_folder *f, lm_err *e);
} lm_ckpt_form;

/* The parts that are the same in all checkpoints.  All borrowed. */
typedef struct {
    const char *run_dir;
    const json_t *config; /* config.json as read */
    /* Text of adapter_config.json: a checkpoint is the folder of the adapter (LM_TENSORS_ADAPTER), without config.json,
     * instead of the whole model; NULL: it is not */
    const char *adapter_config;
    /* Computes tensors of the store that follow from others, before it is written, in the writer's thread; where ranks share the
     * others (lm_store.owners), all call it before they begin.  NULL: no tensor does */
    lm_code (*fold)(void *ctx, lm_store *s, lm_err *e);
    void *fold_ctx;
    const lm_ckpt_form *form; /* with adapter_config; NULL: the file has the tensors as they are */
    const json_t *generation_config; /* generation_config.json; NULL: none */
    const lm_folder_files *files;    /* the tokenizer's; NULL: none */
    const char *options; /* JSON text of the tool's options, kept in state.json for --resume */
    const char *history; /* provenance chain, JSON text */
    int64_t seq;         /* tokens in a window, noted beside the weights (window.h); 0: not */
    int keep;            /* newest checkpoints to keep; 0: all */
    bool lmz;            /* write .lmz files instead of folders */
    bool replace;        /* the first one replaces an older run in run_dir */
    bool aside;          /* run_dir is a place besides the run's own folder: it has no `best` */
    int rank, ranks;     /* this writer among those of several ranks; ranks 0: alone */
} lm_ckpt_opts;

/* Memory of the host that coding checkpoints as .lmz takes on this machine; 0 for folders. */
double lm_ckpt_coder_bytes(bool lmz);
/* Memory of the host for the copy of a store of these bytes (lm_store_opts.shown) that lies on a
 * device; 0: no copy. */
size_t lm_ckpt_snapshot_bytes(const lm_backend *b, const size_t kept[LM_KEPT_ROLES], bool shown);

typedef struct lm_ckpt lm_ckpt;
/* A writer for states with the layout and the backend of `s`.  Fails: LM_EUSAGE for an .lmz of tensors that are cut. */
lm_code lm_ckpt_new(const lm_ckpt_opts *o, const lm_train_state *s, lm_ckpt **out, lm_err *e);
/* Begin writing the state after all work on the main stream, as run/step-NNNNNN in the background
 * (waits for an earlier one first).  The waits report a failure, such as an existing file of that
 * name. */
lm_code lm_ckpt_begin(lm_ckpt *c, const lm_train_state *s, lm_err *e);
/* Of several ranks: whether this writer writes a part; rank 0: the folder that the others join (an absolute path), and of the
 * others lm_ckpt_begin there. */
bool lm_ckpt_shared(const lm_ckpt *c);
const char *lm_ckpt_made(const lm_ckpt *c);
lm_code lm_ckpt_join(lm_ckpt *c, const lm_train_state *s, const char *folder, lm_err *e);
/* Wait until this rank's part is on disk; or find out whether it is.  Both return its failure. */
lm_code lm_ckpt_wait_part(lm_ckpt *c, lm_err *e);
lm_code lm_ckpt_part(lm_ckpt *c, bool *done, lm_err *e);
/* Then: bytes of tensors in it. */
uint64_t lm_ckpt_wrote(const lm_ckpt *c);
/* On rank 0: the parts of all ranks are done, which are so many bytes together: publish the checkpoint.  A wait without this
 * call drops it.  Fails: LM_EBUG, and drops it, if these are not all bytes of its tensors. */
lm_code lm_ckpt_all_done(lm_ckpt *c, uint64_t wrote, lm_err *e);
/* Let work enqueued on the main stream from here on change the blocks; and: wait until the
 * checkpoint is on disk and published, and old ones are pruned.  Both return its failure. */
lm_code lm_ckpt_wait_copied(lm_ckpt *c, lm_err *e);
lm_code lm_ckpt_wait(lm_ckpt *c, lm_err *e);
/* Times of lm_now at which the newest one was begun, and its writer ended (0: not yet). */
void lm_ckpt_span(lm_ckpt *c, double *begin, double *end);
/* True if a checkpoint is in progress or ended without a wait since. */
bool lm_ckpt_busy(const lm_ckpt *c);
/* True if the last checkpoint that was begun failed, whichever wait reported it. */
bool lm_ckpt_failed(const lm_ckpt *c);
/* Path of the last whole checkpoint of this process; NULL before the first one, and while busy. */
const char *lm_ckpt_last(const lm_ckpt *c);
void lm_ckpt_free(lm_ckpt *c); /* waits */

/* Read optimizer.safetensors and state.json of a checkpoint, a folder or an .lmz, into s, and the adapter if it is one of an
 * adapter (a model's weights are loaded separately). Fails: LM_EFORMAT when optimiser, tensors or shapes
 * differ. */
lm_code lm_ckpt_load(const char *step_dir, lm_train_state *s, lm_err *e);
/* state.json alone: the options of the run, and the steps done.  The caller frees *out
 * (json_decref). */
lm_code lm_ckpt_options(const char *step_dir, json_t **out, int64_t *step, lm_err *e);

#endif
