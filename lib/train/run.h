/* SPDX-License-Identifier: Apache-2.0 */
/* run.h -- checks and prepares the folder of a training before the first step.
 *
 * A run folder (folder_run.h) may hold other files of the user.  Only checkpoints (step-N with a
 * state.json), the link `latest` and links into it are ever removed here. */
#ifndef LM_TRAIN_RUN_H
#define LM_TRAIN_RUN_H

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"
#include "base/json.h"
#include "base/lock.h"
#include "base/progress.h"
#include "train/run_tiers.h"
#include "train/schedule.h"

/* A file of the run itself, which no checkpoint has: log-probabilities of a reference model
 * (tune/align/reference.h). */
#define LM_RUN_REFERENCE "reference.safetensors"

/* Create the folder `run` if necessary, lock it, and check that a training that continues
 * checkpoint `from` of the same folder (-1: from elsewhere) may write its checkpoints there.
 * `force`: checkpoints after `from` may be lost.  The lock is kept until the training has ended; a
 * warning goes to `sink` if the file system has no locks.  Fails without changing the folder:
 * LM_EUSAGE when another training uses it (names it), when it holds such checkpoints and !force
 * (names the newest), or with force when one of them holds a file of the user, when it is a file,
 * when other files have the names of links and checkpoints (names one), when a kept .lmz is a delta
 * against a checkpoint to be removed (names the latter); LM_EIO when it cannot be written. */
lm_code lm_run_open(const char *run, int64_t from, bool force, lm_sink *sink, lm_lock **out,
                    lm_err *e);

/* The refusals of lm_run_open that need no lock, before long work: the folder is neither created nor changed. */
lm_code lm_run_check(const char *run, int64_t from, bool force, lm_err *e);

/* Name of the newest whole checkpoint ("step-000300"; the caller frees it), NULL when there is
 * none.  Unlike lm_run_latest it does not read `latest`, which may be outdated after a kill. */
lm_code lm_run_newest(const char *run, char **out, lm_err *e);

/* The checkpoint that `name` selects for resuming: a run (its newest checkpoint), or one checkpoint
 * of a run or elsewhere; for the latter the run is `output`.  *step_dir is the checkpoint, *run the
 * folder of its run (the caller frees both).  Fails: LM_EUSAGE when a run holds none, or a lone one
 * has no `output`. */
lm_code lm_run_find(const char *name, const char *output, char **step_dir, char **run, lm_err *e);

/* LM_EUSAGE, as lm_run_open, if a training uses the run of `name` (a run, or one of its
 * checkpoints) and `output` (NULL: none) is not another folder.  Before lm_run_find: such a
 * training removes checkpoints while they are read. */
lm_code lm_run_check_idle(const char *name, const char *output, lm_err *e);

/* LM_EUSAGE if replacing `run` would remove the model from which the training starts. */
lm_code lm_run_apart(const char *run, const char *model, lm_err *e);

/* Set o[key] to an absolute path; nothing for NULL. */
lm_code lm_run_keep_path(json_t *o, const char *key, const char *path, lm_err *e);

/* The files that a run reads and writes outside its folder; base: the model of an adapter.
 * data_digest: of the data, a text.  NULL: none. */
typedef struct {
    const char *data, *data_digest, *val, *base, *tensorboard, *metrics;
    const lm_run_tiers *tiers;
} lm_run_paths;

/* The options that checkpoints keep, JSON text appended to `out`: all of the tool's (a JSON
 * object) and its name, with absolute paths, and the position of the schedule (resume.h): the data
 * of a resume. */
lm_code lm_run_options(const char *tool, const lm_buf *options, const lm_run_paths *paths,
                       const lm_schedule *s, lm_buf *out, lm_err *e);

/* Remove incomplete files of a killed run, and all checkpoints after `from`; `latest` then names
 * `from`.  -1: those of an older run are kept until this one has its first
 * (lm_ckpt_opts.replace).  aside: checkpoint `from` lies in another folder; `latest` then names the newest one before it,
 * if there is one. */
lm_code lm_run_claim(const char *run, int64_t from, bool aside, lm_err *e);
/* The same of a folder that has checkpoints besides (run_tiers.h): with -1 all of them are removed. */
lm_code lm_run_claim_aside(const char *folder, int64_t from, lm_err *e);

#endif
