/* SPDX-License-Identifier: Apache-2.0 */
/* mcq.h -- multiple choice in the form of HellaSwag (arXiv:1905.07830): the ending with the highest
 * probability.
 *
 * A line is {"ctx": "...", "endings": ["...", ...], "label": n} (label also as a string of digits).
 * With HellaSwag's own fields, "activity_label", "ctx_a" and "ctx_b", context and endings are made
 * of these and cleaned as lm-evaluation-harness does (hellaswag.h); "ctx" is then ignored.  An
 * ending is scored behind the context and a space.  acc takes the largest sum of log-probabilities,
 * acc_norm the largest sum divided by the ending's bytes; ties go to the first.  A context too long
 * for the model loses its beginning. */
#ifndef LM_TRAIN_MCQ_H
#define LM_TRAIN_MCQ_H

#include "format/input.h"
#include "text/tokenizer.h"
#include "train/score.h"

typedef struct {
    int64_t questions, right, right_norm, cut; /* cut: contexts that were shortened */
    double nll;                                /* of the right endings, by token */
    int64_t tokens;
} lm_mcq_sum;

/* All questions of a stream of JSONL.  Fails: LM_EFORMAT naming file, line and key.  Stops early
 * when lm_stopping(). */
lm_code lm_mcq_run(lm_input *in, const lm_tokenizer *tok, lm_scorer *s, int64_t seq, lm_sink *sink,
                   lm_mcq_sum *out, lm_err *e);

#endif
