/* SPDX-License-Identifier: Apache-2.0 */
/* list.h -- lists of the methods and policies with their keys. */
#ifndef LM_KV_LIST_H
#define LM_KV_LIST_H

#include <stdbool.h>

#include "base/buf.h"

/* Names of all methods and policies, then second names; NULL-terminated. */
extern const char *const lm_kv_names[];
/* The same for files: without policies, with LM_KV_CACHEGEN. */
extern const char *const lm_kv_file_names[];
#define LM_KV_CACHEGEN \
    "cachegen" /* codes whole files (cachegen.h), so that kv/spec.h does not have it */

/* As text, one line for a method and one for each of its keys; then the second names.  files: with
 * LM_KV_CACHEGEN. */
lm_code lm_kv_methods_table(bool files, lm_buf *out, lm_err *e);
/* {"methods": {NAME: {"about", "file", "hyper"}}, "policies": the same, "names": {SECOND NAME:
 * "METHOD:KEYS"}}; cachegen has "levels" besides, their number. */
lm_code lm_kv_methods_json(bool files, lm_buf *out, lm_err *e);

#endif
