/* SPDX-License-Identifier: Apache-2.0 */
/* pair_score.h -- the loss of a model with an encoder on pairs of a source and a target (text/example.h): that of each id of
 * the targets, its end token included, as in the validation of a training. */
#ifndef LM_TRAIN_PAIR_SCORE_H
#define LM_TRAIN_PAIR_SCORE_H

#include "base/progress.h"
#include "train/packed.h"
#include "train/score.h"

/* Add the losses of all pairs to *to, until lm_stopping().  `virtuals`: ids from the vocabulary on that an adapter reads
 * (lm_text_example_maker); 0: none.  The evaluator has rows for the longest source and the longest
 * target (lm_text_examples_stats).  Fails: LM_EFORMAT for an id that is not below the vocabulary; as lm_evaluator_run. */
lm_code lm_pairs_score(lm_evaluator *v, const lm_packed *pairs, int64_t virtuals, lm_sink *sink,
                       lm_score *to, lm_err *e);

#endif
