/* SPDX-License-Identifier: Apache-2.0 */
/* loss_impl.h -- shared by the files of losses.  Private to lib/tune. */
#ifndef LM_TUNE_ALIGN_LOSS_IMPL_H
#define LM_TUNE_ALIGN_LOSS_IMPL_H

#include <math.h>

#include "tune/align/loss.h"

/* Rows of tables that several losses have, with TRL's names and defaults. */
#define BETA(value, help)                 \
    {                                     \
        "beta", value, 0, 1e6, help, NULL \
    }
#define SMOOTHING(value, most)                                                   \
    {                                                                            \
        "label_smoothing", value, 0, most, "share of labels assumed wrong", NULL \
    }
#define LD_ALPHA                                                                       \
    {                                                                                  \
        "ld_alpha", 1, 0, 1, "weight of tokens past the shorter answer's length", NULL \
    }

#define ENTROPY                                                              \
    {                                                                        \
        "top_entropy_quantile", 1, 0, 1,                                     \
            "share of tokens that train, those of the highest entropy", NULL \
    }

/* A hyper-parameter of the loss; `none` if its table has none of that name. */
static inline double lm_align_get(const lm_align_use *u, const char *name, double none)
{
    int i = lm_hyper_find(u->loss->hyper, name);
    return i < 0 ? none : u->hyper[i];
}

static inline double lm_sigmoid(double x)
{
    return x >= 0 ? 1 / (1 + exp(-x)) : exp(x) / (1 + exp(x));
}

/* log sig(x), whose derivative is sig(-x). */
static inline double lm_log_sigmoid(double x)
{
    return x >= 0 ? -log1p(exp(-x)) : x - log1p(exp(x));
}

static inline double lm_clamp(double x, double least, double most)
{
    return x < least ? least : x > most ? most : x;
}

/* True if token t is the completion's. */
static inline bool lm_align_counts_token(const lm_align_seq *q, int64_t t)
{
    return !q->mask || q->mask[t];
}

/* Tokens of the completion. */
int64_t lm_align_length(const lm_align_seq *q);
/* The sum over the completion of x [n]. */
double lm_align_sum(const lm_align_seq *q, const double *x);
/* Add d to the derivative of each token of the completion. */
void lm_align_spread(lm_align_seq *q, double d);
/* The mean of -log p over the completions (whole: and prompts) of chosen ones, which are `total` in
 * the step, times `weight`: its share and derivatives are added.  Returns the share. */
double lm_align_sft(lm_align_batch *b, bool whole, double weight);

/* top_entropy_quantile: the (1 - share) quantile of the entropies of the micro-batch, between two
 * of them by interpolation; 0 where some are not known. */
double lm_align_certain_below(const lm_align_batch *b, double share);
bool lm_align_is_certain(const lm_align_seq *q, int64_t t, double bound);

/* Entropy over completions, where it is known. */
void lm_align_note_entropy(lm_align_batch *b);
/* The metrics of pairs: rewards of the chosen and the rejected one, and their log-probabilities. */
typedef struct {
    double reward[2], logp[2];
} lm_align_pair_note;
void lm_align_note_pair(lm_align_batch *b, const lm_align_pair_note *x);

extern const lm_align_loss lm_loss_dpo, lm_loss_robust, lm_loss_hinge, lm_loss_ipo,
    lm_loss_exo_pair, lm_loss_nca_pair, lm_loss_bco_pair, lm_loss_sppo_hard, lm_loss_aot,
    lm_loss_aot_unpaired, lm_loss_apo_zero, lm_loss_apo_down, lm_loss_discopop,
    lm_loss_sigmoid_norm, lm_loss_sft, lm_loss_orpo, lm_loss_cpo, lm_loss_cpo_hinge,
    lm_loss_cpo_ipo, lm_loss_simpo, lm_loss_kto, lm_loss_apo_zero_unpaired, lm_loss_reward,
    lm_loss_grpo, lm_loss_bnpo, lm_loss_dapo, lm_loss_dr_grpo, lm_loss_luspo, lm_loss_cispo,
    lm_loss_sapo, lm_loss_vespo, lm_loss_gmpo, lm_loss_rloo, lm_loss_ppo, lm_loss_reject,
    lm_loss_gkd;

#endif
