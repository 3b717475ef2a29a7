/* SPDX-License-Identifier: Apache-2.0 */
/* scorer.h -- the log-probabilities of texts under the weights that train, in the arena of the
 * training.
 *
 * The graph of an evaluation (texts.h) on the blocks of the training's store: no weight is copied,
 * and activations lie where those of a step do.  It must not run in the middle of a step's
 * micro-batch. */
#ifndef LM_TUNE_ALIGN_SCORER_H
#define LM_TUNE_ALIGN_SCORER_H

#include "train/objective.h"
#include "tune/align/texts.h"

typedef struct {
    lm_model *model;
    lm_plan plan;
    lm_evaluator eval;
    bool made;     /* eval is */
    lm_comm *comm; /* lm_objective_site.comm */
} lm_scorer;

/* For lm_texts_score(&s->eval, s->comm, ...), in windows of the site's shape.  Zero-initialise *s.  Fails:
 * LM_ELIMIT. */
lm_code lm_scorer_open(lm_scorer *s, const lm_objective_site *site, lm_err *e);
void lm_scorer_close(lm_scorer *s);
/* Bytes that an evaluation of a model with weights of its own takes beside a training whose arena
 * has `arena` bytes: the weights where `own`, and an arena where the training's is smaller. */
lm_code lm_scorer_beside(const lm_model *m, bool own, size_t arena, size_t *bytes, lm_err *e);

#endif
