/* SPDX-License-Identifier: Apache-2.0 */
/* use.h -- a saved adapter beside a model that is used as it is: attached to the model's graphs, so
 * that the base may be in any format, and stays as it is. */
#ifndef LM_TUNE_USE_H
#define LM_TUNE_USE_H

#include "model/loaded.h"
#include "tune/attach.h"
#include "tune/complete.h"
#include "tune/convert.h"
#include "tune/folder.h"

typedef struct {
    lm_tune_bases bases;
    lm_tune_folder *folder;
    /* of one whose file lacks what is drawn or follows from the base */
    lm_tune_completed completed;
    lm_tune_plain plain; /* of an adapter that began with a part of the base */
    /* of one that trained beside the base quantised; NULL: not */
    struct lm_tune_quantised *quantised;
    lm_attach *attach;
    lm_loaded_adapter adapter;
} lm_tune_use;

/* Open the adapter at `path` for `l`, whose config must stay where it is, and set l->adapter; `o`
 * may be NULL.  To be called before graphs of the model are built.  Fails: LM_EUSAGE for an adapter
 * of another model, or one that graphs have no place for (merge-models merges more); LM_EFORMAT,
 * LM_EIO. */
lm_code lm_tune_use_open(const char *path, const lm_bundle_opts *o, lm_loaded *l, lm_tune_use *out,
                         lm_err *e);
/* True if it can be one of several in one graph (join.h). */
bool lm_tune_use_joins(const lm_tune_use *u);
/* After the model's graphs are released. */
void lm_tune_use_fini(lm_tune_use *u);

#endif
