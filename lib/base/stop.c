/* SPDX-License-Identifier: Apache-2.0 */
/* stop.c -- flags that a signal handler may set.  Lock-free atomics are safe in handlers and,
 * unlike volatile sig_atomic_t, also between threads. */
#include "base/stop.h"

#include <stdatomic.h>

static atomic_int stop_signal, poked;

static struct {
    bool (*any)(void *ctx, bool mine);
    void *ctx;
    atomic_bool answer; /* read by any thread */
} together;

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
    return together.any ? atomic_load_explicit(&together.answer, memory_order_relaxed)
                        : lm_stop_signal() != 0;
}

void lm_stop_together(bool (*any)(void *ctx, bool mine), void *ctx)
{
    together.any = any;
    together.ctx = ctx;
    atomic_store(&together.answer, false);
}

bool lm_stop_here(void)
{
    if (together.any && !atomic_load(&together.answer))
        atomic_store(&together.answer, together.any(together.ctx, lm_stop_signal() != 0));
    return lm_stopping();
}

void lm_poke(void)
{
    atomic_store(&poked, 1);
}

bool lm_poked(void)
{
    return atomic_load_explicit(&poked, memory_order_relaxed) && atomic_exchange(&poked, 0);
}
