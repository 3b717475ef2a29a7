/* SPDX-License-Identifier: Apache-2.0 */
/* folder_run.h -- the folder of a training run, a model folder at every moment.
 *
 *   run/step-000300/ : config.json model.safetensors tokenizer.json ... optimizer.safetensors state.json
 *   run/latest -> step-000300 : the newest whole checkpoint, replaced atomically
 *   run/best -> step-000200 : the one with the lowest validation loss, when the run is validated
 *   run/config.json -> latest/config.json : so for each file of the model; run/ itself loads
 *
 * A checkpoint may be one file instead, step-000300.lmz (lmz.h), with the same files inside; the
 * links into `latest` are then missing, as there is no folder that they could point into.
 *
 * A checkpoint appears under its name only when whole, and `latest` names it only after that: kill
 * -9 at any moment leaves a run that resumes. */
#ifndef LM_FORMAT_FOLDER_RUN_H
#define LM_FORMAT_FOLDER_RUN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"

/* "step-000300": at least six digits; `buf` of at least 32 bytes. */
char *lm_run_step_name(int64_t step, char *buf);
/* The step of such a name, with or without ".lmz"; -1 if it is none. */
int64_t lm_run_step_of(const char *name);
/* Is run_dir/name a whole checkpoint: a folder with a state.json, or an .lmz file?  *step: its step,
 * -1 when it is none. */
lm_code lm_run_checkpoint(const char *run_dir, const char *name, int64_t *step, lm_err *e);
/* Point run/latest at run_dir/step_dir_name (which must exist) and make the links of its model
 * files; links of files that it has not are removed.  optimizer*.safetensors and state.json get no
 * link; an .lmz has none at all. */
lm_code lm_run_publish(const char *run_dir, const char *step_dir_name, lm_err *e);
/* The same for the first checkpoint of a run that takes the place of an older one in this folder:
 * afterwards the checkpoints of that one are removed.  A kill leaves the old run or the new one. */
lm_code lm_run_publish_first(const char *run_dir, const char *step_dir_name, lm_err *e);
/* Take the checkpoints that lm_run_publish_first has replaced, and a kill has kept from being removed, out of
 * the n entries `names` of the run. */
lm_code lm_run_without_replaced(const char *run_dir, char **names, size_t *n, lm_err *e);
/* Remove them. */
lm_code lm_run_remove_replaced(const char *run_dir, lm_err *e);
/* Point run/best at run_dir/step_dir_name: the checkpoint with the lowest validation loss.  The link is
 * replaced atomically and stays when `latest` moves on. */
lm_code lm_run_publish_best(const char *run_dir, const char *step_dir_name, lm_err *e);
/* The step that run/best names, whether the checkpoint is still there or not; -1: there is no such link. */
int64_t lm_run_best(const char *run_dir);
/* A checkpoint of a run is about to be replaced by another form of it in the same folder: links of the run
 * that name `from` name `to` from now on.  Both exist; nothing happens when they lie in no run. */
lm_code lm_run_replace(const char *from, const char *to, lm_err *e);
/* Name of the whole checkpoint of `step` (yours): its folder, else its .lmz; *out = NULL: there is none. */
lm_code lm_run_find_step(const char *run_dir, int64_t step, char **out, lm_err *e);
/* Name of the newest whole checkpoint ("step-000300" or "step-000300.lmz", yours): what latest points
 * at, or, when latest is missing or dangling, the highest step (of two forms of one step the
 * folder).  *out = NULL if there is none (no failure). */
lm_code lm_run_latest(const char *run_dir, char **out, lm_err *e);
/* Where the model at `path` really lies: the newest checkpoint when path is the folder of a run
 * (`latest` is there, or no config.json), else path itself.  *out is yours. */
lm_code lm_run_resolve(const char *path, char **out, lm_err *e);
/* Remove all but the checkpoints of the newest `keep` (>= 1) steps; never the one that latest names,
 * nor newer ones, nor the one that best names, nor one that an .lmz which stays in the run is a difference to,
 * nor a folder in which a file lies that no tool has written. */
lm_code lm_run_prune(const char *run_dir, int keep, lm_err *e);
/* Of the n entries `names` of the run, mark in keep[n] those, too, that a marked .lmz is a difference
 * to, through any number of steps.  An .lmz that cannot be read marks none. */
lm_code lm_run_keep_bases(const char *run_dir, char *const *names, size_t n, bool *keep, lm_err *e);
/* Remove one checkpoint.  It loses its name first: a kill in between leaves a temporary, never half
 * a checkpoint. */
lm_code lm_run_remove(const char *run_dir, const char *step_dir_name, lm_err *e);

#endif
