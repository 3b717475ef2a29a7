/* SPDX-License-Identifier: Apache-2.0 */
/* gguf_words.h -- vocabularies without merges in GGUF: tokenizer.ggml.model "t5", of Unigram, and "bert", of WordPiece.
 *
 * "t5" has log-probabilities as scores, and SentencePiece's compiled map of characters as bytes.  "bert" has no mark in
 * tokens that continue a word ("##" here): those that begin one have U+2581 in front, but for control tokens.
 * Private to lib/convert. */
#ifndef LM_CONVERT_GGUF_WORDS_H
#define LM_CONVERT_GGUF_WORDS_H

#include "convert/gguf_meta.h"
#include "text/scored.h"

typedef struct {
    lm_gguf_plan *p;
    lm_sink *sink;
    const char *where;
    const json_t *rest; /* tokenizer.json without its vocabulary */
    lm_gguf_text *text; /* [n], and likewise: */
    int32_t *type;
    const float *score;
    size_t n;
} lm_gguf_words;

/* Model, tokens and steps.  Fails: LM_EFORMAT for a map of characters that is not base 64. */
lm_code lm_gguf_put_unigram(const lm_gguf_words *w, lm_err *e);
/* The texts become those of GGUF.  types: kinds of tokens of the model, 0: none. */
lm_code lm_gguf_put_wordpiece(lm_gguf_words *w, int64_t types, lm_err *e);

/* A tokenizer.json, appended to *json.  Fails: LM_EFORMAT naming a key, LM_EUSAGE. */
lm_code lm_gguf_get_unigram(const lm_gguf *g, lm_scored_vocab *v, lm_buf *json, lm_err *e);
/* The same; config: a tokenizer_config.json, appended too. */
lm_code lm_gguf_get_wordpiece(const lm_gguf *g, const lm_scored_vocab *v, lm_buf *json,
                              lm_buf *config, lm_err *e);

#endif
