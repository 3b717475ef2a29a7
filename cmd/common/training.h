/* SPDX-License-Identifier: Apache-2.0 */
/* training.h -- the work of tools that train, in its order: operands or a run to resume, checks,
 * the device, a plan or the training, and the messages about them.
 *
 * `a` is the tool's lm_loop_args, `s` its session, `r` what it owns besides.  `plan`: nothing is
 * trained or written. */
#ifndef LM_CMD_TRAINING_H
#define LM_CMD_TRAINING_H

#include "common/loop.h"
#include "train/outlook.h"

/* Set model, data, run and checkpoint in s->ask from the operands: MODEL DATA, or with --resume
 * [DATA]; then also all options that are not given, from those of the run.  product: "the run with
 * -o RUN", for messages.  Misuse of operands ends the program.  Fails as lm_run_find and what else
 * reads a run, and as lm_run_apart and lm_run_check; LM_EUSAGE for a run that names no data. */
lm_code lm_training_operands(lm_tool *t, const lm_loop_args *a, bool plan, const char *product,
                             lm_session *s, lm_loop_run *r, lm_err *e);
/* The string of the options of a resumed run; NULL if it has none, or nothing is resumed. */
const char *lm_training_saved(const lm_loop_run *r, const char *key);
/* The model of a resumed run is the base of its adapter.  Fails: LM_EFORMAT if the run does not
 * name one. */
lm_code lm_training_find_base(lm_session *s, const lm_loop_run *r, lm_err *e);
/* Of an option that names a file or a folder, before options are saved: *path becomes absolute, as the run may be resumed
 * in another folder; it stays if it is NULL, or nothing has this name.  lm_free(*owned) when *path is no longer read. */
lm_code lm_training_absolute(const char **path, char **owned, lm_err *e);
/* The same for a chat template: a file with a point or a folder in its name, not the name of a template. */
lm_code lm_training_template(const char **name, char **owned, lm_err *e);
/* LM_EUSAGE for options without effect because another one is missing.  finds_val: evaluations need
 * no --val, for the data may hold validation data. */
lm_code lm_training_refuse_alone(const lm_loop_args *a, bool finds_val, lm_err *e);
/* Exits like lm_misuse when records or reports would overwrite an input. */
void lm_training_refuse_inputs(lm_tool *t, const lm_loop_args *a, const lm_session *s);

/* Start the threads, and open the device, of the first of s->o.mesh: each has as many of the threads. */
lm_code lm_training_open(lm_tool *t, const lm_loop_args *a, lm_session *s, lm_err *e);
/* After lm_session_close and what else uses them. */
void lm_training_close(lm_tool *t, lm_session *s);
void lm_loop_run_fini(lm_loop_run *r);
/* LM_EUSAGE for options about routers of a model that has none. */
lm_code lm_training_check_experts(const lm_loop_args *a, const lm_session *s, lm_err *e);
/* A warning when the type of the computation has no fast products here. */
void lm_training_say_slow(lm_tool *t, const lm_session *s);

/* --dry-run: the memory of the run by part, and whether it fits here; then print it.  The caller owns *out: lm_outlook_fini. */
lm_code lm_training_outlook(const lm_loop_args *a, const lm_session *s, const lm_memory_plan *plan,
                            bool measure, lm_outlook *out, lm_err *e);
lm_code lm_training_print_outlook(const lm_tool *t, const lm_outlook *o, lm_err *e);
/* Both. */
lm_code lm_training_tell_outlook(const lm_tool *t, const lm_loop_args *a, const lm_session *s,
                                 const lm_memory_plan *plan, lm_err *e);
/* Check that all ranks have the same options, model and data.  Fails: LM_EUSAGE naming a rank that differs. */
lm_code lm_training_agree(lm_tool *t, const lm_loop_run *r, lm_session *s, lm_err *e);
/* Train, end the records, and report the result: rank 0 does. */
lm_code lm_training_run(lm_tool *t, const lm_loop_args *a, lm_session *s,
                        const lm_memory_plan *plan, lm_err *e);
/* --list-optimizers. */
lm_code lm_training_list_optimizers(const lm_tool *t, lm_err *e);

#endif
