/* SPDX-License-Identifier: Apache-2.0 */
/* reward_model.h -- a model of scores as a reward: "MODEL", or "MODEL+ADAPTER" for an adapter of it
 * with a head.
 *
 * It scores prompt and completion as the ids that were sampled, at the last token that is not
 * padding, so that it must have the tokens of the model that trains.  Its weights are its own; its
 * activations lie in the arena of the training.  Private to lib/tune. */
#ifndef LM_TUNE_ALIGN_REWARD_MODEL_H
#define LM_TUNE_ALIGN_REWARD_MODEL_H

#include "text/tokenizer.h"
#include "train/objective.h"
#include "tune/align/reward.h"

typedef struct lm_reward_model lm_reward_model;

/* For completions of a model with that tokenizer (borrowed during the call; NULL: there is none).
 * Fails: LM_EUSAGE for a model without a head of scores, or with other tokens; as lm_loaded_open
 * and lm_tune_use_open. */
lm_code lm_reward_model_open(const char *spec, const lm_tokenizer *tok, lm_reward_model **out,
                             lm_err *e);
void lm_reward_model_close(lm_reward_model *r);
/* Bytes that it takes beside a training of `train` whose arena has `arena` bytes. */
lm_code lm_reward_model_bytes(const lm_reward_model *r, const lm_model *train, size_t arena,
                              size_t *bytes, lm_err *e);
/* Load it, for texts of at most the site's windows and one token more. */
lm_code lm_reward_model_load(lm_reward_model *r, const lm_objective_site *site, lm_err *e);
/* out[i] for each item; NAN of those that are missing when lm_stopping(). */
lm_code lm_reward_model_score(lm_reward_model *r, const lm_reward_item *item, int64_t n,
                              double *out, lm_err *e);

#endif
