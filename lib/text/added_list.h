/* SPDX-License-Identifier: Apache-2.0 */
/* added_list.h -- tokens that were added to a tokenizer that has no tokenizer.json, as the files
 * beside it list them: "added_tokens_decoder" in tokenizer_config.json, or added_tokens.json. */
#ifndef LM_TEXT_ADDED_LIST_H
#define LM_TEXT_ADDED_LIST_H

#include <stdint.h>

#include "base/buf.h"
#include "base/err.h"
#include "base/json.h"

/* Insert the text of an added_tokens.json ({"token": id, ...}) as "added_tokens_decoder" into that
 * of a tokenizer_config.json, which may be empty, unless it has this key already.  Fails:
 * LM_EFORMAT. */
lm_code lm_added_list_take(lm_buf *config, const lm_buf *added, const char *where, lm_err *e);

/* Check an added_tokens_decoder (NULL, null: none): texts by id; ids are less than n + 65536, with
 * n the size of the vocabulary.  Fails: LM_EFORMAT. */
lm_code lm_added_list_check(const json_t *list, int64_t n, const char *where, lm_err *e);

/* Append its tokens to "added_tokens": those with ids from `from` on, except those in `except`.
 * The list must have been checked. */
void lm_added_list_write(lm_jw *w, const json_t *list, int64_t from, int64_t except);

#endif
