/* SPDX-License-Identifier: Apache-2.0 */
/* gather.h -- parts of all ranks that are gathered while the rank computes.
 *
 * A gatherer has a thread that makes one lm_comm_all_gather after another, in the order in which they are begun, the same on
 * all ranks.  The group of its communicator serves it alone. */
#ifndef LM_COMM_GATHER_H
#define LM_COMM_GATHER_H

#include "comm/comm.h"

typedef struct lm_gatherer lm_gatherer;

/* c is borrowed.  Fails: LM_ELIMIT. */
lm_code lm_gatherer_new(lm_comm *c, lm_gatherer **out, lm_err *e);
/* Waits for what has begun: after a failure call lm_comm_abort first.  NULL is fine. */
void lm_gatherer_free(lm_gatherer *g);

/* Begin lm_comm_all_gather of these operands; `bytes` is copied, the others are in use until lm_gatherer_end has returned for
 * it.  Fails: LM_ELIMIT. */
lm_code lm_gatherer_begin(lm_gatherer *g, const void *in, void *out, const size_t *bytes,
                          lm_err *e);
/* Wait for the oldest that has begun and for which this has not waited.  Fails: as lm_comm_all_gather, with the failure of any
 * earlier one; LM_EBUG if all have been waited for. */
lm_code lm_gatherer_end(lm_gatherer *g, lm_err *e);
/* Wait until those that have begun write no memory any longer, failed ones included; lm_gatherer_end is still to be
 * called for each. */
void lm_gatherer_settle(lm_gatherer *g);
/* Have `seen` called by lm_gatherer_end, on its thread: of each gather when it began and ended, and from when on the rank
 * waited for it, which may be later than its end. */
typedef void lm_gatherer_seen(void *ctx, double began, double ended, double waiting);
void lm_gatherer_watch(lm_gatherer *g, lm_gatherer_seen *seen, void *ctx);
/* True if some have begun for which lm_gatherer_end has not waited. */
bool lm_gatherer_busy(lm_gatherer *g);
/* Seconds of gathers for which nothing waited, so far; call it while all gathers are complete. */
double lm_gatherer_hidden(lm_gatherer *g);

#endif
