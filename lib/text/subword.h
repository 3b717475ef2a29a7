/* SPDX-License-Identifier: Apache-2.0 */
/* subword.h -- the models of one word that need no merges: WordPiece and Unigram.
 *
 * WordPiece (BERT, arXiv:1810.04805): at each position the longest token; behind the beginning of
 * the word tokens carry a prefix ("##").  A word that cannot be cut wholly, or is too long, is the
 * unknown token.
 * Unigram (arXiv:1804.10959): the cut whose sum of log-probabilities is the largest (Viterbi, in
 * f64).  Of equal sums the cut whose last token begins first is kept, at every position, as in
 * `tokenizers`.  A character without a token costs 10 more than the lowest score of the vocabulary;
 * runs of such characters become their bytes' tokens, or one unknown token. */
#ifndef LM_TEXT_SUBWORD_H
#define LM_TEXT_SUBWORD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "text/bpe.h"
#include "text/trie.h"

typedef enum { LM_SUBWORD_NONE, LM_SUBWORD_WORDPIECE, LM_SUBWORD_UNIGRAM } lm_subword_kind;

struct lm_subword {
    lm_subword_kind kind;
    lm_trie trie;      /* all tokens */
    size_t most_chars; /* WordPiece: longer words are unknown */
    char *prefix;      /* WordPiece: of continuing tokens; owned */
    uint32_t inside;   /* WordPiece: the trie's node behind the prefix; LM_TRIE_NONE: none */
    double *score;     /* Unigram: by id */
    double unknown;    /* Unigram: the score of a character without a token */
};

void lm_subword_fini(lm_subword *s);

/* Build the trie from the tokens of `vocab`; with WordPiece, find the node of `prefix`. */
lm_code lm_subword_index(lm_subword *s, const lm_bpe *vocab, const char *prefix, const char *where,
                         lm_err *e);
/* Unigram: the score of characters without a token, from those of all tokens. */
void lm_subword_set_unknown(lm_subword *s, const lm_bpe *vocab);

/* Working memory of one thread; zero-initialise. */
typedef struct {
    struct {
        double score;  /* of the best cut that ends here */
        uint32_t from; /* where its last token begins; LM_TRIE_NONE: none yet */
        uint32_t id;
    } * best;
    size_t cap;
} lm_subword_scratch;
void lm_subword_scratch_fini(lm_subword_scratch *s);

/* The ids of one word, valid UTF-8, to ids[0..*n); there is room for len + 1.  `vocab` gives the
 * unknown token and those of bytes.  Fails: LM_EFORMAT when an unknown token is needed and there is
 * none; LM_ELIMIT for a word of 4 GiB. */
lm_code lm_subword_encode(const lm_subword *s, const lm_bpe *vocab, lm_subword_scratch *w,
                          const char *word, size_t len, uint32_t *ids, size_t *n, lm_err *e);

#endif
