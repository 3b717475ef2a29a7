/* SPDX-License-Identifier: Apache-2.0 */
/* buf.h -- a growing byte string.  Always NUL-terminated when not empty; len excludes the NUL. */
#ifndef LM_BASE_BUF_H
#define LM_BASE_BUF_H

#include <stddef.h>

#include "base/err.h"

typedef struct {
    char *data;
    size_t len, cap;
} lm_buf; /* zero-initialise */

lm_code lm_buf_add(lm_buf *b, const void *data, size_t len, lm_err *e);
lm_code lm_buf_addf(lm_buf *b, lm_err *e, const char *fmt, ...) LM_PRINTF(3, 4);
lm_code lm_buf_room(lm_buf *b, size_t more, lm_err *e); /* len unchanged, cap >= len + more + 1 */
void lm_buf_fini(lm_buf *b);

#endif
