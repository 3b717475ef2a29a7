/* SPDX-License-Identifier: Apache-2.0 */
/* score.h -- the loss of given token sequences: each token once, with the context that the stride
 * allows.
 *
 * A sequence of n ids is cut into windows of T+1 that begin every `stride` ids (the strided
 * evaluation of huggingface.co/docs/transformers/perplexity): the first scores all its targets,
 * each later one those that no earlier window has scored, so that every target except the first T
 * has at least T - stride + 1 ids of context.  Windows of many sequences share a row of the batch,
 * separated by `lo`; a batch runs when it is full.
 *
 * With an adapter of V virtual tokens (lm_scorer_virtual), each window begins with them and has T - V positions for
 * ids.  Virtual tokens are never targets, as in PEFT, whose labels are -100 there; behind prompts, the first id of a
 * sequence is one, because the state of the last virtual token predicts it. */
#ifndef LM_TRAIN_SCORE_H
#define LM_TRAIN_SCORE_H

#include "train/evaluate.h"
#include "train/mlm.h"

/* Sums over any number of sequences. */
typedef struct {
    double nll; /* natural log */
    int64_t tokens, bytes;
} lm_score;

typedef struct lm_scorer lm_scorer;

/* The evaluator (built with `documents`, and for lm_scorer_masked alone of a bidirectional model: LM_EUSAGE) and `id_bytes`
 * ([vocab]: bytes of text of each id; NULL: bytes are not counted) are borrowed.  1 <= stride <= T of the evaluator. */
lm_code lm_scorer_new(lm_evaluator *v, int64_t stride, const uint32_t *id_bytes, lm_scorer **out,
                      lm_err *e);
void lm_scorer_free(lm_scorer *s);
/* The same for masked language modelling: windows of T ids that begin every T, and the targets are the tokens that the seed 0
 * and the number of the window among all choose.  m is borrowed. */
lm_code lm_scorer_masked(lm_evaluator *v, const lm_mlm *m, const uint32_t *id_bytes,
                         lm_scorer **out, lm_err *e);
/* Before the first sequence: `n` virtual tokens, ids from the vocabulary on, begin each window; `first`: they predict the first
 * id of a sequence.  Fails: LM_EUSAGE unless n + stride <= T. */
lm_code lm_scorer_virtual(lm_scorer *s, int64_t n, bool first, lm_err *e);

/* Score the targets ids[from..n), from >= 1 (0 is taken as 1, unless virtual tokens predict the first id).  Their
 * results are in *to after lm_scorer_flush at the latest; *to must remain valid until then.  Ids
 * are below the vocabulary: LM_EFORMAT. */
lm_code lm_scorer_add(lm_scorer *s, const uint32_t *ids, int64_t n, int64_t from, lm_score *to,
                      lm_err *e);
/* The same for ids [at, at + n) of a dataset, read a window at a time. */
lm_code lm_scorer_add_tokens(lm_scorer *s, const lm_tokens *t, int64_t at, int64_t n, lm_score *to,
                             lm_err *e);
lm_code lm_scorer_flush(lm_scorer *s, lm_err *e);

#endif
