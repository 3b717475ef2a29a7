/* SPDX-License-Identifier: Apache-2.0 */
/* bpe_learn.h -- the merge loop of BPE training over counted words.  Private to lib/text. */
#ifndef LM_TEXT_BPE_LEARN_H
#define LM_TEXT_BPE_LEARN_H

#include "base/progress.h"
#include "text/bpe.h"
#include "text/bpe_count.h"
#include "text/pretok_scan.h"
#include "text/tokenizer_added.h"

typedef struct {
    uint32_t left, right;
} lm_bpe_pair;

typedef struct {
    lm_bpe vocab; /* specials, byte characters, then merged tokens, in order of id */
    lm_bpe_pair *merges;
    size_t n_merges, cap;
} lm_bpe_learned; /* zero-initialise */

/* l->vocab holds the specials and the byte characters and has room for vocab_size ids.  Merge until
 * it is full or no pair is left with min_count.  max_bytes: longest token, 0 = no bound.  With a
 * prefix, words are characters instead of bytes: those that are not in the vocabulary are left out,
 * and all but the first have the prefix, which merged tokens keep only at their beginning.  Fails:
 * LM_ELIMIT; LM_EIO when lm_stopping(). */
lm_code lm_bpe_learn(lm_bpe_learned *l, const lm_words *words, const char *prefix,
                     int64_t vocab_size, int64_t min_count, int64_t max_bytes, lm_sink *sink,
                     lm_err *e);
/* Append the tokenizer.json.  pattern: the text of the word pattern; scan: its scanner, if it has
 * one. */
lm_code lm_bpe_learned_write(const lm_bpe_learned *l, const lm_added *special, lm_scan_kind scan,
                             const char *pattern, lm_buf *json, lm_err *e);
void lm_bpe_learned_fini(lm_bpe_learned *l);

#endif
