/* SPDX-License-Identifier: Apache-2.0 */
/* targets.h -- the objective of a pretraining as text, "NAME[:key=value,...]": what the rows of a window predict.
 *
 *   clm  the next token
 *   mlm  masked tokens (mlm.h): share, whole_words; next_sentence: of pairs of texts (nsp.h), and which follow each other
 *   span spans of a text that an encoder reads without them (span.h): density, mean */
#ifndef LM_TRAIN_TARGETS_H
#define LM_TRAIN_TARGETS_H

#include "base/err.h"

typedef enum {
    LM_TARGETS_OF_MODEL,
    LM_TARGETS_NEXT,
    LM_TARGETS_MASKED,
    LM_TARGETS_SPANS
} lm_targets_kind;

enum { LM_TARGETS_SHARE, LM_TARGETS_WHOLE_WORDS, LM_TARGETS_NEXT_SENTENCE, LM_TARGETS_KEYS };
enum { LM_TARGETS_DENSITY, LM_TARGETS_MEAN };

typedef struct {
    lm_targets_kind kind;
    double key[LM_TARGETS_KEYS]; /* of the kind; absent ones have their defaults */
} lm_targets;

extern const char *const lm_targets_names[]; /* ended by NULL */

/* An objective with the defaults of its keys. */
void lm_targets_set(lm_targets *t, lm_targets_kind kind);
/* text NULL: the objective that the model was made for.  Fails: LM_EUSAGE. */
lm_code lm_targets_parse(const char *text, lm_targets *out, lm_err *e);

#endif
