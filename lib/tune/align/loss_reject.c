/* SPDX-License-Identifier: Apache-2.0 */
/* loss_reject.c -- rejection sampling: the likelihood of the completions that were kept. */
#include "tune/align/loss_impl.h"

static lm_code run_reject(const lm_align_use *u, lm_align_batch *b, lm_err *e)
{
    const double share = u->weight / fmax((double)b->counts->tokens, 1);
    double sum = 0;
    (void)e;
    for (int64_t i = 0; i < b->n; i++) {
        sum -= lm_align_sum(&b->seq[i], b->seq[i].logp);
        lm_align_spread(&b->seq[i], -share);
    }
    b->loss += share * sum;
    return LM_OK;
}

static const lm_hyper hyper_reject[] = { { 0 } };

const lm_align_loss lm_loss_reject = { .name = "reject",
                                       .about = "likelihood of the best completions",
                                       .paper = "arXiv:2304.06767",
                                       .kind = LM_ALIGN_POLICY,
                                       .rate = 1e-5,
                                       .hyper = hyper_reject,
                                       .keeps = true,
                                       .run = run_reject };
