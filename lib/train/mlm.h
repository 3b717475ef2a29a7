/* SPDX-License-Identifier: Apache-2.0 */
/* mlm.h -- masked language modelling: which tokens of a window are predicted, and what stands in their places (BERT,
 * arXiv:1810.04805, section 3.1).
 *
 * Each token that is not special is chosen with the probability `share`.  Of those chosen 80 % become the mask, 10 % a
 * token drawn from the vocabulary, and 10 % stay; the target of each is the token itself, all other rows have none.
 * Whole words: all pieces of a word are chosen together, by the draw of its first piece in the window, and each is replaced
 * by a draw of its own.
 *
 * Every number is a function of (seed, window, place): masks depend neither on batches nor on what was read before, each
 * epoch has others, and a resumed run has the same ones. */
#ifndef LM_TRAIN_MLM_H
#define LM_TRAIN_MLM_H

#include "text/tokenizer.h"

typedef struct {
    double share;        /* 0: no masked language modelling */
    int64_t mask;        /* the token that replaces most */
    int64_t words;       /* drawn tokens are below it */
    bool whole_words;    /* `kind` says which tokens continue one */
    const uint8_t *kind; /* [words] of LM_MLM_...; NULL: no token is special, and all are words */
} lm_mlm;

enum { LM_MLM_SPECIAL = 1, LM_MLM_CONTINUES = 2 };

/* For the ids of a tokenizer, below `vocab`; share and whole_words are set.  lm_mlm_fini releases it.  Fails: LM_EUSAGE, at
 * `where`, for a tokenizer without a mask token, and for whole words of a model other than WordPiece. */
lm_code lm_mlm_init(lm_mlm *m, const lm_tokenizer *t, int64_t vocab, const char *where, lm_err *e);
void lm_mlm_fini(lm_mlm *m);

/* Choose among tokens[0..n) of window `index`, except those of which trains[i] is 0 (NULL: all may be chosen), replace
 * them, and set targets[0..n): the token, or -1.  Returns the number of targets.  Tokens are not negative. */
int64_t lm_mlm_apply(const lm_mlm *m, uint64_t seed, int64_t index, int64_t n,
                     const uint8_t *trains, int32_t *tokens, int32_t *targets);

#endif
