/* SPDX-License-Identifier: Apache-2.0 */
/* outlook.h -- the memory of a run, whether it fits here, and the time that it would take. */
#ifndef LM_TRAIN_OUTLOOK_H
#define LM_TRAIN_OUTLOOK_H

#include "base/json.h"
#include "train/disk.h"
#include "train/measure.h"
#include "train/mesh_plan.h"
#include "train/trainer.h"

typedef struct {
    lm_memory_plan plan;
    lm_mesh_plan each; /* of several ranks */
    bool elsewhere;    /* there are more than one machine has: no verdict */
    lm_train_verdict verdict;
    lm_disk space;            /* of its checkpoints */
    lm_train_measure measure; /* steps 0: not measured */
    int64_t steps;            /* remaining steps */
    bool resumed, measure_asked;
} lm_outlook;

typedef struct {
    bool lmz, measure;
    int64_t step, keep; /* see lm_train_disk */
} lm_outlook_ask;

/* plan: the result of lm_trainer_plan for the same options.  Measures nothing.  The caller owns *out: lm_outlook_fini. */
lm_code lm_outlook_make(const lm_trainer_opts *o, const lm_program *p, const lm_outlook_ask *ask,
                        const lm_memory_plan *plan, lm_outlook *out, lm_err *e);
void lm_outlook_fini(lm_outlook *o);

/* As one JSON object over several lines, with what `also` adds to it (may be NULL), or as a table with the verdict at its end,
 * appended to `out`. */
lm_code lm_outlook_json(const lm_outlook *o, void (*also)(lm_jw *), lm_buf *out, lm_err *e);
lm_code lm_outlook_table(const lm_outlook *o, lm_buf *out, lm_err *e);

#endif
