/* SPDX-License-Identifier: Apache-2.0 */
/* ada.h -- the training of AdaLoRA (methods/adalora.c): its penalty, and the distribution of ranks
 * among modules.
 *
 *   loss        + orth_reg_weight * mean over all A and B of |A A' - 1| and |B' B - 1| (Frobenius)
 *   after each step, of every number x of A, E and B with its gradient g, clipped as for the step:
 *     sensitivity   s = beta1 s + (1 - beta1) |x g|
 *     uncertainty   u = beta2 u + (1 - beta2) | |x g| - s |
 *   importance of rank k of a module: s u of E_k + the mean of s u over row k of A + that over column k of B
 *   every deltaT steps from tinit on, and at the step total_step - tfinal: E of the least important ranks becomes 0, so many
 *     that the budget is left, which falls with the cube of the remaining share from init_r to target_r a module; those of the
 *     last time stay 0
 *
 * Steps are those that changed parameters, from 1.  All ranks stay in memory, as a rank without E
 * may have one again; files have those that are left, and rank_pattern in the configuration says
 * which they are.  Sources: arXiv:2303.10512; huggingface/peft tuners/adalora.  An adapter that
 * begins with a rank_pattern keeps these ranks: it has the penalty alone.  Private to lib/tune. */
#ifndef LM_TUNE_ADA_H
#define LM_TUNE_ADA_H

#include "train/state.h"
#include "train/update.h"
#include "tune/attach.h"

typedef struct lm_ada lm_ada;

/* For an adapter of this method that trains `steps` steps, the schedule's length unless the
 * configuration has total_step, which is set.  config: borrowed.  Fails: LM_EUSAGE for a schedule
 * without room for distributions. */
lm_code lm_ada_new(const lm_attach *a, json_t *config, int64_t steps, lm_ada **out, lm_err *e);
void lm_ada_free(lm_ada *a);
/* Of the configuration of a run's checkpoint with these tensors: all ranks are in its states, so
 * that rank_pattern is removed. */
void lm_ada_resume(json_t *config, const lm_st *saved);
/* True if the adapter is of this method. */
bool lm_ada_is(const lm_attach *a);

const lm_update_beside *lm_ada_beside(const lm_ada *a);
const lm_ckpt_form *lm_ada_form(const lm_ada *a);
/* As lm_trainer_io.after. */
lm_code lm_ada_after(lm_ada *a, lm_store *s, int64_t updates, double *loss, lm_err *e);

#endif
