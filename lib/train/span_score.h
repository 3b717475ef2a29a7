/* SPDX-License-Identifier: Apache-2.0 */
/* span_score.h -- the loss of a model with an encoder on spans of text (span.h): what eval-model measures of it.
 *
 * Ids arrive in any pieces and are one text, which is cut into windows; what does not fill the last one is left out.  Spans of
 * window w are numbers of (0, "span", w), as in the validation of a training. */
#ifndef LM_TRAIN_SPAN_SCORE_H
#define LM_TRAIN_SPAN_SCORE_H

#include "train/score.h"
#include "train/span.h"

typedef struct lm_span_scorer lm_span_scorer;

/* The evaluator (of s->target rows, and sources of s->source) and the spans are borrowed. */
lm_code lm_span_scorer_new(lm_evaluator *v, const lm_span *s, lm_span_scorer **out, lm_err *e);
void lm_span_scorer_free(lm_span_scorer *s);
/* The text goes on with these ids, which are below the vocabulary: LM_EFORMAT.  Results are added to *to at once, or by
 * lm_span_scorer_flush. */
lm_code lm_span_scorer_add(lm_span_scorer *s, const uint32_t *ids, int64_t n, lm_score *to,
                           lm_err *e);
/* The same for all of a dataset. */
lm_code lm_span_scorer_add_tokens(lm_span_scorer *s, const lm_tokens *t, lm_score *to, lm_err *e);
lm_code lm_span_scorer_flush(lm_span_scorer *s, lm_score *to, lm_err *e);

#endif
