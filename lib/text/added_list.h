/* SPDX-License-Identifier: Apache-2.0 */
/* added_list.h -- tokens that were added to a tokenizer that has no tokenizer.json, as the files
 * beside it list them: "added_tokens_decoder" in tokenizer_config.json, or added_tokens.json. */
#ifndef LM_TEXT_ADDED_LIST_H
#define LM_TEXT_ADDED_LIST_H

#include <stdint.h>

#include "base/buf.h"
#include "base/err.h"
#include "base/json.h"

/* The text of an added_tokens.json ({"token": id, ...}) into that of a tokenizer_config.json, which
 * may be empty, as "added_tokens_decoder", unless that is there already.  Fails: LM_EFORMAT. */
lm_code lm_added_list_take(lm_buf *config, const lm_buf *added, const char *where, lm_err *e);

/* An added_tokens_decoder (NULL, null: none): texts under ids, which lie less than 65536 above
 * the `n` of the vocabulary.  Fails: LM_EFORMAT. */
lm_code lm_added_list_check(const json_t *list, int64_t n, const char *where, lm_err *e);

/* Its tokens as members of "added_tokens": those with ids from `from` on, but for `except`.  A
 * list that was checked. */
void lm_added_list_write(lm_jw *w, const json_t *list, int64_t from, int64_t except);

#endif
