/* SPDX-License-Identifier: Apache-2.0 */
/* gkd.h -- generalised knowledge distillation (arXiv:2306.13649) as steps of the trainer: on given
 * answers, or on those that the student samples itself.
 *
 * A share `lambda` of the steps, drawn by (seed, step), samples an answer to each prompt with the
 * present weights; the other steps take the answers of the data.  Both learn the teacher's
 * distributions at the answers' tokens: the mean over all tokens of the step of the generalised
 * Jensen-Shannon divergence (loss.h, gkd), which the student's graph computes from the teacher's
 * states (teacher.h).  The records of a step follow from (seed, step), the samples from these and
 * the weights: a resumed run repeats them.
 *
 * Evaluations are on the answers of the validation data.  Metrics: divergence; on_policy, 1 of
 * steps that sampled, and of these completions/mean_length and completions/clipped_ratio. */
#ifndef LM_TUNE_ALIGN_GKD_H
#define LM_TUNE_ALIGN_GKD_H

#include "text/answers.h"
#include "tune/align/loss.h"
#include "tune/align/rollout.h"
#include "tune/align/teacher.h"
#include "tune/align/texts.h"

/* All pointers are borrowed for the life of the objective. */
typedef struct {
    const lm_align_spec *spec;          /* of the kind LM_ALIGN_TEACHER */
    const lm_text_answers *train, *val; /* given ones; val NULL: there are no evaluations */
    lm_teacher *teacher;                /* built */
    int64_t each;                       /* records of a step */
    int64_t check;                      /* micro-batches of an evaluation; 0: all */
    int64_t vocab;
    uint64_t seed;
    lm_rollout_opts rollout; /* with lambda above 0, and */
    const lm_tokenizer *tokenizer;
} lm_gkd_opts;

typedef struct lm_gkd lm_gkd;

lm_code lm_gkd_new(const lm_gkd_opts *o, lm_gkd **out, lm_err *e);
void lm_gkd_free(lm_gkd *x);
/* For the trainer; valid as long as x. */
const lm_objective *lm_gkd_objective(const lm_gkd *x);

#endif
