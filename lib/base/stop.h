/* SPDX-License-Identifier: Apache-2.0 */
/* stop.h -- the one flag between signal handlers and long loops. */
#ifndef LM_BASE_STOP_H
#define LM_BASE_STOP_H

#include <stdbool.h>

/* Set by a tool's handler on SIGINT/SIGTERM (and by tests); long loops in lib/ poll it. */
void lm_stop_request(int signal);
int lm_stop_signal(void); /* 0: no signal */
bool lm_stopping(void);
/* SIGUSR1: "checkpoint now"; reading clears it. */
void lm_poke(void);
bool lm_poked(void);

#endif
