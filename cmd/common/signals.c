/* signals.c -- handlers only set flags; a second SIGINT or SIGTERM ends the tool at once. */
#include <signal.h>
#include <string.h>

#include "base/stop.h"
#include "common/frame.h"

static void on_stop(int sig)
{
    if (lm_stop_signal()) {
        signal(sig, SIG_DFL);
        raise(sig);
    }
    lm_stop_request(sig);
}

static void on_poke(int sig)
{
    (void)sig;
    lm_poke();
}

static void handle(int sig, void (*fn)(int), int flags)
{
    struct sigaction a, old;

    /* nohup, and shells for background jobs: what is ignored at the start stays ignored */
    if (sigaction(sig, NULL, &old) == 0 && old.sa_handler == SIG_IGN && fn != SIG_IGN)
        return;
    memset(&a, 0, sizeof a);
    a.sa_handler = fn;
    a.sa_flags = flags;
    sigaction(sig, &a, NULL);
}

void lm_signals_init(const lm_tool *t)
{
    /* A read that waits for input must end with the signal (no SA_RESTART); writes are repeated. */
    handle(SIGINT, on_stop, 0);
    handle(SIGTERM, on_stop, 0);
    if (t->lasting) {
        handle(SIGUSR1, on_poke, SA_RESTART);
        handle(SIGPIPE, SIG_IGN, 0);
    }
}

void lm_signal_raise(void)
{
    int sig = lm_stop_signal();

    if (!sig)
        return;
    signal(sig, SIG_DFL);
    raise(sig);
}
