/* SPDX-License-Identifier: Apache-2.0 */
/* folder_run.h -- the folder of a training run, which is a model folder at all times.
 *
 *   run/step-000300/ : config.json model.safetensors tokenizer.json ... optimizer.safetensors state.json
 *   run/latest -> step-000300 : the newest whole checkpoint, replaced atomically
 *   run/best -> step-000200 : the one with the lowest validation loss, when the run is validated
 *   run/config.json -> latest/config.json : likewise for each file of the model, so that run/ itself can be loaded
 *
 * A checkpoint may be one file instead, step-000300.lmz (lmz.h), with the same files inside; the
 * links into `latest` are then missing, because there is no folder for their targets.
 *
 * A checkpoint appears under its name only when whole, and `latest` names it only after that: kill
 * -9 at any moment leaves a run that resumes. */
#ifndef LM_FORMAT_FOLDER_RUN_H
#define LM_FORMAT_FOLDER_RUN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"

/* The last step that a name can hold: 18 digits. */
#define LM_RUN_MOST_STEP INT64_C(999999999999999999)

/* "step-000300": at least six digits; `buf` of at least 32 bytes. */
char *lm_run_step_name(int64_t step, char *buf);
/* The step of such a name, with or without ".lmz"; -1 for other names. */
int64_t lm_run_step_of(const char *name);
/* True if run_dir/name is a whole checkpoint: a folder with a state.json, or an .lmz file.  *step:
 * its step, -1 for other names. */
lm_code lm_run_checkpoint(const char *run_dir, const char *name, int64_t *step, lm_err *e);
/* Point run/latest at run_dir/step_dir_name (which must exist) and make the links of its model
 * files; links to files that it does not have are removed.  optimizer*.safetensors and state.json
 * get no link; an .lmz gets no links. */
lm_code lm_run_publish(const char *run_dir, const char *step_dir_name, lm_err *e);
/* The same for the first checkpoint of a run that replaces an older one in this folder, whose
 * checkpoints are then removed.  A kill leaves the old run or the new one. */
lm_code lm_run_publish_first(const char *run_dir, const char *step_dir_name, lm_err *e);
/* Remove from the n entries `names` of the run the checkpoints that lm_run_publish_first replaced
 * but could not delete because of a kill. */
lm_code lm_run_without_replaced(const char *run_dir, char **names, size_t *n, lm_err *e);
/* Delete these checkpoints. */
lm_code lm_run_remove_replaced(const char *run_dir, lm_err *e);
/* Point run/best at run_dir/step_dir_name: the checkpoint with the lowest validation loss.  The
 * link is replaced atomically and does not change with `latest`. */
lm_code lm_run_publish_best(const char *run_dir, const char *step_dir_name, lm_err *e);
/* The step that run/best names, even if the checkpoint no longer exists; -1: no such link. */
int64_t lm_run_best(const char *run_dir);
/* Before a checkpoint of a run is replaced by another form in the same folder: change links of the
 * run from `from` to `to`.  Both exist; does nothing outside a run. */
lm_code lm_run_replace(const char *from, const char *to, lm_err *e);
/* Name of the whole checkpoint of `step` (the caller frees it): its folder, otherwise its .lmz;
 * *out = NULL: none. */
lm_code lm_run_find_step(const char *run_dir, int64_t step, char **out, lm_err *e);
/* Name of the newest whole checkpoint ("step-000300" or "step-000300.lmz"; the caller frees it):
 * the target of latest or, when that is missing or dangling, the highest step (of two forms of one
 * step the folder).  *out = NULL if there is none (no failure). */
lm_code lm_run_latest(const char *run_dir, char **out, lm_err *e);
/* The path of the model at `path`: the newest checkpoint when path is the folder of a run (it has
 * `latest`, or no config.json), otherwise path itself.  The caller frees *out. */
lm_code lm_run_resolve(const char *path, char **out, lm_err *e);
/* Remove all checkpoints except those of the newest `keep` (>= 1) steps.  Never removed: the
 * targets of latest and best, newer ones, the base of a kept .lmz, and a folder with a file that no
 * tool wrote. */
lm_code lm_run_prune(const char *run_dir, int keep, lm_err *e);
/* Of the n entries `names` of the run, also mark in keep[n] the bases of marked .lmz files, through
 * any number of steps.  An unreadable .lmz marks none. */
lm_code lm_run_keep_bases(const char *run_dir, char *const *names, size_t n, bool *keep, lm_err *e);
/* Remove one checkpoint.  It is renamed first: a kill in between leaves a temporary, never half a
 * checkpoint. */
lm_code lm_run_remove(const char *run_dir, const char *step_dir_name, lm_err *e);

#endif
