/* SPDX-License-Identifier: Apache-2.0 */
/* links.h -- a communicator as kernels see it (kernels/comm.h). */
#ifndef LM_GRAPH_LINKS_H
#define LM_GRAPH_LINKS_H

#include "comm/comm.h"
#include "kernels/comm.h"

/* The ranks of `c`, which is borrowed.  A failure of a call stays in the result: to go on, make it anew. */
lm_links lm_comm_links(lm_comm *c);

#endif
