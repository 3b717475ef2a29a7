/* SPDX-License-Identifier: Apache-2.0 */
/* loss_teacher.c -- distillation: the mean over tokens of a divergence that the student's graph
 * computes. */
#include "tune/align/loss_impl.h"

/* The numbers of a token are -D in place of its log-probability, so that a step minimises the mean
 * of D. */
static lm_code run_gkd(const lm_align_use *u, lm_align_batch *b, lm_err *e)
{
    const double each = u->weight / (double)(b->counts->tokens > 0 ? b->counts->tokens : 1);
    (void)e;
    for (int64_t i = 0; i < b->n; i++) {
        lm_align_seq *q = &b->seq[i];
        b->loss -= each * lm_align_sum(q, q->logp);
        lm_align_spread(q, -each);
        lm_align_note(b->metrics, "divergence", -lm_align_sum(q, q->logp),
                      (double)lm_align_length(q), LM_ALIGN_MEAN);
    }
    return LM_OK;
}

static const lm_hyper hyper_gkd[] = {
    { "beta", 0.5, 0, 1, "0: KL(teacher|student), 1: KL(student|teacher), between: JSD", NULL },
    { "lambda", 0.5, 0, 1, "share of steps on the student's own completions", NULL },
    { "temperature", 1, 1e-3, 1e3, "of both distributions", NULL },
    { 0 }
};

const lm_align_loss lm_loss_gkd = { .name = "gkd",
                                    .about = "generalised knowledge distillation, from a teacher",
                                    .paper = "arXiv:2306.13649",
                                    .kind = LM_ALIGN_TEACHER,
                                    .rate = 2e-5,
                                    .hyper = hyper_gkd,
                                    .run = run_gkd };
