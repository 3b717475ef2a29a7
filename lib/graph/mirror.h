/* SPDX-License-Identifier: Apache-2.0 */
/* mirror.h -- an array that the host writes or reads and its twin in a backend's memory.
 *
 * On a backend whose memory is the host's both are the same memory and nothing is copied.
 * Otherwise the host side is pinned, and push and pull copy in stream order, in the background. */
#ifndef LM_GRAPH_MIRROR_H
#define LM_GRAPH_MIRROR_H

#include "graph/backend.h"

typedef struct {
    lm_backend *b;
    size_t bytes;
    void *host, *dev;
} lm_mirror;

lm_code lm_mirror_new(lm_backend *b, size_t bytes, const char *purpose, lm_mirror *m, lm_err *e);
void lm_mirror_fini(lm_mirror *m);

/* Copy the first `bytes` of the host's side to the device, or back; s NULL: the main stream.  The
 * host may write or read its side again after a sync of that stream. */
lm_code lm_mirror_push(lm_mirror *m, size_t bytes, lm_stream *s, lm_err *e);
lm_code lm_mirror_pull(lm_mirror *m, size_t bytes, lm_stream *s, lm_err *e);

#endif
