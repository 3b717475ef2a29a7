/* SPDX-License-Identifier: Apache-2.0 */
/* complete.h -- the tensors of an adapter with those that its file may lack, because they are drawn
 * from a seed or follow from the base: what a graph needs, which reads all of them from one
 * file. */
#ifndef LM_TUNE_COMPLETE_H
#define LM_TUNE_COMPLETE_H

#include "tune/folder.h"

/* The file in memory; zero it first. */
typedef struct {
    lm_st *tensors; /* NULL: nothing is missing */
    lm_buf bytes;   /* of it, which must stay where they are */
} lm_tune_completed;

/* Of a folder that is bound.  Fails as a method's draw and derive; LM_ELIMIT. */
lm_code lm_tune_complete(const lm_tune_folder *f, lm_model_source *base, lm_tune_completed *out,
                         lm_err *e);
void lm_tune_completed_fini(lm_tune_completed *c);

#endif
