/* SPDX-License-Identifier: Apache-2.0 */
/* vocab.h -- models whose tokenizers differ: one vocabulary for the merged model, to which each
 * model's embeddings are mapped.
 *
 * Two models agree when every id denotes the same token and their embeddings have the same number of rows.  When they do
 * not, a policy must be given:
 *   union   all tokens: those of the base (otherwise of the first model) keep their ids, the
 *           others follow in the order of the models and of their ids.  Merges of the base come
 *           first in their order, then those of each model that are new, in theirs.
 *   base    the base's tokenizer, byte for byte; tokens that it lacks are dropped
 *   a model the same with the tokenizer of that model
 *
 * Output row t of model m is m's own row of that token.  If m lacks the token, the row comes from
 *   1. the rule given for the token, if any: a model's row, another token's row, or zeros;
 *   2. the only model that has the token;
 *   3. the base, if it has it;
 *   4. the mean over all models that have it;
 *   5. zeros, if no model has it (a token that a rule adds without a source; reported as a warning).
 * A rule with `force` applies to models that have the token as well.  Rows without a token (padding,
 * holes in the ids) get the mean of the rows with one.  These are mergekit's rules
 * (mergekit/tokenizer/embed.py); the differences: rows are remapped by index, with the memory of one table, and merges
 * of the other models are kept, so that their tokens can be reached. */
#ifndef LM_MERGE_VOCAB_H
#define LM_MERGE_VOCAB_H

#include <stdbool.h>
#include <stdint.h>

#include "base/buf.h"
#include "base/err.h"
#include "base/json.h"
#include "base/par.h"
#include "base/progress.h"
#include "numeric/dtype.h"
#include "text/tokenizer.h"

typedef enum {
    LM_VOCAB_STRICT, /* no policy: a mismatch is LM_EUSAGE */
    LM_VOCAB_UNION,
    LM_VOCAB_BASE,
    LM_VOCAB_MODEL,
} lm_vocab_policy;

/* The source of a token's embedding. */
typedef struct {
    const char *token; /* as in the vocabulary; added if it is missing */
    enum { LM_VOCAB_FROM_DEFAULT, LM_VOCAB_FROM_MODEL, LM_VOCAB_FROM_ZERO } from;
    const char *model;  /* FROM_MODEL: an lm_vocab_model.name */
    const char *source; /* FROM_MODEL: the token whose row it is; NULL: see source_id */
    int64_t source_id;  /* FROM_MODEL, source NULL: its id; -1: the token's own */
    bool force;
} lm_vocab_rule;

typedef struct {
    lm_vocab_policy policy;
    const char *model; /* LM_VOCAB_MODEL: an lm_vocab_model.name */
    const lm_vocab_rule *rules;
    int n_rules;
    int64_t pad_to; /* round the number of rows up to a multiple of this; 0: no rounding */
} lm_vocab_spec;    /* all zero: strict; rules or pad_to without a policy: union */

typedef struct {
    const char *name;        /* its path, as given */
    const lm_tokenizer *tok; /* NULL: none */
    int64_t rows;            /* of its embedding */
} lm_vocab_model;

typedef struct lm_vocab lm_vocab;

/* Compare the tokenizers and make the merged vocabulary.  `base`: index of the base, -1: none.
 * Everything is borrowed until lm_vocab_free.  Fails: LM_EUSAGE for a mismatch without a policy
 * (with the number of different tokens and some of them), a model without tokenizer where one is
 * needed, LM_VOCAB_BASE without a base, an unknown model in spec or a rule, a rule's missing
 * source, tokenizers of different kinds that cannot be united (byte-level with byte-fallback);
 * LM_EFORMAT, LM_ELIMIT.  Other differences between united tokenizers (normaliser, pre-tokeniser,
 * ...) are reported as warnings: the first one's part is used. */
lm_code lm_vocab_new(const lm_vocab_spec *spec, const lm_vocab_model *model, int n, int base,
                     lm_sink *sink, lm_vocab **out, lm_err *e);
void lm_vocab_free(lm_vocab *v);

/* True if all agree: embeddings are then merged like other tensors. */
bool lm_vocab_same(const lm_vocab *v);
/* Rows of the merged embedding and head. */
int64_t lm_vocab_rows(const lm_vocab *v);
/* True for a tensor that has a row for each token: embedding and head of the architectures of
 * lib/model ("model.embed_tokens.weight", "lm_head.weight", "lm_head.bias", "wte.weight", with or
 * without prefix). */
bool lm_vocab_is_table(const char *tensor);

/* The model whose tokenizer files are copied to the output; -1: those of the union, which are
 * lm_vocab_json and lm_vocab_config_json (NULL: none). */
int lm_vocab_owner(const lm_vocab *v);
const lm_tokenizer *lm_vocab_tokenizer(const lm_vocab *v); /* of the result; NULL: none */
const char *lm_vocab_json(const lm_vocab *v, size_t *len);
const char *lm_vocab_config_json(const lm_vocab *v, size_t *len);

/* config.json or generation_config.json of model `of`, changed in place for the merged vocabulary:
 * vocab_size (if present), bos, eos and pad ids by their tokens.  An id whose token was dropped
 * becomes null. */
lm_code lm_vocab_fix_config(const lm_vocab *v, int of, json_t *config, lm_err *e);

/* One table of each model, as stored in its file: [rows, cols], C order. */
typedef struct {
    const void *data; /* NULL: this model has no such tensor (a tied head) */
    lm_dtype dtype;
    int64_t rows;
} lm_vocab_table;
/* The table of model m in the merged vocabulary: out [lm_vocab_rows, cols] in `dtype`, its own rows
 * bit for bit when that is the table's dtype, means rounded once.  `t`: all models' tables, NULL
 * data are allowed for all except m (the table is then not a source: the next rule applies).
 * Fails: LM_EFORMAT when a table has fewer rows than its tokenizer has ids. */
lm_code lm_vocab_operand(const lm_vocab *v, int m, const lm_vocab_table *t, int64_t cols,
                         const char *tensor, lm_dtype dtype, void *out, lm_par *par, lm_err *e);

#endif
