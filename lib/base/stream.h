/* SPDX-License-Identifier: Apache-2.0 */
/* stream.h -- finds inputs that name the same pipe, which can be read only once.
 *
 * A stream is a pipe, a socket or a terminal by any name (/dev/stdin, /dev/fd/0, a fifo).  Standard
 * input ("-") counts as a stream even when it is a file, because it is not rewound.  The memory devices
 * (/dev/null, /dev/zero) are not streams. */
#ifndef LM_BASE_STREAM_H
#define LM_BASE_STREAM_H

#include <stdbool.h>

#include "base/err.h"

bool lm_stream_is(const char *path); /* NULL is not a stream */
/* True if both paths lead to one stream.  For a path and itself: true if it is a stream. */
bool lm_stream_same(const char *a, const char *b);
/* The failure (LM_EUSAGE) for two inputs that are one stream. */
lm_code lm_stream_twice(const char *first, const char *second, lm_err *e);
/* Fails so when two of the n paths are one stream; NULL paths are skipped. */
lm_code lm_streams_once(const char *const *path, int n, lm_err *e);

#endif
