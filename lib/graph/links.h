/* SPDX-License-Identifier: Apache-2.0 */
/* links.h -- a communicator as kernels see it (kernels/comm.h). */
#ifndef LM_GRAPH_LINKS_H
#define LM_GRAPH_LINKS_H

#include "comm/comm.h"
#include "comm/gather.h"
#include "graph/backend.h"
#include "kernels/comm.h"

/* The ranks of `c`, which is borrowed.  A failure of a call stays in the result: to go on, make it anew. */
lm_links lm_comm_links(lm_comm *c);

/* The ranks of `c`, which is borrowed and has a rank on each backend: calls of *out exchange memory of the backends, in the order
 * of stream s (NULL: main).  Collective.  Fails on all ranks, for the first reason of one: as lm_comm_broadcast, and as group_open
 * of lm_backend; LM_EUSAGE for a backend without groups. */
lm_code lm_links_new(lm_backend *b, lm_comm *c, lm_stream *s, lm_links **out, lm_err *e);
/* NULL is fine.  Not collective; what has not ended by then ends without results. */
void lm_links_free(lm_backend *b, lm_links *l);

/* Kernels gather by g from here on, which is borrowed, of the same ranks in a group of its own; NULL: at once. */
void lm_links_gather(lm_links *l, lm_gatherer *g);

#endif
