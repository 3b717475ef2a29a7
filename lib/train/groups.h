/* SPDX-License-Identifier: Apache-2.0 */
/* groups.h -- assigns optimisers to tensors, by one line of text:
 *
 *   NAME[:key=value,...][;PATTERN[|PATTERN...]=NAME[:key=value,...]]...
 *   muon;embed*|lm_head|*norm*=adamw:lr=3e-4
 *
 * The first one trains the tensors that no pattern matches; of the others the first match is used.
 * A pattern is a glob of any case, in which `*` also matches dots.  It is matched with a tensor's
 * published name, and with that name without a leading "model." or "transformer." and a trailing
 * ".weight".  The words embed, head, norm and bias are the tensors of that part in any model: tables
 * of tokens and positions, the output head that is not one of them, norms, and all other biases.
 * Keys are the hyper-parameters of the optimiser's table, and lr, the group's own peak rate, and
 * ema, the decay of an average of the parameters, which is then evaluated and published instead of
 * them (0: none); '-' is read as '_'. */
#ifndef LM_TRAIN_GROUPS_H
#define LM_TRAIN_GROUPS_H

#include "train/update.h"

enum { LM_GROUPS = 16 };

typedef struct {
    const char *text;             /* borrowed */
    lm_optim_use use[LM_GROUPS];  /* [0]: of what no pattern matches */
    char pattern[LM_GROUPS][256]; /* [0]: "" */
    int n;
    double lr; /* the run's peak rate */
} lm_groups;

/* A value for a hyper-parameter of the first optimiser, if it has one of that name. */
typedef struct {
    const char *name; /* NULL: past the last */
    double value;
} lm_hyper_value;

/* given: applied before the text's own keys.  lr: the run's peak rate, and that of each group without an lr
 * of its own; < 0: the run has the rate of the first optimiser's entry, and each group that of its own
 * optimiser's.  Rates of groups are multiples of the run's.  Fails: LM_EUSAGE naming what is unknown or out
 * of range. */
lm_code lm_groups_parse(const char *text, const lm_hyper_value *given, double lr, lm_groups *out,
                        lm_err *e);
/* One optimiser for everything. */
lm_groups lm_groups_of(lm_optim_use use);
/* True if one of the patterns, separated by '|', matches a tensor of a model: its published name, or a word for its part. */
bool lm_groups_match(const char *patterns, const char *name, lm_part part, bool bias);
/* True if two texts have the same optimisers for the same patterns, in any case and with any
 * hyper-parameters. */
bool lm_groups_same(const char *a, const char *b);

/* The graph of their update for a model that trains, with samples as opts has them; the rest of
 * opts is ignored except clipping.  Fails: LM_EUSAGE when a group has no tensor. */
lm_code lm_groups_update(const lm_groups *g, const lm_model *m, const lm_update_opts *opts,
                         lm_update **out, lm_err *e);

/* The optimisers with their hyper-parameters, as text; and as JSON. */
lm_code lm_optims_table(lm_buf *out, lm_err *e);
lm_code lm_optims_json(lm_buf *out, lm_err *e);

#endif
