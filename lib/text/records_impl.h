/* SPDX-License-Identifier: Apache-2.0 */
/* records_impl.h -- shared by records.c, which chooses the form, and records_forms.c, which reads
 * the forms that are not messages of themselves.  Private to lib/text. */
#ifndef LM_TEXT_RECORDS_IMPL_H
#define LM_TEXT_RECORDS_IMPL_H

#include "text/records.h"

/* A value of the object under `key`: *out is borrowed, NULL when absent or null. */
json_t *record_get(const json_t *o, const char *key);
/* LM_EFORMAT: the key's value is not `wanted` ("a string", ...). */
lm_code record_fail_type(const char *where, const char *key, const char *wanted, lm_err *e);
/* Check that the value is a string, or an array of messages (objects with a string "role"), not
 * empty. */
lm_code record_check(const json_t *v, const char *where, const char *key, lm_err *e);

/* Give the columns of the object o their names in `m`. */
lm_code record_rename(const lm_text_record_map *m, json_t *o, const char *where, lm_err *e);

/* {"role": role, "content": content}; content is borrowed. */
lm_code record_message(const char *role, json_t *content, json_t **out, lm_err *e);
lm_code record_append(json_t *list, json_t *taken, lm_err *e);

/* The object has "conversations" or "instruction".  Fills all members of r that the form has. */
lm_code record_sharegpt(const json_t *o, const char *where, lm_text_record *r, lm_err *e);
lm_code record_alpaca(const json_t *o, const char *where, lm_text_record *r, lm_err *e);
/* Move the last message of *list to *last, an array of its own.  Fails when fewer than two are
 * there. */
lm_code record_split_last(json_t **list, json_t **last, const char *where, lm_err *e);

#endif
