/* SPDX-License-Identifier: Apache-2.0 */
/* span_reader.h -- bytes in memory as a stream, in pieces of at most 1000. */
#ifndef TESTS_SPAN_READER_H
#define TESTS_SPAN_READER_H

#include <stddef.h>
#include <string.h>

#include "base/err.h"

typedef struct {
    const void *data;
    size_t len;
} span;

static inline lm_code read_span(void *ctx, void *dst, size_t cap, size_t *got, lm_err *e)
{
    span *s = ctx;
    (void)e;
    *got = cap < s->len ? cap : s->len;
    *got = *got > 1000 ? 1000 : *got;
    memcpy(dst, s->data, *got);
    s->data = (const char *)s->data + *got;
    s->len -= *got;
    return LM_OK;
}

#endif
