/* SPDX-License-Identifier: Apache-2.0 */
/* inspect_text.h -- helpers of the reports: text with a sticky error, cleaned names, shapes. */
#ifndef LM_FORMAT_INSPECT_TEXT_H
#define LM_FORMAT_INSPECT_TEXT_H

#include "base/buf.h"
#include "base/json.h"
#include "format/safetensors.h"

typedef struct {
    lm_buf *out;
    lm_err *err;
    lm_code rc;
} lm_text;

void lm_text_add(lm_text *x, const char *s);
void lm_text_addf(lm_text *x, const char *fmt, ...) LM_PRINTF(2, 3);
/* s with control bytes (C0, DEL and, as UTF-8, C1) replaced by '?'; NULL adds nothing. */
void lm_text_clean(lm_text *x, const char *s);

#define LM_SHAPE_TEXT 192
char *lm_text_shape(const lm_st_tensor *t, char buf[LM_SHAPE_TEXT]); /* "[4096, 256]" */
void lm_text_json_shape(lm_jw *w, const lm_st_tensor *t);            /* "shape":[4096,256] */

#endif
