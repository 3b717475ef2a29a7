/* SPDX-License-Identifier: Apache-2.0 */
/* evaluate.h -- the loss of a model on windows of tokens: validation during training, and
 * eval-model. */
#ifndef LM_TRAIN_EVALUATE_H
#define LM_TRAIN_EVALUATE_H

#include "model/rotary.h"
#include "train/batch.h"

/* A model in EVAL mode with its executor and one batch. */
typedef struct {
    lm_model *model;
    lm_exec *exec;
    lm_backend *b;
    lm_batch batch;
    lm_rotary rope;
    bool own; /* the model is freed with it */
    /* the losses, values and entropies, on the host where the backend's memory is not the host's */
    float *rows;
} lm_evaluator;

/* Build for `c` with sequences of T, `batch` at a time.  Weights are bound by lm_store_bind
 * (store.h).  Fails: LM_ELIMIT when a device is too small for weights and activations (both
 * numbers, and a batch that would fit). */
lm_code lm_evaluator_new(const lm_config *c, const lm_build *build, lm_backend *b,
                         lm_evaluator *out, lm_err *e);
/* From a model in EVAL mode and a plan that keeps its losses, both borrowed.  share: an executor on
 * the same backend whose arena may be used, since the two never run at the same time. */
lm_code lm_evaluator_of(lm_model *m, const lm_plan *plan, lm_backend *b, lm_exec *share,
                        lm_evaluator *out, lm_err *e);
void lm_evaluator_fini(lm_evaluator *v);

typedef struct {
    double nll; /* natural log, summed over targets */
    int64_t tokens;
} lm_eval_sum;

/* Run the batch, wait for it and add its loss to *sum; `rows` (may be NULL) receives the losses of
 * the B*T rows, valid until the next run. */
lm_code lm_evaluator_run(lm_evaluator *v, lm_eval_sum *sum, const float **rows, lm_err *e);
/* Add such losses of the batch to *sum. */
void lm_evaluator_add(const lm_evaluator *v, const float *rows, lm_eval_sum *sum);
/* Those of a batch that has run, on the host; valid as long. */
lm_code lm_evaluator_losses(lm_evaluator *v, const float **rows, lm_err *e);
/* The values of these rows (lm_build.value), valid as long. */
lm_code lm_evaluator_values(lm_evaluator *v, const float **values, lm_err *e);
/* Their entropies (lm_build.entropy), likewise. */
lm_code lm_evaluator_entropies(lm_evaluator *v, const float **entropies, lm_err *e);

#endif
