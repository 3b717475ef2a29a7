/* SPDX-License-Identifier: Apache-2.0 */
/* offline.h -- the objective of a training on given answers: pairs, or answers that are good or
 * bad.
 *
 * A step has `each` records, in the order of a counted permutation (seed, "shuffle", epoch), so
 * that any step is reached without those before it.  The answers of a record lie in one window
 * (texts.h), and so in one micro-batch; a step has as many micro-batches as its answers need.
 * KTO's mismatched answers are those of the next record of the data to the prompt of this one.  The
 * score of a text is that of its last token which is not padding, as Hugging Face's
 * ...ForSequenceClassification reads it. */
#ifndef LM_TUNE_ALIGN_OFFLINE_H
#define LM_TUNE_ALIGN_OFFLINE_H

#include "text/answers.h"
#include "text/tokenizer.h"
#include "train/objective.h"
#include "tune/align/loss.h"

/* All borrowed. */
typedef struct {
    const lm_align_spec *spec;
    const lm_text_answers *train, *val; /* of the spec's kind; val NULL: none */
    int64_t each;                       /* records of a step */
    int64_t vocab;                      /* ids are below it */
    int64_t pad;                        /* of a model with scores; -1: none */
    int64_t seq;                        /* rows of a window */
    uint64_t seed;
    int64_t check; /* micro-batches of an evaluation; 0: all of `val` */
    /* Files of the reference's log-probabilities.  kept: to be read; NULL: they are computed.
     * reference: to be written, unless it is the same; NULL: none. */
    const char *reference, *kept;
    /* Digest [16] of the weights from which the reference is computed
     * (lm_model_source_weights_digest), which a kept one must be of; NULL: not known here, as to a
     * run that trains all weights and is resumed. */
    const uint8_t *weights;
    /* Path of another model that the answers are compared with, of an adapter beside it (NULL:
     * none), and whether it shares the frozen weights (lm_reference_model.shares); `weights` is
     * then not read.  NULL: the model before the first step. */
    const char *reference_model, *reference_adapter;
    bool reference_shares;
    const lm_tokenizer *tokenizer; /* of the model, which must be the reference's */
    lm_sink *sink;
} lm_offline_opts;

typedef struct lm_offline lm_offline;

/* Fails: LM_EUSAGE for a record whose answers do not fit into a window, LM_ELIMIT. */
lm_code lm_offline_new(const lm_offline_opts *o, lm_offline **out, lm_err *e);
void lm_offline_free(lm_offline *x);
/* For lm_trainer_io, as long as x lives. */
const lm_objective *lm_offline_objective(const lm_offline *x);

/* Sequences of a record: 2 of a pair, or of an answer with its mismatched one; else 1. */
int64_t lm_offline_unit(const lm_align_spec *s);
/* Rows of a window that holds any record whose texts have at most `longest` tokens. */
int64_t lm_offline_rows(const lm_align_spec *s, int64_t longest);
int64_t lm_offline_records(const lm_offline *x); /* of the training data */
/* Micro-batches of `batch` windows that the answers of a step need, as a mean. */
double lm_offline_micros(const lm_offline *x, int64_t batch);

#endif
