/* SPDX-License-Identifier: Apache-2.0 */
/* advantage.h -- from rewards of completions to advantages of them, or of their tokens.  All in
 * F64.
 *
 * Rewards R [groups, size]: `size` completions of each prompt.  NAN is a completion that has no reward: it is
 * left out of means and deviations, and its advantage is 0.
 * Deviations are those of samples (divisor n - 1); eps is added to them.
 *
 *   GROUP           R - mean of the group (GRPO, arXiv:2402.03300)
 *   LEAVE_ONE_OUT   R - mean of the others of the group (RLOO, arXiv:2402.14740)
 *   BATCH           R - mean of the group, then whitened over all (REINFORCE++-baseline, arXiv:2501.03262)
 *   GLOBAL          R - mean of all (REINFORCE with a baseline)
 *   scale group     / (deviation of the group + eps);  batch: of all R;  none: Dr. GRPO (arXiv:2503.20783)
 *   normalise       then (A - mean) / (deviation + eps) over all A (TRL's normalize_advantages of RLOO)
 *
 * Several rewards r_k of weight w_k: their sum is R, or each is normalised in its group before they
 * are added, and the sum over all (GDPO, arXiv:2601.05242; TRL's normalize_then_sum). */
#ifndef LM_TUNE_ALIGN_ADVANTAGE_H
#define LM_TUNE_ALIGN_ADVANTAGE_H

#include <stdbool.h>
#include <stdint.h>

typedef enum {
    LM_ADVANTAGE_GROUP,
    LM_ADVANTAGE_LEAVE_ONE_OUT,
    LM_ADVANTAGE_BATCH,
    LM_ADVANTAGE_GLOBAL,
} lm_advantage_kind;

typedef enum {
    LM_ADVANTAGE_SCALE_GROUP,
    LM_ADVANTAGE_SCALE_BATCH,
    LM_ADVANTAGE_SCALE_NONE
} lm_advantage_scale;

typedef struct {
    lm_advantage_kind kind;
    lm_advantage_scale scale; /* of GROUP */
    bool normalise;
    double eps; /* TRL: 1e-4 */
} lm_advantage_opts;

typedef struct {
    double mean, std; /* of all rewards; std NAN for fewer than two */
    double zero_std;  /* share of groups whose rewards are all equal: they teach nothing */
    int64_t unscored; /* completions without a reward */
} lm_advantage_stats;

/* out [groups, size] may be `reward`.  stats may be NULL. */
void lm_advantage(const lm_advantage_opts *o, const double *reward, int64_t groups, int64_t size,
                  double *out, lm_advantage_stats *stats);
/* each [groups, size, kinds] (lm_reward_score): normalised one by one. */
void lm_advantage_each(const double *each, const double *weight, int kinds, int64_t groups,
                       int64_t size, double eps, double *out, lm_advantage_stats *stats);

/* True if all rewards of a group that are numbers are equal: it teaches nothing. */
bool lm_advantage_flat(const double *reward, int64_t size);

/* Mean and sample deviation of the n numbers that are not NAN; NAN where there are too few.
 * Returns their number. */
int64_t lm_moments(const double *x, int64_t n, double *mean, double *std);

/* ---- tokens (PPO, arXiv:1707.06347, 2203.02155) ---- */

/* Rewards of the T tokens of a completion: -beta (logp - ref) for each, and `score` more for the
 * last. */
void lm_token_rewards(const double *logp, const double *ref, int64_t T, double beta, double score,
                      double *out);
/* Generalised advantages (arXiv:1506.02438): delta_t = r_t + gamma V_{t+1} - V_t with V_T = 0 after
 * the last token, A_t = delta_t + gamma lambda A_{t+1}; returns_t = A_t + V_t.  adv and returns
 * [T]; neither may be an input. */
void lm_gae(const double *reward, const double *value, int64_t T, double gamma, double lambda,
            double *adv, double *returns);
/* x <- (x - mean) / sqrt(var + 1e-8) over the n numbers where mask (NULL: all) is true; var with
 * divisor n -
 * 1. keep_mean: the mean is added again. */
void lm_whiten(double *x, const bool *mask, int64_t n, bool keep_mean);

#endif
