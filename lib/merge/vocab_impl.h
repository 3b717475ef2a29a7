/* SPDX-License-Identifier: Apache-2.0 */
/* vocab_impl.h -- the parts of a merged vocabulary; for lib/merge/vocab*.c only.
 * Private to lib/merge. */
#ifndef LM_MERGE_VOCAB_IMPL_H
#define LM_MERGE_VOCAB_IMPL_H

#include "merge/vocab.h"

enum {
    LM_ROW_ZERO = -1,
    LM_ROW_MEAN = -2,  /* of the models that have the token */
    LM_ROW_BLANK = -3, /* no token: the mean of all rows with one */
};

struct lm_vocab {
    const lm_vocab_model *model;
    int n, base; /* base: -1: none */
    bool same;
    int owner;
    int64_t rows;
    const lm_tokenizer *tok; /* of the result */
    lm_tokenizer *own;       /* the same, if it was made here */
    int32_t **map;           /* [n][rows]: the model's row of each token, -1: missing */
    int32_t *from;           /* [rows] the model whose row is used instead, or LM_ROW_* */
    int32_t *from_row;       /* [rows] and its row */
    bool *force;             /* [rows] also where the model has the token */
};

/* vocab_union.c: the tokenizer of model `first` with the tokens of `all` models (or only its own)
 * and those of the rules.  *out NULL: no token was missing. */
lm_code lm_vocab_unite(const lm_vocab_spec *spec, const lm_vocab_model *model, int n, int first,
                       bool all, lm_sink *sink, lm_tokenizer **out, lm_err *e);
/* Warn when two tokenizers with the same tokens split text differently. */
lm_code lm_vocab_warn_of_splits(const lm_vocab_model *first, const lm_vocab_model *other,
                                lm_sink *sink, lm_err *e);

#endif
