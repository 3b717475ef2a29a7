/* SPDX-License-Identifier: Apache-2.0 */
/* partial.h -- fine-tuning of a part of a model: its tensors that match patterns train, all others
 * are kept as they are read. */
#ifndef LM_TUNE_PARTIAL_H
#define LM_TUNE_PARTIAL_H

#include "model/model.h"

typedef struct {
    json_t *names; /* of the tensors that train, without the architecture's root: an object */
    int64_t trained, params; /* numbers in these, and in all */
} lm_tune_partial;

/* patterns: as in groups.h, separated by '|' ("*norm*|bias|head").  Fails: LM_EUSAGE when no tensor
 * of the model matches one of them. */
lm_code lm_tune_partial_make(const lm_config *c, const char *patterns, lm_tune_partial *out,
                             lm_err *e);
void lm_tune_partial_fini(lm_tune_partial *p);
/* For lm_build.trainable; ctx is the lm_tune_partial. */
bool lm_tune_partial_trains(void *ctx, const char *tensor);

#endif
