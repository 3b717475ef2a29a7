/* SPDX-License-Identifier: Apache-2.0 */
/* reward_command.c -- a child process behind two pipes. */
#include "tune/align/reward_command.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/json.h"
#include "base/mem.h"
#include "base/stop.h"
#include "base/text.h"

extern char **environ;

enum {
    SLICE_MS = 100,         /* between looks at lm_stopping */
    GRACE_MS = 20,          /* after the last answer, for one too many */
    MOST_ANSWER = 64 << 10, /* bytes of a line */
};
static const double patience = 2; /* seconds for its end after that of its input */

struct lm_reward_command {
    char *line; /* of the shell */
    double timeout;
    pid_t pid; /* 0: it has ended, and was waited for */
    int status;
    int to, from;   /* -1: closed */
    lm_buf in, out; /* lines for it; the beginning of a line of it that is not complete */
    size_t sent;
    bool stopped;
};

/* ---- life ---- */

static void close_fd(int *fd)
{
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}

static lm_code spawn(lm_reward_command *c, int in, int out, lm_err *e)
{
    posix_spawn_file_actions_t files;
    posix_spawnattr_t how;
    sigset_t none, all;
    char shell[] = "sh", text_follows[] = { '-', 'c', 0 },
         *argv[] = { shell, text_follows, c->line, NULL };
    sigemptyset(&none);
    sigfillset(&all);
    posix_spawn_file_actions_init(&files);
    posix_spawnattr_init(&how);
    posix_spawn_file_actions_adddup2(&files, in, STDIN_FILENO);
    posix_spawn_file_actions_adddup2(&files, out, STDOUT_FILENO);
    posix_spawnattr_setflags(&how, POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGMASK |
                                       POSIX_SPAWN_SETSIGDEF);
    posix_spawnattr_setpgroup(&how, 0);
    posix_spawnattr_setsigmask(&how, &none);
    posix_spawnattr_setsigdefault(&how, &all);
    errno = posix_spawn(&c->pid, "/bin/sh", &files, &how, argv, environ);
    posix_spawn_file_actions_destroy(&files);
    posix_spawnattr_destroy(&how);
    if (!errno)
        return LM_OK;
    c->pid = 0;
    return lm_fail(e, LM_EIO, "reward command", NULL, "cannot start a shell");
}

static lm_code start(lm_reward_command *c, lm_err *e)
{
    int in[2] = { -1, -1 }, out[2] = { -1, -1 };
    if (pipe2(in, O_CLOEXEC) || pipe2(out, O_CLOEXEC))
        lm_fail(e, LM_EIO, "reward command", NULL, "cannot make a pipe");
    else
        spawn(c, in[0], out[1], e);
    close_fd(&in[0]);
    close_fd(&out[1]);
    c->to = in[1];
    c->from = out[0];
    if (!e->code)
        fcntl(c->to, F_SETFL, O_NONBLOCK), fcntl(c->from, F_SETFL, O_NONBLOCK);
    return e->code;
}

lm_code lm_reward_command_open(const char *line, double timeout, lm_reward_command **out, lm_err *e)
{
    lm_reward_command *c = NULL;
    *out = NULL;
    if (lm_alloc_n(&c, 1, sizeof *c, "a reward command", e))
        return e->code;
    c->timeout = timeout;
    c->to = c->from = -1;
    if (lm_strdup(&c->line, line, e) || start(c, e)) {
        lm_reward_command_close(c);
        return e->code;
    }
    *out = c;
    return LM_OK;
}

static void pause_slice(void)
{
    const struct timespec t = { .tv_nsec = 5000000 };
    nanosleep(&t, NULL);
}

/* True if it has ended, and its children with it; waits up to `seconds`. */
static bool has_ended(lm_reward_command *c, double seconds)
{
    double until = lm_now() + seconds;
    while (c->pid) {
        siginfo_t info = { 0 };
        int rc = waitid(P_PID, (id_t)c->pid, &info, WEXITED | WNOHANG | WNOWAIT);
        if (!rc && info.si_pid) { /* the group is ours until the process is waited for */
            kill(-c->pid, SIGKILL);
            waitpid(c->pid, &c->status, 0);
            c->pid = 0;
        } else if (lm_now() >= until) {
            return false;
        } else {
            pause_slice();
        }
    }
    return true;
}

/* Kill it and its children, and wait for it: a killed process always ends. */
static void kill_group(lm_reward_command *c)
{
    if (!c->pid)
        return;
    kill(-c->pid, SIGKILL);
    while (waitpid(c->pid, &c->status, 0) < 0 && errno == EINTR)
        ;
    c->pid = 0;
}

void lm_reward_command_close(lm_reward_command *c)
{
    if (!c)
        return;
    close_fd(&c->to);
    if (c->pid && !has_ended(c, patience)) {
        kill(-c->pid, SIGTERM);
        has_ended(c, patience / 4);
    }
    kill_group(c);
    close_fd(&c->from);
    lm_buf_fini(&c->in);
    lm_buf_fini(&c->out);
    lm_free(c->line);
    lm_free(c);
}

/* ---- failures ---- */

static lm_code fail_ended(lm_reward_command *c, int64_t got, int64_t n, lm_err *e)
{
    char how[64] = "closed its output";
    if (!has_ended(c, patience))
        kill_group(c);
    else if (WIFSIGNALED(c->status))
        snprintf(how, sizeof how, "was ended by signal %d", WTERMSIG(c->status));
    else
        snprintf(how, sizeof how, "ended with status %d%s", WEXITSTATUS(c->status),
                 WEXITSTATUS(c->status) == 127 ? " (not found)" : "");
    errno = 0;
    return lm_fail(e, LM_EIO, "reward command",
                   "it must write a line for each line that it reads, until the end of its input",
                   "'%.60s' %s after %lld of %lld answers", c->line, how, (long long)got,
                   (long long)n);
}

static lm_code fail_late(lm_reward_command *c, int64_t got, int64_t n, lm_err *e)
{
    kill_group(c);
    errno = 0;
    return lm_fail(e, LM_EIO, "reward command",
                   "let it write out each line at once, or allow more time for an answer",
                   "'%.60s' gave no answer for %g s, after %lld of %lld", c->line, c->timeout,
                   (long long)got, (long long)n);
}

static lm_code fail_surplus(lm_reward_command *c, lm_err *e)
{
    kill_group(c);
    errno = 0;
    return lm_fail(e, LM_EIO, "reward command",
                   "it must write one line for each line that it reads",
                   "'%.60s' gave more answers than it was asked for", c->line);
}

static lm_code fail_answer(lm_reward_command *c, const char *line, int64_t i, lm_err *e)
{
    kill_group(c);
    return lm_fail(e, LM_EFORMAT, "reward command",
                   "write a number, {\"reward\": number}, or null for no reward",
                   "answer %lld of '%.60s' is '%.60s'", (long long)i + 1, c->line, line);
}

/* ---- lines ---- */

static lm_code add_line(lm_reward_command *c, const lm_reward_item *item, lm_err *e)
{
    lm_jw w;
    const char *key;
    json_t *value;
    lm_jw_begin(&w, &c->in, 0, e);
    lm_jw_obj(&w, NULL);
    lm_jw_strn(&w, "prompt", item->prompt, item->prompt_len);
    lm_jw_strn(&w, "completion", item->text, item->text_len);
    lm_jw_bool(&w, "truncated", item->truncated);
    json_object_foreach((json_t *)item->record, key, value)
    {
        if (strcmp(key, "prompt") && strcmp(key, "completion") && strcmp(key, "truncated"))
            lm_jw_json(&w, key, value);
    }
    lm_jw_close_obj(&w);
    return lm_jw_end(&w) ? e->code : lm_buf_add(&c->in, "\n", 1, e);
}

/* A number, an object with one, or null; false: something else. */
static bool read_answer(const char *line, double *out)
{
    lm_err unseen = { 0 };
    json_t *v = NULL;
    *out = NAN;
    if (!strcmp(line, "null") || lm_parse_double(line, out))
        return true;
    if (lm_json_parse(line, strlen(line), "answer", &v, &unseen))
        return false;
    const json_t *r = json_is_object(v) ? json_object_get(v, "reward") : NULL;
    bool number = json_is_number(r), ok = number || json_is_null(r);
    *out = number ? json_number_value(r) : NAN;
    json_decref(v);
    return ok;
}

/* Take the whole lines that have come. */
static lm_code take_lines(lm_reward_command *c, double *out, int64_t *got, int64_t n, lm_err *e)
{
    size_t at = 0;
    char *end;
    while (at < c->out.len && (end = memchr(c->out.data + at, '\n', c->out.len - at))) {
        char *line = c->out.data + at;
        size_t len = (size_t)(end - line);
        at += len + 1;
        for (; len && (line[len - 1] == '\r' || line[len - 1] == ' '); len--)
            ;
        line[len] = 0;
        if (*got == n)
            return fail_surplus(c, e);
        if (strlen(line) != len || !read_answer(line, &out[*got]))
            return fail_answer(c, line, *got, e);
        ++*got;
    }
    if (at)
        memmove(c->out.data, c->out.data + at, c->out.len - at);
    c->out.len -= at;
    return c->out.len > MOST_ANSWER ? fail_answer(c, c->out.data, *got, e) : LM_OK;
}

/* ---- the exchange ---- */

/* write(2) without the signal of a closed pipe, which has no per-call flag. */
static ssize_t write_quietly(int fd, const void *data, size_t len)
{
    const struct timespec now = { 0 };
    sigset_t pipe, before, pending;
    sigemptyset(&pipe);
    sigaddset(&pipe, SIGPIPE);
    sigpending(&pending);
    pthread_sigmask(SIG_BLOCK, &pipe, &before);
    ssize_t n = write(fd, data, len);
    int why = errno;
    if (n < 0 && why == EPIPE && !sigismember(&pending, SIGPIPE))
        while (sigtimedwait(&pipe, NULL, &now) < 0 && errno == EINTR)
            ;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    errno = why;
    return n;
}

static void send_some(lm_reward_command *c)
{
    ssize_t n = write_quietly(c->to, c->in.data + c->sent, c->in.len - c->sent);
    if (n > 0)
        c->sent += (size_t)n;
    else if (n < 0 && errno != EAGAIN && errno != EINTR)
        close_fd(&c->to); /* it no longer reads; that it has ended is seen at its output */
}

/* *end: there is nothing more to come. */
static lm_code receive_some(lm_reward_command *c, bool *end, lm_err *e)
{
    if (lm_buf_room(&c->out, 4096, e))
        return e->code;
    ssize_t n = read(c->from, c->out.data + c->out.len, 4096);
    *end = n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR);
    if (n > 0)
        c->out.len += (size_t)n;
    return LM_OK;
}

/* Wait for either pipe, most_ms at most. */
static lm_code exchange(lm_reward_command *c, int most_ms, bool *end, lm_err *e)
{
    struct pollfd f[2] = { { .fd = c->from, .events = POLLIN },
                           { .fd = c->sent < c->in.len ? c->to : -1, .events = POLLOUT } };
    *end = false;
    if (poll(f, 2, most_ms) <= 0)
        return LM_OK;
    if (f[1].revents)
        send_some(c);
    return f[0].revents ? receive_some(c, end, e) : LM_OK;
}

/* Send all lines, and take as many answers. */
static lm_code converse(lm_reward_command *c, double *out, int64_t n, lm_err *e)
{
    double last = lm_now();
    int64_t got = 0, before = 0;
    bool end = false;
    if (receive_some(c, &end, e))
        return e->code;
    if (c->out.len)
        return fail_surplus(c, e);
    while (got < n) {
        if (lm_stopping()) {
            c->stopped = true;
            kill_group(c);
            return LM_OK;
        }
        if (exchange(c, SLICE_MS, &end, e) || take_lines(c, out, &got, n, e))
            return e->code;
        last = got > before ? lm_now() : last;
        before = got;
        if (got < n && end)
            return fail_ended(c, got, n, e);
        if (got < n && lm_now() - last > c->timeout)
            return fail_late(c, got, n, e);
    }
    /* A program that writes two lines for one is soon ahead of its input. */
    if (!c->out.len && exchange(c, GRACE_MS, &end, e))
        return e->code;
    return c->out.len ? fail_surplus(c, e) : LM_OK;
}

lm_code lm_reward_command_score(lm_reward_command *c, const lm_reward_item *item, int64_t n,
                                double *out, lm_err *e)
{
    for (int64_t i = 0; i < n; i++)
        out[i] = NAN;
    if (c->stopped || !n)
        return LM_OK;
    c->in.len = c->sent = 0;
    for (int64_t i = 0; i < n; i++)
        if (add_line(c, &item[i], e))
            return e->code;
    return converse(c, out, n, e);
}
