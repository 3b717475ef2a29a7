/* SPDX-License-Identifier: Apache-2.0 */
/* measure.h -- estimates the duration of a training from a few of its steps. */
#ifndef LM_TRAIN_MEASURE_H
#define LM_TRAIN_MEASURE_H

#include "train/trainer.h"

typedef struct {
    int64_t steps; /* number of timed steps; 0: a signal came first */
    double seconds_per_step, tokens_per_second;
} lm_train_measure;

/* Take LM_TRAIN_WARM steps and then as many as five seconds allow, at least one, with fresh weights
 * on `data` (NULL: random ids, one document a window); nothing is written.  Fails: as
 * lm_trainer_new and lm_trainer_run. */
lm_code lm_train_measured(const lm_trainer_opts *o, lm_program *p, lm_tokens *data, lm_sink *sink,
                          lm_train_measure *out, lm_err *e);

#endif
