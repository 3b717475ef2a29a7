/* SPDX-License-Identifier: Apache-2.0 */
/* signals.c -- the first SIGINT, SIGTERM or SIGHUP sets a flag, and the tool stops at the next
 * opportunity; a second one, and the loss of the reader or of an input, end it at once.
 * Temporaries are removed in every case. */
#include <signal.h>
#include <stdatomic.h>
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

static void write_text(const char *text)
{
    ssize_t ignored = write(STDERR_FILENO, text, strlen(text));

    (void)ignored;
}

/* the same text as in lm_write_all */
static const char cut_short[] = ": was truncated while it was read";
static atomic_bool ending, said;

/* A mapped input that is truncated while it is read causes SIGBUS instead of a failing call.
 * Several threads may be affected; the first one ends the process. */
static void on_lost_input(int sig, siginfo_t *info, void *context)
{
    static char input[4096];

    (void)sig;
    (void)context;
    while (atomic_exchange(&ending, true))
        pause();
    if (!atomic_load(&said)) {
        if (isatty(STDERR_FILENO))
            write_text("\r\033[K"); /* erases the progress line */
        write_text(the_tool->name);
        write_text(": ");
        write_text(lm_map_name(info->si_addr, input, sizeof input) ? input : "an input");
        write_text(cut_short);
        write_text(": provide the complete file\n");
    }
    lm_out_drop_last();
    _exit(1);
}

void lm_signal_wait(const char *what)
{
    if (strstr(what, cut_short))
        atomic_store(&said, true);
    while (atomic_load(&ending))
        pause();
}

static void on_poke(int sig)
{
    (void)sig;
    lm_poke();
}

static void handle(int sig, void (*fn)(int), int flags)
{
    struct sigaction a, old;

    /* nohup, and shells for background jobs: signals ignored at the start remain ignored */
    if (sigaction(sig, NULL, &old) == 0 && old.sa_handler == SIG_IGN && fn != SIG_IGN)
        return;
    memset(&a, 0, sizeof a);
    a.sa_handler = fn;
    a.sa_flags = flags;
    sigfillset(&a.sa_mask);
    sigaction(sig, &a, NULL);
}

static void handle_lost_input(void)
{
    struct sigaction a;

    memset(&a, 0, sizeof a);
    a.sa_sigaction = on_lost_input;
    a.sa_flags = SA_SIGINFO;
    sigfillset(&a.sa_mask);
    sigaction(SIGBUS, &a, NULL);
}

void lm_signals_init(const lm_tool *t)
{
    the_tool = t;
    /* A read that waits for input must be interrupted by the signal (no SA_RESTART); writes are
     * repeated. */
    handle(SIGINT, on_stop, 0);
    handle(SIGTERM, on_stop, 0);
    handle(SIGHUP, on_stop, 0);
    handle_lost_input();
    handle(SIGXFSZ, SIG_IGN, 0); /* beyond a limit on file sizes, write fails with EFBIG */
    handle(SIGPIPE, end_at_once, 0);
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
