/* SPDX-License-Identifier: Apache-2.0 */
/* reward_impl.h -- shared by the files of the rewards: reward.c holds the set, reward_number.c
 * compares answers, reward_form.c judges form and length.  Private to lib/tune. */
#ifndef LM_TUNE_ALIGN_REWARD_IMPL_H
#define LM_TUNE_ALIGN_REWARD_IMPL_H

#include "base/hyper.h"
#include "text/pretok_regex.h"
#include "tune/align/reward.h"
#include "tune/align/reward_command.h"
#include "tune/align/reward_model.h"

enum { REWARD_KEYS = 4, REWARD_COLUMN = 64 };

typedef struct reward {
    const struct reward_kind *kind;
    char name[40];
    double weight;
    double key[REWARD_KEYS];    /* values of the kind's table */
    char column[REWARD_COLUMN]; /* "": the usual ones */
    lm_regex *regex;
    lm_regex_match *match;
    lm_reward_command *command;
    lm_reward_model *model;
    lm_buf clean; /* scratch: a text without bytes that are not UTF-8 */
} reward;

typedef struct reward_kind {
    const char *name, *about;
    const lm_hyper *keys; /* NULL: none */
    bool column;          /* it reads a column of the record */
    bool text;            /* all behind the colon is one text: a pattern, a command */
    lm_code (*score)(reward *r, const lm_reward_item *item, double *out, lm_err *e);
    /* Or of all items at once, opened from the text behind the colon. */
    lm_code (*open)(reward *r, const char *text, const lm_reward_opts *o, lm_err *e);
    lm_code (*score_all)(reward *r, const lm_reward_item *item, int64_t n, double *out, lm_err *e);
} reward_kind;

/* ---- reward_number.c ---- */

/* The number of a text (reward.h); false: it has none. */
bool reward_number(const char *text, size_t len, double *out);
lm_code reward_gsm8k(reward *r, const lm_reward_item *item, double *out, lm_err *e);
lm_code reward_exact(reward *r, const lm_reward_item *item, double *out, lm_err *e);

/* ---- reward_form.c ---- */

lm_code reward_regex(reward *r, const lm_reward_item *item, double *out, lm_err *e);
lm_code reward_think(reward *r, const lm_reward_item *item, double *out, lm_err *e);
lm_code reward_tags(reward *r, const lm_reward_item *item, double *out, lm_err *e);
lm_code reward_length(reward *r, const lm_reward_item *item, double *out, lm_err *e);
lm_code reward_overlong(reward *r, const lm_reward_item *item, double *out, lm_err *e);
lm_code reward_repetition(reward *r, const lm_reward_item *item, double *out, lm_err *e);
extern const lm_hyper reward_length_keys[], reward_overlong_keys[], reward_repetition_keys[];

#endif
