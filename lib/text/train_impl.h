/* SPDX-License-Identifier: Apache-2.0 */
/* train_impl.h -- the parts of a trainer of vocabularies (bpe_train.h).  Private to lib/text. */
#ifndef LM_TEXT_TRAIN_IMPL_H
#define LM_TEXT_TRAIN_IMPL_H

#include "base/json.h"
#include "text/bpe_learn.h"
#include "text/bpe_train.h"
#include "text/normal.h"
#include "text/pretok_split.h"
#include "text/tokenizer_added.h"

#define LM_TRAIN_PREFIX "##"           /* of WordPiece's continuing tokens */
#define LM_TRAIN_MARK   "\xE2\x96\x81" /* U+2581, a space in Unigram's tokens */

/* The counts of one thread. */
typedef struct {
    lm_words words;
    lm_regex_match *match;
    lm_pieces list, tmp;
    int64_t documents, bytes, n_words;
    lm_pretok_scratch pretok;
    lm_buf normal[2];
} lm_train_worker;

struct lm_bpe_trainer {
    lm_train_model model;
    bool cased;
    int64_t vocab_size, min_frequency, max_token_bytes, limit_alphabet;
    char *pattern; /* the pattern's text, names resolved */
    lm_pretok_cut cut;
    lm_normal *normal; /* WordPiece and Unigram: the steps of their tokenizer.json */
    lm_pretok *pretok;
    lm_added special;
    lm_train_worker *workers;
    int threads;
};

/* The position of a special token in the list, -1 if it was not given. */
int lm_train_special(const lm_bpe_trainer *t, const char *name);

/* wordpiece_train.c, unigram_train.c: learn from the counted words and append the tokenizer.json;
 * *size: tokens, *merges: merges or rounds. */
lm_code lm_wordpiece_train(const lm_bpe_trainer *t, const lm_words *words, lm_sink *sink,
                           lm_buf *json, lm_bpe_train_stats *stats, lm_err *e);
lm_code lm_unigram_train(const lm_bpe_trainer *t, const lm_words *words, lm_sink *sink,
                         lm_buf *json, lm_bpe_train_stats *stats, lm_err *e);

/* subword_write.c: "normalizer" and "pre_tokenizer" of a model as JSON texts. */
const char *lm_subword_normalizer(const lm_bpe_trainer *t);
const char *lm_subword_pretok(const lm_bpe_trainer *t);
/* Append the tokenizer.json but its model, whose value ends what *w has written; then lm_jw_end. */
void lm_subword_write(const lm_bpe_trainer *t, lm_jw *w);

#endif
