/* SPDX-License-Identifier: Apache-2.0 */
/* tokenizer_source.h -- the tokenizer that comes with a model, wherever the model lies. */
#ifndef LM_TEXT_TOKENIZER_SOURCE_H
#define LM_TEXT_TOKENIZER_SOURCE_H

#include "format/folder.h"
#include "text/tokenizer.h"

/* As lm_tokenizer_load of a folder; *out = NULL (no failure) when the model has no tokenizer.  A
 * stream that did not bring it before its weights is spooled. */
lm_code lm_tokenizer_of(lm_model_source *m, lm_tokenizer **out, lm_err *e);
/* What lm_tokenizer_of reads, for lm_tokenizer_from_text: tokenizer.json, or one joined from
 * vocab.json and merges.txt, or the bytes of tokenizer.model; and tokenizer_config.json (empty: there is none), appended to the two; *from names the file, NULL:
 * the model has no tokenizer.  Without `spool`, of a stream only what came before its weights, as
 * lm_model_source_file_now. */
lm_code lm_tokenizer_text(lm_model_source *m, bool spool, lm_buf *json, lm_buf *config,
                          const char **from, lm_err *e);
enum {
    LM_TOKENIZER_NEEDED = 1,  /* a model without one is a failure when no path is given */
    LM_TOKENIZER_CHECKED = 2, /* the one at the path must agree with the model: tokenizer_match.h */
};
/* For a tool: the tokenizer at `path`, or that of the model when path is NULL.  LM_EUSAGE when there
 * is none but one is needed, for one with more than `vocab` ids, and for one that is checked and does
 * not belong to the model. */
lm_code lm_tokenizer_choose(const char *path, lm_model_source *m, int64_t vocab, unsigned how,
                            lm_tokenizer **out, lm_err *e);

#endif
