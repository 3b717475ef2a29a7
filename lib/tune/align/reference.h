/* SPDX-License-Identifier: Apache-2.0 */
/* reference.h -- what a reference model gives the answers of a training: computed once, kept in a
 * file.
 *
 * It lies in the folder of the run (LM_RUN_REFERENCE).  The reference is the model before its first
 * step (an adapter that was just made changes nothing), or another one (reference_model.h).  The
 * file is safetensors: F32 "train" and "val", the log-probabilities of all answers one behind
 * another, with digests of the answers and of the model in the metadata; a resumed run reads it,
 * because its weights are no longer those of the reference. */
#ifndef LM_TUNE_ALIGN_REFERENCE_H
#define LM_TUNE_ALIGN_REFERENCE_H

#include "base/progress.h"
#include "tune/align/scorer.h"

/* The answers of one set. */
typedef struct {
    const lm_align_text *text;
    int64_t n;
    const char *name; /* "train", "val" */
    uint64_t digest;  /* of them */
    float *logp;      /* [at[n]]; text i's are [at[i], at[i + 1]) */
    int64_t *at;      /* [n + 1] */
} lm_reference_set;

/* Set at, and allocate logp.  The caller releases both with lm_reference_fini.  Fails:
 * LM_ELIMIT. */
lm_code lm_reference_room(lm_reference_set *s, lm_err *e);
void lm_reference_fini(lm_reference_set *s);

/* Compute those of n sets by a scorer that is open; its ranks divide the work.  Stops early when lm_stopping() on one of
 * them, with *whole false. */
lm_code lm_reference_make(lm_reference_set *set, int n, lm_scorer *scorer, lm_sink *sink,
                          bool *whole, lm_err *e);
/* A digest of the reference's weights as text; "": not known. */
enum { LM_REFERENCE_MODEL = 48 };
void lm_reference_model_text(const uint8_t digest[16], char out[LM_REFERENCE_MODEL]);
lm_code lm_reference_save(const lm_reference_set *set, int n, const char *model, const char *path,
                          lm_err *e);
/* model: receives what was saved.  Fails: LM_EUSAGE for a file of other answers, LM_EFORMAT for one
 * that is damaged, LM_EIO. */
lm_code lm_reference_load(lm_reference_set *set, int n, char model[LM_REFERENCE_MODEL],
                          const char *path, lm_err *e);

#endif
