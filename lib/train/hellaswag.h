/* SPDX-License-Identifier: Apache-2.0 */
/* hellaswag.h -- the text of HellaSwag's questions (arXiv:1905.07830) as EleutherAI's
 * lm-evaluation-harness cleans it, so that accuracies can be compared:
 *
 *   clean(t): white space at both ends is removed; " [title]" becomes ". "; text in square brackets is removed (artefacts of
 *             the WikiHow part; up to the next "]" of the same line); two spaces become one, once from left to right
 *   context:  clean(activity_label + ": " + ctx_a + " " + ctx_b with its first letter in upper case and the
 *             rest in lower case)
 *
 * Text is UTF-8.  Private to lib/train. */
#ifndef LM_TRAIN_HELLASWAG_H
#define LM_TRAIN_HELLASWAG_H

#include "base/buf.h"

/* Append clean(text[0..len)), NUL behind it. */
lm_code lm_hellaswag_clean(const char *text, size_t len, lm_buf *out, lm_err *e);
/* Append the context of a question, NUL behind it. */
lm_code lm_hellaswag_context(const char *activity, const char *ctx_a, const char *ctx_b,
                             lm_buf *out, lm_err *e);

#endif
