/* SPDX-License-Identifier: Apache-2.0 */
/* window.h -- the default window of an evaluation: the sequence length of the training, if the
 * model's folder has it.  A model trained on 256 tokens and evaluated on windows of 1024 would
 * mostly be evaluated on positions that it was not trained on. */
#ifndef LM_TRAIN_WINDOW_H
#define LM_TRAIN_WINDOW_H

#include "format/folder.h"
#include "format/safetensors.h"

/* Store the length beside the weights under LM_SEQ_KEY (provenance.h); seq 0: nothing. */
lm_code lm_window_note(lm_st_plan *plan, int64_t seq, lm_err *e);
/* *seq: the stored length, otherwise 1024; at most max_positions.  *trained (may be NULL): it is
 * stored.  Fails: LM_EFORMAT when it is not a number. */
lm_code lm_window_default(const lm_model_source *m, int64_t max_positions, int64_t *seq,
                          bool *trained, lm_err *e);

#endif
