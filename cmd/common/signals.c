/* SPDX-License-Identifier: Apache-2.0 */
/* signals.c -- the first SIGINT, SIGTERM or SIGHUP sets a flag, and the tool ends in its own time;
 * a second one, and the loss of the reader or of an input, end it at once.  No way out leaves a
 * temporary. */
#include <signal.h>
#include <string.h>
#include <unistd.h>

#include "base/file.h"
#include "base/stop.h"
#include "common/frame.h"

static const lm_tool *the_tool;

static void end_at_once(int sig)
{
    sigset_t one;

    lm_out_drop_last();
    signal(sig, SIG_DFL);
    raise(sig);
    sigemptyset(&one); /* handlers run with all signals blocked: let this one through */
    sigaddset(&one, sig);
    pthread_sigmask(SIG_UNBLOCK, &one, NULL);
}

static void on_stop(int sig)
{
    if (lm_stop_signal())
        end_at_once(sig);
    else
        lm_stop_request(sig);
}

/* Mapped inputs that lose their end while they are read: no call fails, the memory does. */
static void on_lost_input(int sig)
{
    static const char what[] = ": an input: was cut short while it was read: give it whole\n";
    ssize_t ignored = write(STDERR_FILENO, the_tool->name, strlen(the_tool->name));

    (void)sig;
    ignored = write(STDERR_FILENO, what, sizeof what - 1);
    (void)ignored;
    lm_out_drop_last();
    _exit(1);
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
    sigfillset(&a.sa_mask);
    sigaction(sig, &a, NULL);
}

void lm_signals_init(const lm_tool *t)
{
    the_tool = t;
    /* A read that waits for input must end with the signal (no SA_RESTART); writes are repeated. */
    handle(SIGINT, on_stop, 0);
    handle(SIGTERM, on_stop, 0);
    handle(SIGHUP, on_stop, 0);
    handle(SIGBUS, on_lost_input, 0);
    handle(SIGXFSZ, SIG_IGN, 0); /* a limit on file sizes is a write that fails (EFBIG) */
    handle(SIGPIPE, t->lasting ? SIG_IGN : end_at_once, 0);
    if (t->lasting)
        handle(SIGUSR1, on_poke, SA_RESTART);
}

void lm_outlast_readers(lm_tool *t)
{
    t->lasting = true;
    handle(SIGPIPE, SIG_IGN, 0);
    handle(SIGUSR1, on_poke, SA_RESTART);
}

void lm_signal_raise(void)
{
    int sig = lm_stop_signal();

    if (!sig)
        return;
    signal(sig, SIG_DFL);
    raise(sig);
}
