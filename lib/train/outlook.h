/* SPDX-License-Identifier: Apache-2.0 */
/* outlook.h -- what a run would hold, whether that fits here, and how long it would take. */
#ifndef LM_TRAIN_OUTLOOK_H
#define LM_TRAIN_OUTLOOK_H

#include "train/measure.h"
#include "train/space.h"
#include "train/trainer.h"

typedef struct {
    lm_memory_plan plan;
    lm_train_verdict verdict;
    lm_space space;           /* of its checkpoints */
    lm_train_measure measure; /* steps 0: not measured */
    int64_t steps;            /* that are still to be taken */
    bool resumed, measure_asked;
} lm_outlook;

typedef struct {
    bool lmz, measure;
    int64_t step, keep; /* as lm_train_space */
} lm_outlook_ask;

/* plan: what lm_trainer_plan gave for the same.  Nothing is measured. */
lm_code lm_outlook_make(const lm_trainer_opts *o, const lm_program *p, const lm_outlook_ask *ask,
                        const lm_memory_plan *plan, lm_outlook *out, lm_err *e);

/* As one JSON object over several lines, or as a table with the verdict at its end, appended to `out`. */
lm_code lm_outlook_json(const lm_outlook *o, lm_buf *out, lm_err *e);
lm_code lm_outlook_table(const lm_outlook *o, lm_buf *out, lm_err *e);

#endif
