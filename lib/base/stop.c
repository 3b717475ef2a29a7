/* SPDX-License-Identifier: Apache-2.0 */
/* stop.c -- flags that a signal handler may set.  Lock-free atomics are safe in handlers and,
 * unlike volatile sig_atomic_t, also between threads. */
#include "base/stop.h"

#include <stdatomic.h>

static atomic_int stop_signal, poked;

void lm_stop_request(int signal)
{
    atomic_store(&stop_signal, signal);
}

int lm_stop_signal(void)
{
    return atomic_load_explicit(&stop_signal, memory_order_relaxed);
}

bool lm_stopping(void)
{
    return lm_stop_signal() != 0;
}

void lm_poke(void)
{
    atomic_store(&poked, 1);
}

bool lm_poked(void)
{
    return atomic_load_explicit(&poked, memory_order_relaxed) && atomic_exchange(&poked, 0);
}
