/* SPDX-License-Identifier: Apache-2.0 */
/* messages.h -- ranks that are processes of several machines: collective calls out of messages.  Private to lib/comm.
 *
 * A reduction is an exchange of all with all, after which each rank combines its part in the order of comm.h: the library that
 * carries the messages adds nothing itself.  Its scratch is bounded; a large part is exchanged in pieces, of which the next is
 * being sent while one is combined.
 *
 * A rank that waits asks the library again and again, and then sleeps for moments.  A failure is sent to all ranks as a message
 * of its own, which waiting ranks look for. */
#ifndef LM_COMM_MESSAGES_H
#define LM_COMM_MESSAGES_H

#include "comm/comm.h"
#include "comm/wire.h"

/* All ranks of a wire.  timeout: seconds without any progress after which a waiting rank fails, 0: without bound.  scratch: bytes
 * that a reduction may use, 0: 16 MiB.  The wire is closed with the last communicator, unless `keep`; a
 * failure leaves it to the caller. */
lm_code lm_messages_open(lm_wire *w, double timeout, size_t scratch, bool keep, lm_comm **out,
                         lm_err *e);

#endif
