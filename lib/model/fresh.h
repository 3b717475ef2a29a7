/* SPDX-License-Identifier: Apache-2.0 */
/* fresh.h -- fresh weights straight into a model folder, a few megabytes at a time, whatever the
 * size of the model. */
#ifndef LM_MODEL_FRESH_H
#define LM_MODEL_FRESH_H

#include "base/par.h"
#include "base/progress.h"
#include "format/folder.h"
#include "model/model.h"

/* Elements [from, from + count) of slice i in the file's shape and order: what lm_weights_init puts
 * into a block for the same seed. */
void lm_slice_init(const lm_model *m, int i, uint64_t seed, lm_par *par, int64_t from,
                   int64_t count, float *dst);

/* All tensors of a folder whose plan is lm_weights_plan's.  Stops early when lm_stopping(). */
lm_code lm_fresh_write(const lm_model *m, uint64_t seed, lm_par *par, lm_folder *f, lm_sink *sink,
                       lm_err *e);

/* Fresh weights into a block in memory of `b`: on a device tensor by tensor. */
lm_code lm_fresh_on(const lm_model *m, uint64_t seed, lm_backend *b, float *block, lm_err *e);

#endif
