/* SPDX-License-Identifier: Apache-2.0 */
/* list.h -- lists of the methods and policies with their keys. */
#ifndef LM_KV_LIST_H
#define LM_KV_LIST_H

#include "base/buf.h"

/* Names of all methods and policies, then second names; NULL-terminated. */
extern const char *const lm_kv_names[];

/* As text, one line for a method and one for each of its keys; then the second names. */
lm_code lm_kv_methods_table(lm_buf *out, lm_err *e);
/* {"methods": {NAME: {"about", "file", "hyper"}}, "policies": the same, "names": {SECOND NAME: "METHOD:KEYS"}} */
lm_code lm_kv_methods_json(lm_buf *out, lm_err *e);

#endif
