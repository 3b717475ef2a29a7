/* SPDX-License-Identifier: Apache-2.0 */
/* chat.h -- the chat template of a merged model.  Private to lib/merge. */
#ifndef LM_MERGE_CHAT_H
#define LM_MERGE_CHAT_H

#include <stdbool.h>

#include "base/buf.h"
#include "base/err.h"
#include "merge/plan.h"

/* The names of built-in templates, NULL-terminated, and the Jinja text of a name; NULL: unknown.
 *   alpaca   "### Instruction:", "### Input:" (role user_context) and "### Response:", each followed
 *            by its text and an empty line; the system's text first.  tatsu-lab/stanford_alpaca
 *   chatml   <|im_start|>ROLE, newline, text, <|im_end|>, newline.  OpenAI's ChatML
 *   exaone   [|ROLE|]text; a user's turn ends with a newline, others with [|endofturn|] before it;
 *            an empty system's turn when there is none.  LGAI-EXAONE/EXAONE-3.0-7.8B-Instruct
 *   llama3   <|start_header_id|>ROLE<|end_header_id|>, empty line, text, <|eot_id|>; the first turn
 *            behind the token that begins a text.  meta-llama/Meta-Llama-3-8B-Instruct
 *   mistral  the same token, [INST] text [/INST] answer, the token that ends a text; the system's
 *            text, and an empty line, before that of the first user; roles must take turns.
 *            mistralai/Mistral-7B-Instruct-v0.2 */
extern const char *const lm_merge_chat_names[];
const char *lm_merge_chat_named(const char *name);

/* True if a recipe may request this: "auto", a name, or Jinja text (which has a brace). */
bool lm_merge_chat_known(const char *want);

/* Append the template that the recipe requests to `out`.  "auto" is the template that most of the
 * inputs have; among equally frequent ones the base's, otherwise the first input's.  *found =
 * false: no template is requested, or no input has one. */
lm_code lm_merge_chat(const lm_merge_plan *p, lm_buf *out, bool *found, lm_err *e);

#endif
