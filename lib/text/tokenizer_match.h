/* SPDX-License-Identifier: Apache-2.0 */
/* tokenizer_match.h -- checks that a tokenizer, a model and token ids belong together.
 *
 * Ids mean the same to two tokenizers if each id stands for the same token.  So the lists of tokens
 * in the order of their ids are compared.  The bytes of files are not, because each program writes
 * them differently; nor are merges and pre-tokeniser, which decide how a text is cut but not which
 * token an id denotes.  A tokenizer with the tokens of another one and more behind them agrees with
 * it. */
#ifndef LM_TEXT_TOKENIZER_MATCH_H
#define LM_TEXT_TOKENIZER_MATCH_H

#include "format/tokens.h"
#include "text/tokenizer.h"

/* The number of all its ids and their digest, as stored in meta.json. */
lm_tokens_tokenizer lm_tokenizer_identity(const lm_tokenizer *t);

/* The properties of a model that concern token ids; `tok` NULL: it has no tokenizer, or an
 * unsupported one. */
typedef struct {
    const char *name; /* for messages */
    int64_t vocab;
    const lm_tokenizer *tok;
} lm_token_reader;

/* Check that the ids of `data` were made for this model.  Datasets without meta.json pass.  Fails:
 * LM_EUSAGE naming both, when the dataset has more ids than the model or was made with another
 * tokenizer. */
lm_code lm_token_reader_check(const lm_token_reader *r, const lm_tokens *data, lm_err *e);
/* LM_EUSAGE if two datasets name different tokenizers. */
lm_code lm_tokens_check_same(const lm_tokens *a, const lm_tokens *b, lm_err *e);
/* Check that the tokenizer `t` of `path` can replace that of a model.  Fails: LM_EUSAGE naming
 * both, when a common id denotes different tokens, or, for a model without tokenizer, when it has
 * less than nine tenths of the model's ids (models pad their vocabulary by less). */
lm_code lm_token_reader_accepts(const lm_token_reader *r, const lm_tokenizer *t, const char *path,
                                lm_err *e);

#endif
