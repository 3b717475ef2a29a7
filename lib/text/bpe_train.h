/* SPDX-License-Identifier: Apache-2.0 */
/* bpe_train.h -- learn a byte-level BPE vocabulary (Sennrich et al., arXiv:1508.07909, over the
 * bytes of words cut by a pattern, as in GPT-2).
 *
 * Count the words of all documents (in parallel, any order), then merge the most frequent pair
 * until the vocabulary is full; among equal counts the pair with the smallest (left id, right id)
 * wins.  Counts have 64 bits.  The result depends on the multiset of words only: not on threads,
 * nor on the order of documents.  Ids: special tokens in the order given, the 256 byte characters
 * sorted by code point, then the merges: those of the `tokenizers` library's BpeTrainer with the
 * ByteLevel alphabet.
 *
 * The same trainer learns the models of subword.h: WordPiece by these merges over characters
 * (wordpiece_train.c), Unigram by expectation maximisation (unigram_train.c). */
#ifndef LM_TEXT_BPE_TRAIN_H
#define LM_TEXT_BPE_TRAIN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/buf.h"
#include "base/err.h"
#include "base/par.h"
#include "base/progress.h"
#include "format/input.h"

typedef enum { LM_TRAIN_BPE, LM_TRAIN_WORDPIECE, LM_TRAIN_UNIGRAM } lm_train_model;

typedef struct {
    lm_train_model model;
    bool cased;                 /* WordPiece: letters keep their case and accents */
    int64_t limit_alphabet;     /* WordPiece: most different characters, 0 = no bound */
    int64_t vocab_size;         /* all counted: specials, 256 bytes, merges */
    int64_t min_frequency;      /* a pair seen less often is never merged; 0 = 1 */
    int64_t max_token_bytes;    /* longest token, 0 = no bound */
    const char *pattern;        /* BPE: a name of pretok_scan.h, or a PCRE2 pattern */
    const char *const *special; /* n_special names, no two equal */
    int n_special;
} lm_bpe_train_opts;

typedef struct {
    int64_t documents, bytes, words, unique_words; /* of the training text */
    int64_t vocab_size, merges; /* reached; less than requested when the text is too small */
} lm_bpe_train_stats;

typedef struct lm_bpe_trainer lm_bpe_trainer;

/* The text of a tokenizer_config.json for the folder of the tokenizer.json: with BPE the
 * first special token begins and ends documents, with the other models special tokens have the
 * meaning of their names in BERT and T5. */
lm_code lm_bpe_train_config(const lm_bpe_train_opts *o, lm_buf *json, lm_err *e);
/* Fails: LM_EUSAGE for a vocabulary smaller than specials + 256, a bad pattern, a bare word that is
 * not the name of a pattern, or equal specials. */
lm_code lm_bpe_trainer_new(const lm_bpe_train_opts *o, int threads, lm_bpe_trainer **out,
                           lm_err *e);
/* Count the words of one document (valid UTF-8).  `worker` in [0, threads): each worker has counts
 * of its own, so calls with different workers may run at the same time.  Special tokens inside the
 * text end a word and are not counted. */
lm_code lm_bpe_trainer_add(lm_bpe_trainer *t, int worker, const char *text, size_t len, lm_err *e);
/* Count the words of every document of a stream, on all threads of par (at most as many as the
 * trainer's).  Fails as lm_input_next and lm_doc_decode do, and with LM_EIO when lm_stopping(). */
lm_code lm_bpe_trainer_feed(lm_bpe_trainer *t, lm_par *par, const lm_input_opts *o, lm_input *in,
                            lm_sink *sink, lm_err *e);
/* Learn, and append the finished tokenizer.json to *json.  Called once.  Merging is serial.  Stops
 * early with LM_EIO when lm_stopping().  Fails: LM_EUSAGE if no word was ever added. */
lm_code lm_bpe_trainer_finish(lm_bpe_trainer *t, lm_sink *sink, lm_buf *json,
                              lm_bpe_train_stats *stats, lm_err *e);
void lm_bpe_trainer_free(lm_bpe_trainer *t);

#endif
