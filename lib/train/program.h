/* SPDX-License-Identifier: Apache-2.0 */
/* program.h -- the graphs of a training step: forward and backward of a micro-batch with the sum of
 * its losses, the update, and, with validation, the forward of an evaluation. */
#ifndef LM_TRAIN_PROGRAM_H
#define LM_TRAIN_PROGRAM_H

#include "train/groups.h"

typedef struct {
    int64_t batch, seq;
    lm_precision precision;
    bool documents, dropout;
    lm_groups groups;
    double clip_norm, clip_value; /* 0: none */
} lm_program_opts;

typedef struct {
    lm_backend *backend;
    lm_groups groups;
    lm_model *train, *eval; /* eval: NULL without validation */
    lm_vid loss_sum;        /* STATE F64 [1] of `train`: of all micro-batches of a step so far */
    lm_update *update;
} lm_program;

/* c and b are borrowed. */
lm_code lm_program_new(const lm_program_opts *o, const lm_config *c, bool validation, lm_backend *b,
                       lm_program **out, lm_err *e);
void lm_program_free(lm_program *p);

#endif
