/* SPDX-License-Identifier: Apache-2.0 */
/* advice.h -- warnings of settings that are possible and probably not intended. */
#ifndef LM_TRAIN_ADVICE_H
#define LM_TRAIN_ADVICE_H

#include "train/disk.h"
#include "train/trainer.h"

/* Warn of a schedule that does not reach its peak or its end, of one that falls under an optimiser that averages, and
 * of sequences longer than the model's positions. */
void lm_train_advise(const lm_trainer_opts *o, const lm_config *c, lm_sink *sink);
/* Warn of checkpoints for which the file system of `run` has no space, with both numbers. */
void lm_train_advise_space(const lm_disk *s, const char *run, bool lmz, lm_sink *sink);

#endif
