/* SPDX-License-Identifier: Apache-2.0 */
/* texts.h -- texts in the windows of micro-batches, and the log-probabilities of their tokens.
 *
 * A text of n ids takes n - 1 rows of a window of T: row i has id i, and predicts id i + 1.  Texts
 * share a window behind each other, as documents that do not see each other; longer ones come first
 * (best fit decreasing), so that few rows are empty.  The places depend on the lengths and their
 * order alone. */
#ifndef LM_TUNE_ALIGN_TEXTS_H
#define LM_TUNE_ALIGN_TEXTS_H

#include "comm/comm.h"
#include "train/evaluate.h"

/* Ids [n], n >= 2, of which the targets ids[from..n) are wanted, 1 <= from < n. */
typedef struct {
    const uint32_t *ids;
    int64_t n, from;
} lm_align_text;

/* The places of a list of texts.  Zero-initialise. */
typedef struct {
    int64_t seq, windows, n;
    int64_t *window, *row; /* [n] of each text: its window, and its first row in that */
    int64_t *order; /* [n] the texts window by window, as they lie in it; those of window w are */
    int64_t *first; /* [windows + 1] order[first[w]..first[w + 1]) */
} lm_texts;

/* `unit` texts each, 1 or more, lie behind each other in one window; n is a multiple of it.  Fails:
 * LM_EUSAGE for a text without targets, or a unit that does not fit into a window. */
lm_code lm_texts_place(const lm_align_text *text, int64_t n, int64_t unit, int64_t seq,
                       lm_texts *out, lm_err *e);
void lm_texts_fini(lm_texts *t);

/* Fill b, whose length is t->seq, with windows [window, window + b->batch); those behind the last
 * are empty.  Targets that are not wanted are -1.  Fails: LM_EFORMAT for an id that is not below
 * `vocab`. */
lm_code lm_texts_fill(const lm_texts *t, const lm_align_text *text, int64_t window, int64_t vocab,
                      lm_batch *b, lm_err *e);
/* The row in such a batch of text i's first wanted target; -1: the text is in another. */
int64_t lm_texts_row(const lm_texts *t, const lm_align_text *text, int64_t i, int64_t window,
                     int64_t batch);

/* logp[i] [n - from]: natural log of the probability of each wanted target of text i, by the
 * weights that are bound to v (built with `documents`).  Ranks of `c` (NULL: one) have the same texts, divide the windows and
 * get all numbers, which are those of one rank to the bit.  *whole false: lm_stopping() on one of them, and numbers are
 * missing.  Fails as lm_texts_place and lm_texts_fill. */
lm_code lm_texts_score(lm_evaluator *v, lm_comm *c, const lm_align_text *text, int64_t n,
                       double *const *logp, bool *whole, lm_err *e);
/* The same, and value[i] [n - from]: what the value head (lm_build.value) gives the rows that
 * predict them; NULL: not wanted. */
lm_code lm_texts_value(lm_evaluator *v, lm_comm *c, const lm_align_text *text, int64_t n,
                       double *const *logp, double *const *value, bool *whole, lm_err *e);

#endif
