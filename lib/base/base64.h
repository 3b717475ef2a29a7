/* SPDX-License-Identifier: Apache-2.0 */
/* base64.h -- bytes as text (RFC 4648, section 4) and back. */
#ifndef LM_BASE_BASE64_H
#define LM_BASE_BASE64_H

#include "base/buf.h"

/* Both append to `out`. */
lm_code lm_base64_encode(const void *data, size_t len, lm_buf *out, lm_err *e);
/* Fails: LM_EFORMAT (naming `where`) for any text that the encoder does not produce. */
lm_code lm_base64_decode(const char *text, size_t len, const char *where, lm_buf *out, lm_err *e);

#endif
