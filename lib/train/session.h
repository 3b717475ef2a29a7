/* SPDX-License-Identifier: Apache-2.0 */
/* session.h -- a training from its model and data to its last checkpoint.
 *
 * Call the steps in this order; a caller may stop after any of them: the config, the program, the data, the run folder
 * and its records, the training.  Nothing is written before all inputs are checked. */
#ifndef LM_TRAIN_SESSION_H
#define LM_TRAIN_SESSION_H

#include "base/lock.h"
#include "format/bundle.h"
#include "format/provenance.h"
#include "train/targets.h"
#include "train/trainer.h"

/* The request.  All borrowed; NULL where absent. */
typedef struct {
    const char *model;  /* a model, or a checkpoint */
    const char *data;   /* the datasets, as lm_data_find takes them */
    const char *val;    /* validation data that replace those of `data` */
    const char *run;    /* the run folder; NULL: a plan */
    const char *resume; /* the checkpoint to resume, the same as `model` */
    int64_t step, from; /* steps done in the checkpoint; the same if it lies in `run`, else -1 */
    bool plan;          /* nothing is trained, so the config is enough */
    const lm_targets *targets; /* NULL: the tool trains causal models alone, and with `pairs` */
    bool pairs;                /* those with an encoder, on pairs of a source and a target */
    double dropout;            /* of all kinds; negative: the config's */
    double peak_flops;         /* for MFU; 0: none; negative: measured, except for a plan */
    lm_tokens_kind kind;       /* of the data */
    bool check_tokenizer;
    bool force;          /* existing results may be replaced */
    bool lmz;            /* checkpoints are .lmz */
    int keep;            /* checkpoints kept; 0: all */
    lm_run_tiers *tiers; /* places besides the run folder; NULL: none */
    const char *metrics, *tensorboard, *trace;
    double (*wall_clock)(void);    /* seconds since 1970 */
    const char *note;              /* a notice before the first step; "": none */
    const lm_buf *options;         /* those of the tool, a JSON object (lm_run_options) */
    const char *data_digest;       /* kept with them */
    lm_history_step history;       /* without inputs */
    lm_bundle_opts how;            /* to open the model */
    const lm_objective *objective; /* the loss and its data; NULL: the datasets */
    lm_comm *comm;                 /* this process among the ranks of o.mesh; NULL: the only one */
    const char *tool;              /* for the first record: its name, arguments and seed */
    int argc;
    char **argv;
    int64_t seed;
    lm_sink *sink;
} lm_session_ask;

typedef struct {
    lm_session_ask ask;
    lm_trainer_opts o;
    lm_par *par;         /* borrowed, and */
    lm_par *rank_par;    /* that of the backend, if there are several ranks; and */
    lm_backend *backend; /* so is this, of the first rank */

    json_t *config_json;
    lm_config config;
    lm_model_source *source; /* NULL: only a config was read */
    lm_span span;            /* of o.span */
    lm_program *program;
    lm_train_pipe *pipe;         /* NULL: one rank has all layers */
    char *train_path, *val_path; /* val_path: NULL if there is none */
    lm_tokens *train, *val;
    lm_metrics *metrics;
    lm_trainer *trainer;
    /* Of an adapter, set by the caller before lm_session_open_run; borrowed.  All zero: there is none. */
    struct {
        const char *config; /* text of adapter_config.json: checkpoints are its folders */
        lm_code (*start)(void *ctx, lm_store *s, lm_err *e); /* lm_trainer_io.adapt */
        lm_code (*fold)(void *ctx, lm_store *s, lm_err *e);  /* lm_ckpt_opts.fold */
        /* lm_trainer_io.after */
        lm_code (*after)(void *ctx, lm_store *s, int64_t updates, double *loss, lm_err *e);
        const lm_ckpt_form *form; /* lm_ckpt_opts.form */
        void *ctx;
    } adapter;
    const lm_packed *packed, *val_packed; /* lm_session_use_examples */
    int64_t ids;

    json_t *generation;
    lm_folder_files files; /* the tokenizer's */
    uint16_t *id_bytes;
    lm_buf options, history;
    lm_tb *tb;
    lm_lock *lock;
    bool made; /* the run folder is new */
} lm_session;

/* Read the config of the model, and open the model unless this is a plan.  For masked language modelling s->o.mlm is set,
 * by the model's tokenizer.  preset: a config to take instead, which the session then owns; NULL: none.  Fails: LM_EUSAGE
 * for a model without config.json, and for another objective than the model's; as lm_model_source_open, lm_config_read and
 * lm_mlm_init. */
lm_code lm_session_config(lm_session *s, json_t *preset, lm_err *e);
/* Make the program (lm_trainer_program), and its memory in *plan unless that is NULL.  Fails as lm_trainer_program. */
lm_code lm_session_program(lm_session *s, lm_memory_plan *plan, lm_err *e);
/* Find the paths of the datasets; opens none.  Fails as lm_data_find. */
lm_code lm_session_find_data(lm_session *s, lm_err *e);
/* Open the training data; and, if there are evaluations, the validation data, which must have the same tokenizer.
 * Fails: LM_EUSAGE without validation data; as lm_data_open. */
lm_code lm_session_open_train(lm_session *s, lm_err *e);
lm_code lm_session_open_val(lm_session *s, lm_err *e);
/* Instead of the former: train on examples in windows, borrowed; val NULL: there are no validation data.  Their ids are
 * below `ids`; name: of the data, for records.  Fails: LM_EUSAGE when there are evaluations and no validation data. */
lm_code lm_session_use_examples(lm_session *s, const lm_packed *train, const lm_packed *val,
                                int64_t ids, const char *name, lm_err *e);
/* Check that all ranks have the same model and data, before any of them writes.  Nothing for one rank.  Fails: as
 * lm_comm_agree, lm_data_digest. */
lm_code lm_session_agree(lm_session *s, lm_err *e);
/* On rank 0: read the files that every checkpoint holds, lock the run folder, and begin the records; the others wait for it.
 * Fails as lm_run_open; LM_EIO for records. */
lm_code lm_session_open_run(lm_session *s, lm_err *e);
/* Train.  Fails as lm_trainer_new and lm_trainer_run; *r holds the results of the steps that ran, also after a
 * failure. */
lm_code lm_session_train(lm_session *s, const lm_memory_plan *plan, lm_train_result *r, lm_err *e);
/* Close everything.  After a failure (*e) a run folder that this session made is removed if it is empty.  A failure of
 * closing is reported in *e. */
void lm_session_close(lm_session *s, lm_err *e);

#endif
