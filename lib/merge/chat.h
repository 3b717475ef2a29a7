/* SPDX-License-Identifier: Apache-2.0 */
/* chat.h -- the chat template of a merged model.  Private to lib/merge. */
#ifndef LM_MERGE_CHAT_H
#define LM_MERGE_CHAT_H

#include <stdbool.h>

#include "base/buf.h"
#include "base/err.h"
#include "merge/plan.h"

/* Append the template that the recipe requests to `out`.  "auto" is the template that most of the
 * inputs have; among equally frequent ones the base's, otherwise the first input's.  *found =
 * false: no template is requested, or no input has one. */
lm_code lm_merge_chat(const lm_merge_plan *p, lm_buf *out, bool *found, lm_err *e);

#endif
