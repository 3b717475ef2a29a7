/* SPDX-License-Identifier: Apache-2.0 */
/* window.h -- the window of an evaluation that names none: the length that the model was trained at,
 * where its folder says so.  A model that has seen 256 tokens at a time and is measured on windows of
 * 1024 is measured mostly on positions that it never met. */
#ifndef LM_TRAIN_WINDOW_H
#define LM_TRAIN_WINDOW_H

#include "format/folder.h"
#include "format/safetensors.h"

/* Note the length beside the weights under LM_SEQ_KEY (provenance.h); seq 0: nothing. */
lm_code lm_window_note(lm_st_plan *plan, int64_t seq, lm_err *e);
/* *seq: what is noted, else 1024; at most max_positions.  *trained (may be NULL): it is noted.
 * Fails: LM_EFORMAT when the note is not a number. */
lm_code lm_window_default(const lm_model_source *m, int64_t max_positions, int64_t *seq,
                          bool *trained, lm_err *e);

#endif
