/* SPDX-License-Identifier: Apache-2.0 */
/* reward.h -- rewards of completions: rules that are computed here, and programs that answer
 * through a pipe.
 *
 * A set holds several rewards with weights.  Each gives a completion a number, or NAN: it does not apply, as
 * TRL's None.
 * The total is the weighted sum of those that apply; NAN if none does.  Rewards written as "NAME" or
 * "NAME:key=value,...":
 *
 *   gsm8k       1 if the number of the completion equals the reference's, else 0
 *   exact       1 if the completion without white space around it equals the reference
 *   regex       1 if the pattern is found in the completion: "regex:PATTERN" (PCRE2; all behind the colon)
 *   think       1 for <think> at the beginning, one </think> later, and no second <think>
 *   tags        1 for <think>...</think><answer>...</answer> and nothing else but white space
 *   length      -cost for each token over `target`
 *   overlong    0 up to most - soft tokens, falling to -1 at `most` and beyond (arXiv:2503.14476 eq. 13)
 *   repetition  penalty times the share of n-grams of tokens that occurred before (arXiv:2502.03373 C.2)
 *   command     "command:PROGRAM": the shell command's answers (reward_command.h)
 *   model       "model:MODEL" or "model:MODEL+ADAPTER": the score of a reward model (reward_model.h)
 *
 * The number of a text is behind the last "####", else in the last \boxed{}, else in the last
 * <answer>, else the last of the text.  Thousands separators, currency signs and trailing zeros do
 * not count.
 *
 * The reference is the record's "answer", else "solution", "target", "ground_truth" or
 * "completion"; "gsm8k:column=NAME" names another. */
#ifndef LM_TUNE_ALIGN_REWARD_H
#define LM_TUNE_ALIGN_REWARD_H

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/buf.h"
#include "base/err.h"
#include "text/tokenizer.h"
#include "train/objective.h"

/* A completion to be rewarded.  All borrowed. */
typedef struct {
    const char *prompt, *text; /* any bytes: what is not UTF-8 counts as U+FFFD */
    size_t prompt_len, text_len;
    const uint32_t *ids; /* its tokens; for length, overlong and repetition */
    int64_t n;
    const uint32_t *whole; /* [n_whole] tokens of prompt and completion; for models */
    int64_t n_whole;
    bool truncated;       /* it did not end by itself */
    const json_t *record; /* object: the columns of the prompt's record; may be NULL */
} lm_reward_item;

typedef struct {
    int64_t most_new; /* tokens of a completion, at most: the default of overlong's `most` */
    const lm_tokenizer *tokenizer; /* of completions, for models; NULL: there are none */
    double timeout;                /* seconds that a command may take for its next answer; 0: 60 */
} lm_reward_opts;

/* Squares of such rewards, and sums of these, are far from the end of F64; advantages of them are
 * F32. */
#define LM_REWARD_MOST 1e30

typedef struct lm_reward_set lm_reward_set;

/* `spec` and `weight`: n texts and numbers; weight NULL: all 1.  Starts the commands.  Fails:
 * LM_EUSAGE for an unknown name (with the nearest), key or value, or a bad pattern; LM_EIO for a
 * command that cannot be started. */
lm_code lm_reward_open(const char *const *spec, const double *weight, int n,
                       const lm_reward_opts *o, lm_reward_set **out, lm_err *e);
/* Ends the commands: they see the end of their input, and are killed if they do not end. */
void lm_reward_close(lm_reward_set *s);

/* Another set of the same rewards, with commands and models of its own, for a rank on another thread.  Fails as
 * lm_reward_open. */
lm_code lm_reward_twin(const lm_reward_set *s, lm_reward_set **out, lm_err *e);

/* Before the first score: load the models, beside the one that trains, and take the ranks that divide the work. */
lm_code lm_reward_ready(lm_reward_set *s, const lm_objective_site *site, lm_err *e);
/* What these take beside a training of `train` whose arena has `arena` bytes. */
lm_code lm_reward_bytes(const lm_reward_set *s, const lm_model *train, size_t arena, size_t *bytes,
                        lm_err *e);

int lm_reward_count(const lm_reward_set *s);
/* For metrics: "gsm8k"; a second of the same name is "gsm8k_2". */
const char *lm_reward_name(const lm_reward_set *s, int i);
double lm_reward_weight(const lm_reward_set *s, int i);

/* each [n, count] (may be NULL) and total [n] of n items.  Ranks have the same items, divide them and get all rewards.
 * *whole false, with all of them NAN: lm_stopping() on a rank, or another rank has failed.
 * Fails: LM_EFORMAT for a record without the column, or an answer of a command that is not a number, LM_EIO
 * for a command that ends, does not answer in time, or answers too many or too few lines; LM_EFORMAT for a reward or a
 * sum above LM_REWARD_MOST in magnitude; LM_ENUMERIC for a model's score that is not a number.  A set that failed cannot
 * be used again. */
lm_code lm_reward_score(lm_reward_set *s, const lm_reward_item *item, int64_t n, double *each,
                        double *total, bool *whole, lm_err *e);
/* True after such a failure, about which the other ranks know. */
bool lm_reward_failed(const lm_reward_set *s);

/* Append a line for each reward and its keys, for --help and manuals. */
lm_code lm_reward_list(lm_buf *out, lm_err *e);
/* The same as a JSON list of objects: name, about, column, keys. */
lm_code lm_reward_list_json(lm_buf *out, lm_err *e);

#endif
