/* SPDX-License-Identifier: Apache-2.0 */
/* lane.h -- messages of one direction between two ranks, which travel while both of them compute.
 *
 * A lane has a thread that sends or receives them one after another.  The group of its communicator serves the lane alone, in
 * this direction; other calls may be made on it again when all messages are complete. */
#ifndef LM_COMM_LANE_H
#define LM_COMM_LANE_H

#include <stdint.h>

#include "comm/comm.h"

typedef struct lm_lane lm_lane;

/* To (`out`) or from rank `peer` of c, which is borrowed. */
lm_code lm_lane_new(lm_comm *c, int peer, bool out, lm_lane **lane, lm_err *e);
/* Waits for messages that have begun: after a failure call lm_comm_abort first.  NULL is fine. */
void lm_lane_free(lm_lane *l);

/* Begin to receive the next message; `data` is in use until lm_lane_wait has returned for *number.  Fails: LM_ELIMIT. */
lm_code lm_lane_take(lm_lane *l, void *data, size_t bytes, uint64_t *number, lm_err *e);
/* Begin to send the next message, of a copy of `data`: this rank may go on however late the other one takes it, and two ranks
 * that give before they take do not wait for each other.  Memory of copies is used again.  Fails: LM_ELIMIT. */
lm_code lm_lane_give(lm_lane *l, const void *data, size_t bytes, uint64_t *number, lm_err *e);
/* Wait until all messages up to this number are complete; 0: none.  Fails: as lm_comm_send and lm_comm_recv, with the failure
 * of any earlier message. */
lm_code lm_lane_wait(lm_lane *l, uint64_t number, lm_err *e);
#endif
