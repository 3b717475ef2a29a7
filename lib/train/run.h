/* SPDX-License-Identifier: Apache-2.0 */
/* run.h -- what a training does with its folder before the first step: it looks, and it makes room.
 *
 * A run folder (folder_run.h) may hold files of the user's own.  Only checkpoints (step-N with a
 * state.json), the link `latest` and links into it are ever removed here. */
#ifndef LM_TRAIN_RUN_H
#define LM_TRAIN_RUN_H

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"
#include "base/json.h"
#include "base/lock.h"
#include "base/progress.h"
#include "train/schedule.h"

/* Make the folder `run` if need be, lock it, and check that a training which comes from checkpoint `from`
 * of the same folder (-1: it comes from elsewhere) may write its checkpoints there.  `force`:
 * checkpoints after `from` may be lost.  The lock is kept until the training has ended; a warning goes
 * to `sink` where there are no locks.
 * Fails, with the folder as it was: LM_EUSAGE when another training is at work there (names it), when
 * the folder holds such checkpoints and !force (names the newest), or with force when a file of the
 * user's lies in one of them, when it is a file, when other files stand where the links and checkpoints
 * go (names one), when an .lmz that would stay is a difference to a checkpoint that would not (names
 * the latter); LM_EIO when it cannot be written. */
lm_code lm_run_open(const char *run, int64_t from, bool force, lm_sink *sink, lm_lock **out,
                    lm_err *e);

/* Name of the newest whole checkpoint ("step-000300", yours), NULL when there is none.  Unlike
 * lm_run_latest this does not ask `latest`, which a killed run may have left one behind. */
lm_code lm_run_newest(const char *run, char **out, lm_err *e);

/* What `name` means for a training that goes on: a run (its newest checkpoint), or one checkpoint,
 * of a run or lying anywhere; of the latter kind the run is `output`.  *step_dir is the checkpoint,
 * *run the folder of its run (both yours).  Fails: LM_EUSAGE when a run holds none, or a lone one
 * has no `output`. */
lm_code lm_run_find(const char *name, const char *output, char **step_dir, char **run, lm_err *e);

/* Would replacing `run` take away the very model that the training starts from?  LM_EUSAGE. */
lm_code lm_run_apart(const char *run, const char *model, lm_err *e);

/* Set o[key] to a path that holds from any folder; nothing for NULL. */
lm_code lm_run_keep_path(json_t *o, const char *key, const char *path, lm_err *e);

/* What a run reads and writes beside its folder; NULL: none. */
typedef struct {
    const char *data, *val, *tensorboard, *metrics;
} lm_run_paths;

/* The options that checkpoints keep, JSON text appended to `out`: all of the tool's (a JSON object), the paths as
 * they hold from any folder, and where the schedule lies (resume.h).  It is what --resume needs. */
lm_code lm_run_options(const lm_buf *options, const lm_run_paths *paths, const lm_schedule *s,
                       lm_buf *out, lm_err *e);

/* Remove what a killed run left half-written, and all checkpoints after `from`; `latest` then names
 * `from`.  -1: those of an older run stay until this one has its first (lm_ckpt_opts.replace). */
lm_code lm_run_claim(const char *run, int64_t from, lm_err *e);

#endif
