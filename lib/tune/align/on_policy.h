/* SPDX-License-Identifier: Apache-2.0 */
/* on_policy.h -- training on completions that the model samples itself: GRPO and its relatives,
 * RLOO, PPO, online DPO.
 *
 * A generation is a rollout and the steps that learn from it.  It takes the next `prompts` prompts,
 * completes each `group` times with the present weights, rewards the completions and makes
 * advantages of the rewards.  Its prompts are cut into `updates` steps; all of these are made
 * `iterations` times (TRL's steps_per_generation and num_iterations).
 *
 *   loss of policies   every completion is a sequence with an advantage
 *   loss of values     (PPO) each token has a reward: -b log(old / ref), and the last one the completion's more; of
 *                      these and the values of the head, generalised advantages, whitened over the generation, and
 *                      returns (advantage.h).  Each iteration cuts the completions in another order.
 *   loss that keeps    (rejection sampling) of each prompt, the `best` completions with the highest rewards, none below
 *                      `least`, equal ones once, are sequences
 *   loss of pairs      of each prompt, the completions with the best and the worst reward are a pair (online DPO,
 *                      arXiv:2402.04792); a prompt whose rewards are all equal gives none
 *
 * Log-probabilities: `old` are those of the training's graph at the time of the rollout, unless a
 * generation is one step, whose own they then are.  The sampler's kernels add in another order; the
 * ratio old / sampled, bounded, weights the tokens (`correct`), as TRL corrects other engines.
 * `ref` are those of the reference.
 *
 * With `tries`, a prompt whose completions all have one reward, which teaches nothing, is replaced
 * by another one (dynamic sampling, arXiv:2503.14476), that many times at most.  With `kl_target`,
 * b follows the KL of the generations (arXiv:1909.08593): b <- b (1 + clip(KL / target - 1, -+0.2)
 * completions / kl_horizon).
 *
 * The prompts are drawn in a counted order (seed), the completions by (seed, generation, prompt,
 * sample): a resumed run repeats them.
 *
 * Metrics are TRL's: reward, reward_std, rewards/NAME/mean and /std, frac_reward_zero_std,
 * completions/..., sampling/..., objective/... and val/... of PPO, kept/... and resampled/...,
 * beside those of the loss.  Of an evaluation: reward; its loss is the negative mean of rewards. */
#ifndef LM_TUNE_ALIGN_ON_POLICY_H
#define LM_TUNE_ALIGN_ON_POLICY_H

#include "train/objective.h"
#include "tune/align/advantage.h"
#include "tune/align/loss.h"
#include "tune/align/reward.h"
#include "tune/align/rollout.h"
#include "tune/align/samples.h"
#include "tune/align/texts.h"

/* Borrowed. */
typedef struct {
    const uint32_t *ids; /* [n] */
    int64_t n;
    const char *text; /* of it, for rewards and the log */
    size_t len;
    const json_t *record; /* an object: its columns, for rewards */
    const json_t *asked;  /* the prompt as it was given, a string or messages; NULL: text */
} lm_on_policy_prompt;

/* Ratios old / sampled, as TRL's vllm_importance_sampling_mode: of tokens or of whole sequences;
 * bounded, or left out if they are beyond the bounds. */
typedef enum {
    LM_CORRECT_NONE,
    LM_CORRECT_TOKEN_TRUNCATE,
    LM_CORRECT_TOKEN_MASK,
    LM_CORRECT_SEQUENCE_TRUNCATE,
    LM_CORRECT_SEQUENCE_MASK,
} lm_correct;

/* All pointers are borrowed for the life of the objective. */
typedef struct {
    const lm_align_spec *loss;
    lm_reward_set *reward;
    const lm_on_policy_prompt *prompt, *val; /* val NULL: evaluations sample nothing */
    int64_t n_prompts, n_val;
    int64_t prompts, group, updates, iterations; /* of a generation; updates divides prompts */
    lm_advantage_opts advantage;
    bool each; /* several rewards are normalised one by one (lm_advantage_each) */
    lm_correct correct;
    double correct_least, correct_most; /* bounds; TRL: none, which is 0, and 3 */
    /* b of a penalty in the reward: of a completion, b times the sum of log(old / ref) over its
     * tokens (RLOO), or that of each token (PPO). */
    double kl_reward;
    double kl_target;     /* of the sum of log(old / ref) of a completion; 0: b stays as it is */
    double kl_horizon;    /* completions */
    double gamma, lambda; /* of generalised advantages */
    bool whiten_rewards;  /* of tokens, without their mean */
    int64_t best;         /* of a loss that keeps */
    double least;         /* likewise; -INFINITY: any */
    int64_t tries;        /* 0: prompts are not replaced */
    double missing_eos;   /* taken from the reward of a truncated completion */
    double clip_reward;   /* rewards are cut at +- this; 0: not */
    bool mask_truncated;  /* truncated completions do not train */
    lm_rollout_opts rollout;
    const lm_tokenizer *tokenizer;
    const char *reference_model;   /* path of the reference; NULL: none */
    const char *reference_adapter; /* beside it; NULL: none */
    bool reference_shares;         /* lm_reference_model.shares */
    /* Log-probabilities of texts by a reference of the caller, as lm_texts_score; NULL: by
     * reference_model. */
    lm_code (*reference)(void *ctx, const lm_align_text *text, int64_t n, double *const *logp,
                         lm_err *e);
    void *ctx;
    int64_t log_prompts; /* of a generation, whose completions are logged */
    uint64_t seed;
} lm_on_policy_opts;

typedef struct lm_on_policy lm_on_policy;

/* Fails: LM_EUSAGE for numbers that do not go together: a group of one where advantages need
 * several, updates that do not divide the prompts, more prompts than there are, a loss that reads a
 * reference without one. */
lm_code lm_on_policy_new(const lm_on_policy_opts *o, lm_on_policy **out, lm_err *e);
void lm_on_policy_free(lm_on_policy *p);
/* Write a "completion" record for each completion of the first prompts of a generation to m
 * (borrowed; NULL: none). */
void lm_on_policy_log(lm_on_policy *p, lm_metrics *m);
/* Append a record for each completion that was kept, with prompt, completion, reward and step, to
 * the JSONL file m (borrowed; NULL: none). */
void lm_on_policy_samples(lm_on_policy *p, lm_samples *m);
/* False if steps were made and the rewards of none taught anything: all were equal in each group,
 * missing, or of completions that do not train. */
bool lm_on_policy_taught(const lm_on_policy *p);
/* True if the trainer must have a value head (lm_trainer_opts.value). */
bool lm_on_policy_values(const lm_on_policy *p);
/* For the trainer; valid as long as p. */
const lm_objective *lm_on_policy_objective(lm_on_policy *p);
/* Bytes of caches and activations of rollouts, and of the reference's weights, once it is ready. */
size_t lm_on_policy_bytes(const lm_on_policy *p);

#endif
