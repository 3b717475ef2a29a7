/* SPDX-License-Identifier: Apache-2.0 */
/* on_policy_impl.h -- shared by the files of training on sampled completions: on_policy.c has the
 * steps, on_policy_sample.c makes a generation, on_policy_again.c replaces prompts that teach
 * nothing, on_policy_value.c has rewards of tokens and values, on_policy_choose.c the sequences of
 * a step, on_policy_report.c the metrics.  Private to lib/tune. */
#ifndef LM_TUNE_ALIGN_ON_POLICY_IMPL_H
#define LM_TUNE_ALIGN_ON_POLICY_IMPL_H

#include <math.h>

#include "base/mem.h"
#include "tune/align/on_policy.h"
#include "tune/align/reference_model.h"
#include "tune/align/sums.h"

/* A completion of a generation, in its arena. */
typedef struct {
    lm_align_text text;                   /* with its prompt; from: the first new token */
    int64_t n;                            /* new tokens; arrays are [n] */
    double *sampled, *old, *ref;          /* old, ref: NULL if they are not needed */
    double *value, *advantages, *returns; /* of a loss of values; otherwise NULL */
    double reward, advantage;
    const double *each; /* [rewards] */
    int64_t prompt;     /* index of the prompt */
    const char *completion;
    size_t len;
    bool truncated;
} sampled;

enum { ON_POLICY_REWARDS = 16, ON_POLICY_NAME = 64, ON_POLICY_TRIES = 100 };

struct lm_on_policy {
    lm_on_policy_opts o;
    lm_align_spec loss_spec; /* o.loss, with what depends on the rollout */
    lm_objective objective;
    lm_objective_site site;
    lm_rollout *rollout;
    lm_reward_set *own_reward; /* of a twin; NULL: it is the caller's */
    bool scores;               /* `old` is computed when a generation is made */
    lm_scorer own;
    lm_reference_model reference; /* with o.reference_model */
    bool compares;                /* `ref` is computed */
    lm_metrics *log;
    bool pairs, values, keeps; /* of the loss */
    lm_samples *samples;
    double kl; /* b of the next generation */

    /* The generation. */
    int64_t generation; /* -1: none */
    lm_arena *arena;
    sampled *made; /* [prompts * group] */
    lm_align_metrics of_generation;
    json_t *kept; /* of a checkpoint: names of metrics point into it */
    char name[2 * ON_POLICY_REWARDS][ON_POLICY_NAME]; /* of metrics of rewards */

    /* The step. */
    int64_t step;
    int64_t *member; /* [n_members] of `made`: the sequences of the step, pairs behind each other */
    int64_t n_members;
    lm_align_text *text; /* theirs */
    lm_texts places;
    lm_align_counts counts;
    lm_align_metrics metrics; /* of a micro-batch */
    lm_align_sums sums;
    double val_reward;  /* of the last evaluation */
    bool began, taught; /* steps of this process: any, and any that learns from rewards */

    /* Scratch of a micro-batch: sequences, and an entry for each row. */
    lm_align_seq *seq;
    double *logp, *dlogp, *correct, *entropy, *dentropy, *value, *dvalue;
    bool collides; /* `entropy` has collision entropies */
    uint8_t *none; /* a mask of zeros */
};

static inline bool is_silent(const lm_on_policy *p, const sampled *s)
{
    return (p->o.mask_truncated && s->truncated) || (p->values && isnan(s->reward));
}

static inline int64_t steps_of_generation(const lm_on_policy *p)
{
    return p->o.updates * p->o.iterations;
}

/* ---- on_policy_sample.c ---- */

/* Make generation `g`; *whole false: lm_stopping(). */
lm_code on_policy_sample(lm_on_policy *p, int64_t g, bool *whole, lm_err *e);
/* Sample and reward the validation prompts. */
lm_code on_policy_evaluate(lm_on_policy *p, bool *whole, lm_err *e);
/* Prompt number i of an endless series: each pass over all prompts in an order of its own. */
int64_t on_policy_prompt(const lm_on_policy *p, const char *series, int64_t i);

/* Complete `n` prompts (indices of o.prompt) to out[n * group], and reward them: each [n * group,
 * rewards] and total [n * group] from the arena.  `draw` numbers the draws. */
typedef struct {
    const int64_t *prompt;
    int64_t n, draw;
    sampled *out;
    double *each, *total;
    lm_rollout_stats rollout;
} on_policy_batch;
lm_code on_policy_complete(lm_on_policy *p, on_policy_batch *b, bool *whole, lm_err *e);

/* ---- on_policy_again.c ---- */

/* Replace groups of all[0 .. prompts) whose rewards are all equal, in generation g. */
lm_code on_policy_again(lm_on_policy *p, int64_t g, on_policy_batch *all, bool *whole, lm_err *e);

/* ---- on_policy_value.c ---- */

/* Advantages and returns of the tokens of the generation. */
lm_code on_policy_value(lm_on_policy *p, lm_err *e);
/* Note the KL of the generation, and set b of the next one. */
void on_policy_control(lm_on_policy *p);

/* ---- on_policy_choose.c ---- */

/* Choose the sequences of step k of the generation. */
void on_policy_choose(lm_on_policy *p, int64_t k);
/* The indices in made[] of the completions of a prompt that are kept, in `out` [group]; returns
 * their number. */
int64_t on_policy_kept(const lm_on_policy *p, int64_t prompt, int64_t *out);

/* ---- on_policy_keep.c ---- */

/* lm_objective.save and load. */
lm_code on_policy_save(void *ctx, int64_t step, lm_buf *out, lm_err *e);
lm_code on_policy_load(void *ctx, int64_t step, const json_t *o, lm_err *e);

/* ---- on_policy_report.c ---- */

/* Note a number of the generation. */
void on_policy_note(lm_on_policy *p, const char *name, double x);
void on_policy_measure(lm_on_policy *p, const lm_advantage_stats *rewards, const double *each,
                       const lm_rollout_stats *rollout);
lm_code on_policy_log(lm_on_policy *p, lm_err *e);
void on_policy_report(void *ctx, const lm_round *r, lm_metrics *m);
const char *on_policy_followed(void *ctx, double *value);

#endif
