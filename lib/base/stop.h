/* SPDX-License-Identifier: Apache-2.0 */
/* stop.h -- the one flag between signal handlers and long loops. */
#ifndef LM_BASE_STOP_H
#define LM_BASE_STOP_H

#include <stdbool.h>

/* Set by a tool's handler on SIGINT/SIGTERM (and by tests); long loops in lib/ poll it. */
void lm_stop_request(int signal);
int lm_stop_signal(void); /* 0: no signal */
bool lm_stopping(void);
/* Ranks that exchange as they go must stop at the same point of their work.  `any` tells whether one of them is asked to, of
 * which this one is `mine`; ranks call it together, in lm_stop_here, and until the next such call lm_stopping() is its answer.
 * NULL: this process is alone (the default). */
void lm_stop_together(bool (*any)(void *ctx, bool mine), void *ctx);
/* lm_stopping() at a point that all ranks reach. */
bool lm_stop_here(void);
/* SIGUSR1: "checkpoint now"; reading clears it. */
void lm_poke(void);
bool lm_poked(void);

#endif
