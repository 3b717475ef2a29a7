/* SPDX-License-Identifier: Apache-2.0 */
/* tokenizer_match.h -- do a tokenizer, a model and token ids belong together?
 *
 * Ids mean the same to two tokenizers if each id stands for the same token.  So what is compared is the row
 * of tokens in the order of their ids, not the bytes of a file, which every program writes in another way,
 * and not merges or pre-tokeniser, which decide how a text is cut but not what an id stands for.  A
 * tokenizer that has the tokens of another and more behind them agrees with it. */
#ifndef LM_TEXT_TOKENIZER_MATCH_H
#define LM_TEXT_TOKENIZER_MATCH_H

#include "format/tokens.h"
#include "text/tokenizer.h"

/* XXH3-64 of the tokens 0 to ids-1, each followed by a zero byte (an id without a token is that byte alone);
 * the texts are those of lm_tokenizer_token. */
uint64_t lm_tokenizer_digest(const lm_tokenizer *t, int64_t ids);
/* All its ids and their digest, as meta.json keeps them. */
lm_tokens_tokenizer lm_tokenizer_identity(const lm_tokenizer *t);

/* A model as token ids see it; `tok` NULL: it has no tokenizer, or none that is known here. */
typedef struct {
    const char *name; /* for messages */
    int64_t vocab;
    const lm_tokenizer *tok;
} lm_token_reader;

/* Were the ids of `data` made for this model?  Datasets without meta.json pass.  Fails: LM_EUSAGE naming
 * both, when the dataset has more ids than the model or was made with another tokenizer. */
lm_code lm_token_reader_check(const lm_token_reader *r, const lm_tokens *data, lm_err *e);
/* Do two datasets come from one tokenizer, as far as both say so?  LM_EUSAGE otherwise. */
lm_code lm_tokens_check_same(const lm_tokens *a, const lm_tokens *b, lm_err *e);
/* May the tokenizer `t` of `path` serve a model in place of its own?  Fails: LM_EUSAGE naming both, when it
 * has other tokens than the model's own for the ids of both, or, where the model has none, less than nine
 * tenths of the model's ids (models pad their vocabulary, but not as much). */
lm_code lm_token_reader_accepts(const lm_token_reader *r, const lm_tokenizer *t, const char *path,
                                lm_err *e);

#endif
