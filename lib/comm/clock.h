/* SPDX-License-Identifier: Apache-2.0 */
/* clock.h -- how the clocks of ranks differ. */
#ifndef LM_COMM_CLOCK_H
#define LM_COMM_CLOCK_H

#include "comm/comm.h"

/* *ahead: seconds by which `now` of this rank is ahead of that of rank 0, to half of a round trip between them: of some messages
 * there and back the fastest one, whose middle is when the other read its clock (NTP, RFC 5905 section 8).  Collective. */
lm_code lm_comm_clock(lm_comm *c, double (*now)(void), double *ahead, lm_err *e);

#endif
