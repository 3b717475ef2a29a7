/* SPDX-License-Identifier: Apache-2.0 */
/* ring.h -- values that travel around the ranks of a group while they compute (kernels/ring.h).
 *
 * Each rank has a lane to the next one and one from the rank before it (comm/lane.h), in groups of two ranks of their own. */
#ifndef LM_GRAPH_RING_H
#define LM_GRAPH_RING_H

#include "comm/comm.h"
#include "kernels/comm.h"

typedef struct lm_ring lm_ring;

/* The ring of two or more ranks.  Collective.  Fails: as lm_comm_split and lm_lane_new. */
lm_code lm_ring_new(lm_comm *c, lm_ring **out, lm_err *e);
/* Waits for what has begun: after a failure call lm_comm_abort first.  NULL is fine. */
void lm_ring_free(lm_ring *r);

/* Set what the links of a group call (lm_links.pass, .arrive); r: of the same ranks, lives longer. */
void lm_ring_join(lm_ring *r, lm_links *l);
/* Seconds that kernels waited for what had not come, and bytes that this rank passed on, so far. */
lm_comm_use lm_ring_used(const lm_ring *r);
/* lm_comm_patience of its groups. */
void lm_ring_patience(lm_ring *r, double seconds);

#endif
