/* SPDX-License-Identifier: Apache-2.0 */
/* normal_form.h -- Unicode normalisation forms (UAX #15) over utf8proc's decompositions.
 *
 * Parts that are already normal, nearly all text, are found with one table look-up per character
 * and copied; only the rest is decomposed, ordered and composed.  Private to lib/text. */
#ifndef LM_TEXT_NORMAL_FORM_H
#define LM_TEXT_NORMAL_FORM_H

#include <stddef.h>

#include "base/buf.h"
#include "base/err.h"

typedef enum { LM_NFC, LM_NFD, LM_NFKC, LM_NFKD } lm_form;

/* Append the form of text[0..len), valid UTF-8, to *out.  Linear in len for any text. */
lm_code lm_form_append(lm_form form, const char *text, size_t len, lm_buf *out, lm_err *e);

#endif
