/* SPDX-License-Identifier: Apache-2.0 */
/* buf.c -- a growing byte string. */
#include "base/buf.h"

#include <stdio.h>
#include <string.h>

#include "base/mem.h"

lm_code lm_buf_room(lm_buf *b, size_t more, lm_err *e)
{
    size_t need;

    if (!lm_add_ok(b->len, more, &need) || !lm_add_ok(need, 1, &need))
        return lm_fail(e, LM_ELIMIT, "memory", NULL, "a text of more than 2^64 bytes");
    if (need <= b->cap)
        return LM_OK;
    return lm_grow(&b->data, &b->cap, need, 1, "a text", e);
}

lm_code lm_buf_add(lm_buf *b, const void *data, size_t len, lm_err *e)
{
    lm_code rc = lm_buf_room(b, len, e);

    if (rc)
        return rc;
    if (len)
        memcpy(b->data + b->len, data, len);
    b->len += len;
    b->data[b->len] = 0;
    return LM_OK;
}

lm_code lm_buf_addf(lm_buf *b, lm_err *e, const char *fmt, ...)
{
    va_list ap, again;
    int n;
    lm_code rc;

    va_start(ap, fmt);
    va_copy(again, ap);
    n = vsnprintf(NULL, 0, fmt, ap);
    va_end(ap);
    if (n < 0) {
        va_end(again);
        return lm_fail(e, LM_EBUG, "lm_buf_addf", NULL, "bad format '%s'", fmt);
    }
    rc = lm_buf_room(b, (size_t)n, e);
    if (!rc) {
        vsnprintf(b->data + b->len, (size_t)n + 1, fmt, again);
        b->len += (size_t)n;
    }
    va_end(again);
    return rc;
}

void lm_buf_fini(lm_buf *b)
{
    lm_free(b->data);
    *b = (lm_buf){ 0 };
}
