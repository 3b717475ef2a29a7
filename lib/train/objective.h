/* SPDX-License-Identifier: Apache-2.0 */
/* objective.h -- a loss of a training that the host computes from the log-probabilities of tokens.
 *
 * Without an objective the loss of a step is the mean of -log p over its targets, which the device computes
 * alone. With one, each micro-batch is run in two halves (program.h): forward, which gives -log p of each
 * target; the objective computes from these numbers the derivative of its loss with respect to each; backward
 * begins with them.
 *
 *   begin    what the step consists of: how many micro-batches; here completions are sampled, examples are chosen
 *   fill     the rows of a micro-batch, each call with the next one
 *   grade    its derivatives
 *   finish   the loss of the step
 *   report   metrics of the step's record, if one is written
 *
 * A round is a step of the training, or an evaluation, whose micro-batches are graded without derivatives.  A
 * step must depend only on its number, the weights, and what `save` keeps in checkpoints: a resumed run then
 * repeats it.
 *
 * Ranks that share a training have an objective each, of the same data.  All of them begin and finish a round with the same
 * number of micro-batches and the same loss, and a rank fills and grades those that are its own, perhaps none: what the
 * objective sums over micro-batches it joins in `finish`. */
#ifndef LM_TRAIN_OBJECTIVE_H
#define LM_TRAIN_OBJECTIVE_H

#include "base/json.h"
#include "comm/comm.h"
#include "format/metrics.h"
#include "model/store.h"
#include "train/batch.h"

/* Where the objective's model is.  All borrowed, for the life of the trainer. */
typedef struct {
    lm_backend *backend;
    lm_par *par; /* of the host; NULL: none */
    const lm_config *config;
    const lm_model *model; /* the one that trains */
    const lm_store *store; /* its weights: those of the step that begins */
    lm_exec *exec;         /* the one that trains: between its runs another may use its arena */
    const lm_model *eval;  /* of evaluations, and */
    lm_exec *eval_exec;    /* its executor; NULL: there are none */
    lm_precision precision;
    lm_comm *
        comm; /* of the ranks that share the micro-batches, for collective calls of begin and finish; NULL: one */
    uint64_t seed;
    int64_t batch, seq; /* windows of a micro-batch, and their length */
    int64_t accumulate; /* micro-batches of a step that the user asked for */
} lm_objective_site;

typedef struct {
    int64_t step; /* from 0: steps done before */
    bool val;     /* an evaluation after `step` steps */
} lm_round;

/* Results of a forward half: a number for each row of the micro-batch. */
typedef struct {
    /* -log p of the target; rows without a target have any number.  Of a model with scores: the row's score */
    const float *nll;
    const float *value; /* of the value head; NULL: the model has none */
    /* of the row's distribution, in nats; NULL: not asked for (lm_trainer_opts.entropy); evaluations have collision
     * entropies alone */
    const float *entropy;
} lm_row_results;

/* Derivatives of the step's loss with respect to these, 0 where the target is -1.  value, entropy NULL: it has none. */
typedef struct {
    float *nll, *value, *entropy;
} lm_row_slopes;

typedef struct lm_objective {
    void *ctx;
    /* Once, when the weights are loaded; may be NULL. */
    lm_code (*ready)(void *ctx, const lm_objective_site *site, lm_err *e);
    /* *micros 0: the round has nothing; a step then changes no weight.  -1: lm_stopping() was seen, and the
     * step is not made.  The same on all ranks; where one fails the others fail or have -1, or the failure has ended the
     * group (lm_comm_abort). */
    lm_code (*begin)(void *ctx, const lm_round *r, int64_t *micros, lm_err *e);
    /* tokens, targets, pos, lo and `valid` of b; targets whose log-probability is not read are -1. */
    lm_code (*fill)(void *ctx, const lm_round *r, int64_t micro, lm_batch *b, lm_err *e);
    /* Fill `to`, whose numbers are 0 before the call; NULL in an evaluation. */
    lm_code (*grade)(void *ctx, const lm_round *r, int64_t micro, const lm_batch *b,
                     const lm_row_results *rows, const lm_row_slopes *to, lm_err *e);
    lm_code (*finish)(void *ctx, const lm_round *r, double *loss, lm_err *e);
    /* Add fields to the record of the round that was finished last; may be NULL. */
    void (*report)(void *ctx, const lm_round *r, lm_metrics *m);
    /* What such a training is followed by, where its loss says little: "reward", and its value in the last step; NULL
     * before the first.  May be NULL. */
    const char *(*followed)(void *ctx, double *value);
    /* What the next steps need besides the weights, as JSON for a checkpoint after `step` steps; nothing is
     * appended if they need nothing.  load: the same, after ready; o is borrowed.  Both may be NULL. */
    lm_code (*save)(void *ctx, int64_t step, lm_buf *out, lm_err *e);
    lm_code (*load)(void *ctx, int64_t step, const json_t *o, lm_err *e);
    /* Another one of the same options and data, for a rank on a thread of its own, and its end.  NULL: it serves one rank of a
     * process. */
    lm_code (*twin)(void *ctx, const struct lm_objective **out, lm_err *e);
    void (*drop)(void *ctx);
} lm_objective;

#endif
