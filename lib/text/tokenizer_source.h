/* SPDX-License-Identifier: Apache-2.0 */
/* tokenizer_source.h -- the tokenizer that comes with a model, in a folder, archive or stream. */
#ifndef LM_TEXT_TOKENIZER_SOURCE_H
#define LM_TEXT_TOKENIZER_SOURCE_H

#include "format/folder.h"
#include "text/tokenizer.h"

/* As lm_tokenizer_load of a folder; *out = NULL (no failure) when the model has no tokenizer.  A
 * stream in which it does not precede the weights is spooled. */
lm_code lm_tokenizer_of(lm_model_source *m, lm_tokenizer **out, lm_err *e);
/* *same: the model's ids denote the tokens of `tok`, or the model has no tokenizer that says
 * otherwise.  Fails as lm_tokenizer_of. */
lm_code lm_tokenizer_is_of(lm_model_source *m, const lm_tokenizer *tok, bool *same, lm_err *e);
/* The texts that lm_tokenizer_of reads, for lm_tokenizer_from_text: tokenizer.json, or one joined
 * from vocab.json and merges.txt, or the bytes of tokenizer.model, spiece.model or vocab.txt; and tokenizer_config.json
 * (empty: there is none), appended to the two texts; *from names the file, NULL: the model has no
 * tokenizer.  Without `spool`, only the files of a stream that precede its weights are read, as by
 * lm_model_source_file_now. */
lm_code lm_tokenizer_text(lm_model_source *m, bool spool, lm_buf *json, lm_buf *config,
                          const char **from, lm_err *e);
enum {
    LM_TOKENIZER_NEEDED = 1, /* a model without tokenizer is an error when no path is given */
    /* the tokenizer at the path must agree with the model: tokenizer_match.h */
    LM_TOKENIZER_CHECKED = 2,
};
/* For tools: the tokenizer at `path`, or that of the model when path is NULL.  LM_EUSAGE when a
 * required one is missing, has more than `vocab` ids, or fails the check against the model. */
lm_code lm_tokenizer_choose(const char *path, lm_model_source *m, int64_t vocab, unsigned how,
                            lm_tokenizer **out, lm_err *e);

#endif
