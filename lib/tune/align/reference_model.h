/* SPDX-License-Identifier: Apache-2.0 */
/* reference_model.h -- a model that stays as it is beside the one that trains, to score what the
 * latter samples.
 *
 * Its weights are its own, in the format of its file where the backend reads that; beside an adapter they are the frozen
 * ones of the training, with the adapter off, or with another in its place.  Its activations lie in the arena of the
 * training if they have room there.
 * Compare reference.h, for answers that are known before the first step. */
#ifndef LM_TUNE_ALIGN_REFERENCE_MODEL_H
#define LM_TUNE_ALIGN_REFERENCE_MODEL_H

#include "model/loaded.h"
#include "text/tokenizer.h"
#include "tune/align/scorer.h"
#include "tune/use.h"

typedef struct {
    /* Set by the caller: the file is that from which the weights that train came, and those that an
     * adapter leaves frozen are still its own: they are read where the training has them. */
    bool shares;
    lm_loaded weights;
    lm_tune_use use; /* of an adapter */
    bool adapted;
    lm_scorer scorer; /* lm_texts_score(&r->scorer.eval, r->scorer.comm, ...) */
} lm_reference_model;

/* Read what the model at `path` is, with an adapter (NULL: none); no weights yet.  Zero-initialise
 * *r but `shares`, and close it also after a failure.  Fails: as lm_loaded_open and
 * lm_tune_use_open; LM_EUSAGE for a model that gives no probabilities of tokens, or has another
 * vocabulary than `config` or other tokens than `tok` (NULL: not compared), and for an adapter with
 * virtual tokens. */
lm_code lm_reference_model_read(lm_reference_model *r, const char *path, const char *adapter,
                                const lm_config *config, const lm_tokenizer *tok, lm_err *e);
/* The same with its weights, in windows of the site's shape; *r is closed after a failure.  Fails:
 * also as lm_loaded_weights. */
lm_code lm_reference_model_open(lm_reference_model *r, const char *path, const char *adapter,
                                const lm_tokenizer *tok, const lm_objective_site *site, lm_err *e);
void lm_reference_model_close(lm_reference_model *r);
/* A digest of its weights, of its adapter's tensors, and of what in the adapter's
 * configuration changes numbers; when it is read. */
lm_code lm_reference_model_digest(lm_reference_model *r, uint8_t digest[16], lm_err *e);
/* Bytes of its weights, without those of the training. */
size_t lm_reference_model_bytes(const lm_reference_model *r);
/* What it takes, when it is read and nothing is loaded, beside the model that trains, in an arena
 * of `arena` bytes. */
lm_code lm_reference_model_outlook(const lm_reference_model *r, const lm_model *train, size_t arena,
                                   size_t *bytes, lm_err *e);

#endif
