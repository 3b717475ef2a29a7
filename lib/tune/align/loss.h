/* SPDX-License-Identifier: Apache-2.0 */
/* loss.h -- losses of alignment as functions of the log-probabilities of tokens, with their
 * derivatives.  All in F64.
 *
 * A loss sees the sequences of one micro-batch.  Of sequence i, tokens t = 0..n-1 have the
 * log-probability l_t = log pi(y_t | y_<t), that of the reference l'_t and that of the policy that
 * sampled them o_t.  The mask m_t marks the completion; prompts have 0.
 *
 *   s = sum_t m_t l_t, s' likewise        a = s / sum_t m_t           D = s - s'
 *   pairs (chosen c, rejected r)          h = D_c - D_r
 *   rho_t = exp(l_t - o_t)                A_t: advantage
 *   b: the hyper-parameter beta           sig: the logistic function
 *
 *   dpo             -(1-e) log sig(b h) - e log sig(-b h)                            arXiv:2305.18290 eq. 7
 *   robust          [-(1-e) log sig(b h) + e log sig(-b h)] / (1 - 2e)               arXiv:2403.00409
 *   hinge           max(0, 1 - b h)                                                  arXiv:2305.10425
 *   ipo             (h - 1/(2b))^2, of D divided by the length of each               arXiv:2310.12036 eq. 17
 *   exo_pair        KL((sig(b h), sig(-b h)) || (1-e, e))                            arXiv:2402.00856 eq. 16
 *   nca_pair        -log sig(b Dc) - (log sig(-b Dc) + log sig(-b Dr)) / 2           arXiv:2402.05369
 *   bco_pair        -log sig(b Dc) - log sig(-b Dr)                                  arXiv:2404.04656
 *   sppo_hard       (Dc - 1/(2b))^2 + (Dr + 1/(2b))^2                                arXiv:2405.00675 eq. 4.7
 *   aot             dpo of the sorted s_c - s_r and s'_c - s'_r                      arXiv:2406.05882
 *   aot_unpaired    dpo of the sorted D_c and D_r                                    arXiv:2406.05882
 *   apo_zero        1 - sig(b Dc) + sig(b Dr)                                        arXiv:2408.06266 eq. 7
 *   apo_down        sig(b Dc) + 1 - sig(b h)                                         arXiv:2408.06266 eq. 8
 *   discopop        (1-w) (-log sig(b h)) + w exp(-b h), w = sig(b h / tau)          arXiv:2406.08414 eq. 5
 *   sigmoid_norm    -log sig(b h), of D divided by the length of each
 *   sft             mean of -l_t over the completions of chosen ones
 *   orpo            sft of the whole text of chosen ones - b log sig(odds a_c : a_r) arXiv:2403.07691 eq. 6
 *   cpo             -log sig(b (s_c - s_r)) + cpo_alpha sft                          arXiv:2401.08417 eq. 3
 *   simpo           -log sig(b (a_c - a_r) - gamma)                                  arXiv:2405.14734 eq. 6
 *   kto             good: w (1 - sig(b (D - z))), bad: w' (1 - sig(b (z - D))),
 *                   z = max(0, mean D of mismatched sequences)                       arXiv:2402.01306 eq. 7
 *   apo_zero_unpaired  good: w (1 - sig(b D)), bad: w' sig(b D)
 *   reward          -log sig(v_c - v_r - margin) + center (v_c + v_r)^2, of scores v arXiv:2203.02155 eq. 1
 *
 * and those of policies, from sampled completions.  p is the term of a token, or of a whole
 * sequence:
 *
 *   grpo       p = -min(rho A, clip(rho, 1 - epsilon, 1 + epsilon_high) A) + b KL; mean of each
 *              sequence, then over sequences                                arXiv:2402.03300 eq. 3
 *   bnpo       the same, mean over the tokens of the micro-batch            arXiv:2506.02710
 *   dapo       the same, mean over the tokens of the step                   arXiv:2503.14476 eq. 8
 *   dr_grpo    the same, sum over sequences * max_completion_length         arXiv:2503.20783
 *              (0, the default: the caller sets it, lm_align_bound_length)
 *   luspo      the same, sum of each sequence, mean over sequences          arXiv:2602.05261
 *   gspo       grpo with rho of the sequence: exp(mean_t log rho_t)         arXiv:2507.18071 eq. 5
 *   cispo      p = -min(rho, epsilon_high) A l, rho as a constant; as dapo  arXiv:2506.13585 eq. 4
 *   sapo       p = -4/tau sig(tau (rho - 1)) A; as grpo                     arXiv:2511.20347
 *   vespo      p = -phi(W) A l, W = exp(sum_t log rho_t), phi a constant; as dapo  arXiv:2602.10693
 *   gmpo       p = -exp(mean_t clipped log rho_t) A; mean over sequences    arXiv:2507.20673
 *   rloo       p = -min(W A, clip(W) A); mean over sequences                arXiv:2402.14740
 *   ppo        grpo's p without KL, mean over the tokens of the step, and vf_coef times the mean of
 *              max((v - R)^2, (clip(v, v' -+ cliprange_value) - R)^2) / 2   arXiv:1707.06347
 *   reject     p = -l of the completions that were kept; mean over the tokens of the step  arXiv:2304.06767
 *
 * With use_weighting, the term of a pair is multiplied by the product of exp(mean_t (l_t + C_t)) of
 * both, a constant; C_t is the collision entropy, -log of the sum of the squares of the
 * distribution (WPO, arXiv:2406.11827 eq. 2).  Where collision entropies are unknown, it is not.
 *
 * With entropy_coef c, - c times the mean entropy of the tokens of the step is added to the loss,
 * of those that train.
 *
 * With top_entropy_quantile q, tokens whose entropy is below the (1 - q) quantile of the
 * micro-batch's have only the KL (arXiv:2506.01939).
 *
 * KL of a token is k1 = l - l', k2 = (l - l')^2 / 2 or k3 = exp(l' - l) - 1 + l - l', and with
 * use_bias_correction_kl times rho.
 *
 * Each is a mean: over the pairs or sequences of the step, or its tokens.  A step may have several
 * micro-batches; their losses and derivatives add up to those of the step, because each is divided
 * by the step's counts. Only what couples sequences (kto's z, the sorting of aot, bnpo's tokens) is
 * of the micro-batch. */
#ifndef LM_TUNE_ALIGN_LOSS_H
#define LM_TUNE_ALIGN_LOSS_H

#include <stdbool.h>
#include <stdint.h>

#include "base/hyper.h"
#include "model/model.h"

/* A sequence: a text with a completion.  All arrays are [n], one entry for each token but the first
 * of the text; those marked "NULL" may be absent. */
typedef struct {
    int64_t n;
    const double *logp;
    const double *ref;        /* NULL: the loss reads none */
    const double *old;        /* NULL: logp itself, without derivative */
    const double *sampled;    /* of the sampler, in its own numerics; NULL: old */
    const double *correct;    /* pi_old / pi_sampler, bounded by the caller; NULL: 1 */
    const uint8_t *mask;      /* NULL: all are the completion's */
    const double *entropy;    /* of the distribution of each token, in nats; NULL: unknown */
    const double *collision;  /* -log of the sum of its squares; NULL: unknown */
    const double *advantages; /* NULL: `advantage` for each token */
    double advantage;
    bool good;       /* kto: desirable */
    bool mismatched; /* kto: a completion of another prompt, from which only z is computed */
    double margin;   /* reward, in the chosen one: the least difference wanted */
    double score;    /* reward: what the head gives the sequence */
    const double *value, *old_value, *returns; /* ppo */

    double *dlogp;    /* out: d loss / d l_t, of every entry */
    double *dentropy; /* out: likewise of entropies; NULL: not wanted */
    double *dvalue;   /* out, ppo */
    double dscore;    /* out, reward */
} lm_align_seq;

/* What one step has in all of its micro-batches. */
typedef struct {
    int64_t sequences; /* without mismatched ones; pairs are half of them */
    int64_t tokens;    /* of completions: masks that are not 0 */
    int64_t sft;       /* tokens over which `sft` is the mean: of the chosen ones */
    int64_t sft_whole; /* the same with their prompts, for orpo */
} lm_align_counts;

/* ---- Metrics ---- */

typedef enum { LM_ALIGN_MEAN, LM_ALIGN_LEAST, LM_ALIGN_MOST } lm_align_fold;

typedef struct {
    const char *name; /* TRL's: "rewards/chosen" */
    double sum, weight;
    lm_align_fold fold;
} lm_align_metric;

enum { LM_ALIGN_METRICS = 64 };
typedef struct {
    lm_align_metric item[LM_ALIGN_METRICS];
    int n;
} lm_align_metrics;

/* Add `weight` values with that sum to a mean (LEAST, MOST: fold the one value `sum`).  `name` is
 * borrowed.  NAN and weight 0 are ignored. */
void lm_align_note(lm_align_metrics *m, const char *name, double sum, double weight,
                   lm_align_fold fold);
/* Add the metrics of another micro-batch. */
void lm_align_join(lm_align_metrics *m, const lm_align_metrics *more);
double lm_align_value(const lm_align_metric *m);

/* ---- Losses ---- */

typedef enum {
    LM_ALIGN_PAIRS,    /* sequences 2k and 2k + 1 are the chosen and the rejected one of pair k */
    LM_ALIGN_UNPAIRED, /* with `good` */
    LM_ALIGN_SCORES,   /* pairs with `score`, from a reward head */
    LM_ALIGN_POLICY,   /* sampled, with advantages */
    LM_ALIGN_TEACHER, /* logp is the negative divergence of a token from a teacher's distribution */
} lm_align_kind;

typedef struct {
    const lm_align_counts *counts; /* NULL: those of these sequences */
    lm_align_seq *seq;
    int64_t n;
    double loss; /* out: the share of these sequences in the loss of the step; added to */
    lm_align_metrics *metrics; /* out; NULL: none */
} lm_align_batch;

enum { LM_ALIGN_HYPERS = 16 };

struct lm_align_use;
typedef struct lm_align_loss {
    const char *name, *about;
    const char *paper; /* "arXiv:2305.18290" */
    lm_align_kind kind;
    double rate;                                     /* the usual learning rate of full training */
    const lm_hyper *hyper;                           /* table that ends with a NULL name */
    bool (*reads_ref)(const struct lm_align_use *u); /* NULL: never */
    bool mismatches;                                 /* reads mismatched sequences too */
    bool values; /* reads value, old_value and returns, and gives dvalue */
    bool keeps;  /* only some of the completions are its sequences */
    bool whole;  /* reads log-probabilities of prompts */
    /* LM_EUSAGE for hyper-parameters that do not go together; NULL: none. */
    lm_code (*check)(const struct lm_align_use *u, lm_err *e);
    /* Adds to loss and to the derivatives, which the caller has set to 0.  b->counts is set. */
    lm_code (*run)(const struct lm_align_use *u, lm_align_batch *b, lm_err *e);
} lm_align_loss;

/* All losses; *n their number. */
const lm_align_loss *const *lm_align_losses(int *n);
/* By a name of the table or an alias: sigmoid (dpo), cdpo (dpo with label_smoothing=0.1), gspo
 * (grpo with level= sequence)... NULL: there is none. */
const lm_align_loss *lm_align_find(const char *name);

/* The training objective: a weighted sum of losses of one kind. */
enum { LM_ALIGN_MOST_USES = 4 };
typedef struct lm_align_use {
    const lm_align_loss *loss;
    double weight;
    double hyper[LM_ALIGN_HYPERS]; /* in the order of the table */
} lm_align_use;
typedef struct {
    lm_align_use use[LM_ALIGN_MOST_USES];
    int n;
} lm_align_spec;

/* Read "dpo:beta=0.2+0.5*sft": losses joined by '+', each with a weight in front and
 * hyper-parameters behind. Fails: LM_EUSAGE for an unknown name (with the nearest), key or value,
 * or for losses of different kinds. */
lm_code lm_align_parse(const char *text, lm_align_spec *out, lm_err *e);
/* Set a hyper-parameter of every loss that has it.  Fails: LM_EUSAGE if none has it. */
lm_code lm_align_set(lm_align_spec *s, const char *key, const char *value, lm_err *e);
/* Where a loss divides by the most tokens of a completion, and no number is given, set it: TRL's
 * dr_grpo has that of the run. */
#define LM_ALIGN_LENGTH "max_completion_length"
void lm_align_bound_length(lm_align_spec *s, int64_t most_new);
/* The value of a hyper-parameter of the first loss that has it; otherwise `none`. */
double lm_align_hyper(const lm_align_spec *s, const char *key, double none);
/* As lm_align_parse reads it, with every hyper-parameter: for records and checks of a resumed
 * run. */
lm_code lm_align_show(const lm_align_spec *s, lm_buf *out, lm_err *e);
/* Append a line for each loss, and with `hypers` those of its hyper-parameters. */
lm_code lm_align_list(bool hypers, lm_buf *out, lm_err *e);
/* The same as a JSON list of objects: name, about, paper, learns_from ("pairs", ...), lr, keys; of
 * other names, name and loss. */
lm_code lm_align_list_json(lm_buf *out, lm_err *e);

lm_align_kind lm_align_kind_of(const lm_align_spec *s);
bool lm_align_reads_ref(const lm_align_spec *s);
bool lm_align_mismatches(const lm_align_spec *s);
bool lm_align_whole(const lm_align_spec *s);
bool lm_align_values(const lm_align_spec *s);
bool lm_align_keeps(const lm_align_spec *s);
/* Which entropies of rows the losses read: collision entropies of use_weighting, or (entropy_coef)
 * those whose gradients they give; READ otherwise, for metrics. */
lm_entropy lm_align_entropy(const lm_align_spec *s);

/* The counts of a step are the sums over its micro-batches. */
void lm_align_count(const lm_align_seq *seq, int64_t n, lm_align_counts *add);

/* The loss of b->seq and its derivatives; the fields marked "out" of each sequence are written.
 * Fails: LM_EUSAGE for a number of sequences that the kind does not allow. */
lm_code lm_align_run(const lm_align_spec *s, lm_align_batch *b, lm_err *e);

#endif
