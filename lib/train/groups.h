/* SPDX-License-Identifier: Apache-2.0 */
/* groups.h -- which optimiser trains which tensors, from one line of text:
 *
 *   NAME[:key=value,...][;PATTERN[|PATTERN...]=NAME[:key=value,...]]...
 *   muon;embed*|lm_head|*norm*=adamw:lr=3e-4
 *
 * The first one trains what no pattern matches; of the others the first that matches.  A pattern is a glob, in which
 * `*` matches dots, too, of a tensor's published name, or of that without "model." or "transformer." at its
 * beginning and ".weight" at its end.  Keys are the hyper-parameters of the optimiser's table, and lr, the group's
 * own peak rate, and ema, the share that an average of the parameters keeps of itself at each step, which is then
 * evaluated and published in their place (0: none); '-' may stand for '_'. */
#ifndef LM_TRAIN_GROUPS_H
#define LM_TRAIN_GROUPS_H

#include "train/update.h"

enum { LM_GROUPS = 16 };

typedef struct {
    const char *text;             /* borrowed */
    lm_optim_use use[LM_GROUPS];  /* [0]: of what no pattern matches */
    char pattern[LM_GROUPS][256]; /* [0]: "" */
    int n;
} lm_groups;

/* A value for a hyper-parameter of the first optimiser, where it has one of that name. */
typedef struct {
    const char *name; /* NULL: past the last */
    double value;
} lm_hyper_value;

/* given: before the text's own keys.  lr: the run's peak rate, of which groups with an lr of their own take a
 * multiple.  Fails: LM_EUSAGE naming what is unknown or out of range. */
lm_code lm_groups_parse(const char *text, const lm_hyper_value *given, double lr, lm_groups *out,
                        lm_err *e);
/* One optimiser for everything. */
lm_groups lm_groups_of(lm_optim_use use);
/* The group of a tensor. */
int lm_groups_find(const lm_groups *g, const char *tensor);
/* Have two texts the same optimisers for the same patterns, whatever their hyper-parameters are? */
bool lm_groups_same(const char *a, const char *b);

/* The graph of their update for a model that trains, with samples as opts has them; the rest of opts is ignored but
 * for clipping.  Fails: LM_EUSAGE when a group has no tensor. */
lm_code lm_groups_update(const lm_groups *g, const lm_model *m, const lm_update_opts *opts,
                         lm_update **out, lm_err *e);

/* The optimisers with their hyper-parameters, for people; and as JSON. */
lm_code lm_optims_table(lm_buf *out, lm_err *e);
lm_code lm_optims_json(lm_buf *out, lm_err *e);

#endif
