/* SPDX-License-Identifier: Apache-2.0 */
/* session.h -- a training from its model and data to its last checkpoint.
 *
 * The steps are called in this order, and each may be the last: the config, the program, the data, the run folder and
 * its records, the training.  Nothing is written before all that is read is known to be sound, and next to nothing is
 * lost when a step fails. */
#ifndef LM_TRAIN_SESSION_H
#define LM_TRAIN_SESSION_H

#include "base/lock.h"
#include "format/bundle.h"
#include "format/provenance.h"
#include "train/trainer.h"

/* What is asked for; all borrowed, NULL where absent. */
typedef struct {
    const char *model;  /* a model, or a checkpoint */
    const char *data;   /* as lm_data_find */
    const char *val;    /* before what lies beside the data */
    const char *run;    /* the folder; NULL: a plan */
    const char *resume; /* the checkpoint to go on from: `model` */
    int64_t step,
        from;          /* steps done by then; that checkpoint's step if it lies in `run`, else -1 */
    bool plan;         /* nothing is trained: the config alone is enough */
    double dropout;    /* of all kinds; negative: the config's */
    double peak_flops; /* for MFU; 0: none; negative: measured, except for a plan */
    lm_tokens_kind kind; /* of the data */
    bool check_tokenizer;
    bool force; /* what is there may be replaced */
    bool lmz;   /* checkpoints are .lmz */
    int keep;   /* of them; 0: all */
    const char *metrics, *tensorboard, *trace;
    double (*wall_clock)(void); /* seconds since 1970 */
    const char *note;           /* said before the first step; "": nothing */
    const lm_buf *options;      /* of the tool, a JSON object (lm_run_options) */
    lm_history_step history;    /* without inputs */
    lm_bundle_opts how;         /* to open the model */
    const char *tool;           /* for the first record: its name, arguments and seed */
    int argc;
    char **argv;
    int64_t seed;
    lm_sink *sink;
} lm_session_ask;

typedef struct {
    lm_session_ask ask;
    lm_trainer_opts o;
    lm_par *par;         /* borrowed, and */
    lm_backend *backend; /* so is this */

    json_t *config_json;
    lm_config config;
    lm_model_source *source; /* NULL: the config came alone */
    lm_program *program;
    char *train_path, *val_path; /* val_path: NULL if there is none */
    lm_tokens *train, *val;
    lm_metrics *metrics;
    lm_trainer *trainer;

    json_t *generation;
    lm_folder_files files; /* the tokenizer's */
    uint16_t *id_bytes;
    lm_buf options, history;
    lm_tb *tb;
    lm_lock *lock;
    bool made; /* the run folder is new */
} lm_session;

/* The config of the model, and the model opened unless this is a plan.  preset: a config in its place, which now
 * belongs to the session; NULL: none. */
lm_code lm_session_config(lm_session *s, json_t *preset, lm_err *e);
/* The program; *plan may be NULL. */
lm_code lm_session_program(lm_session *s, lm_memory_plan *plan, lm_err *e);
/* Where the data lie, before any is opened. */
lm_code lm_session_find_data(lm_session *s, lm_err *e);
/* The data to train on; and with validation those for it, checked against each other. */
lm_code lm_session_open_train(lm_session *s, lm_err *e);
lm_code lm_session_open_val(lm_session *s, lm_err *e);
/* What goes into every checkpoint; the run folder, locked; records and reports. */
lm_code lm_session_open_run(lm_session *s, lm_err *e);
/* Train.  Fails as lm_trainer_new and lm_trainer_run; *r holds what was reached also then. */
lm_code lm_session_train(lm_session *s, const lm_memory_plan *plan, lm_train_result *r, lm_err *e);
/* Close everything; a run folder in which nothing lies after a failure (e) is removed.  Adds to *e what closing
 * fails with. */
void lm_session_close(lm_session *s, lm_err *e);

#endif
