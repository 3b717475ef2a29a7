/* SPDX-License-Identifier: Apache-2.0 */
/* sink.c -- output on standard error: messages by level, and one progress line on a terminal. */
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/text.h"
#include "common/frame.h"

#define REDRAW_SECONDS 0.1
#define LOG_SECONDS    10.0

static struct {
    pthread_mutex_t lock;
    const char *name;
    int verbosity;
    bool bar;   /* may draw */
    bool drawn; /* a progress line is on the terminal */
    char what[64];
    double started, first_done, last;
} state = { .lock = PTHREAD_MUTEX_INITIALIZER, .verbosity = LM_LOG_NOTICE };

static void clear_line(void)
{
    if (state.drawn)
        fputs("\r\033[K", stderr);
    state.drawn = false;
}

void lm_sink_clear(void)
{
    pthread_mutex_lock(&state.lock);
    clear_line();
    pthread_mutex_unlock(&state.lock);
}

/* The text contains names from files, which must neither control the terminal nor begin new lines:
 * control characters, U+0080 to U+009F too, become '?'. */
static void make_plain(char *text)
{
    for (unsigned char *c = (unsigned char *)text; *c; c++) {
        bool high = *c == 0xc2 && c[1] >= 0x80 && c[1] < 0xa0;
        if (*c < ' ' || *c == 0x7f || high)
            *c = '?';
        if (high)
            *++c = '?';
    }
}

static void log_line(lm_sink *s, lm_log_level level, const char *text)
{
    char plain[1024];

    (void)s;
    if ((int)level > state.verbosity)
        return;
    snprintf(plain, sizeof plain, "%s", text);
    make_plain(plain);
    pthread_mutex_lock(&state.lock);
    clear_line();
    /* one write, so that lines of a pipeline are not mixed */
    fprintf(stderr, "%s: %s\n", state.name, plain);
    pthread_mutex_unlock(&state.lock);
}

/* A line of the library, with the options of this tool. */
static void log_library(lm_sink *s, lm_log_level level, const char *text)
{
    char shown[1024];
    log_line(s, level, lm_advice_shown(text, shown, sizeof shown));
}

static int columns(void)
{
    struct winsize w;

    return ioctl(STDERR_FILENO, TIOCGWINSZ, &w) == 0 && w.ws_col > 0 ? w.ws_col : 80;
}

static char *show(double n, const char *unit, char *buf)
{
    return strcmp(unit, "bytes") ? lm_show_count(n, buf) : lm_show_bytes(n, buf);
}

/* "what 1.20 M/4.00 M tokens 30% 18.1 k tokens/s 2:31 left note", cut to the terminal. */
static void draw(double now, double done, double total, const char *unit, const char *note)
{
    bool bytes = !strcmp(unit, "bytes");
    double rate = (done - state.first_done) / (now - state.started);
    char line[512], a[32], b[32];
    int n, room = columns() - 1;

    n = snprintf(line, sizeof line, "%s %s", state.what, show(done, unit, a));
    if (total > 0)
        n += snprintf(line + n, sizeof line - (size_t)n, "/%s", show(total, unit, b));
    if (!bytes)
        n += snprintf(line + n, sizeof line - (size_t)n, " %.32s", unit);
    if (total > 0)
        n += snprintf(line + n, sizeof line - (size_t)n, " %.0f%%", 100 * done / total);
    if (rate > 0 && isfinite(rate)) {
        n += snprintf(line + n, sizeof line - (size_t)n, "  %s%s%.32s/s", show(rate, unit, a),
                      bytes ? "" : " ", bytes ? "" : unit);
        if (total > done)
            n += snprintf(line + n, sizeof line - (size_t)n, "  %s left",
                          lm_show_seconds((total - done) / rate, b));
    }
    if (note && n < (int)sizeof line)
        snprintf(line + n, sizeof line - (size_t)n, "  %.100s", note);
    fprintf(stderr, "\r%.*s\033[K", room < 1 ? 1 : room, line);
    fflush(stderr);
    state.drawn = true;
}

static void progress(lm_sink *s, const char *what, double done, double total, const char *unit,
                     const char *note)
{
    double now;

    (void)s;
    if (!state.bar)
        return;
    pthread_mutex_lock(&state.lock);
    now = lm_now();
    if (strncmp(state.what, what, sizeof state.what - 1)) { /* a new phase: its own rate */
        snprintf(state.what, sizeof state.what, "%s", what);
        state.started = now;
        state.first_done = done;
        state.last = 0;
    }
    if (now - state.last >= REDRAW_SECONDS) {
        state.last = now;
        draw(now, done, total, unit ? unit : "", note);
    }
    pthread_mutex_unlock(&state.lock);
}

void lm_sink_init(lm_tool *t)
{
    state.name = t->name;
    state.verbosity = t->verbosity;
    state.bar = lm_the_frame.progress && t->verbosity >= LM_LOG_NOTICE &&
                (isatty(STDERR_FILENO) || lm_the_frame.progress_given);
    bool in_a_log = lm_the_frame.progress && !state.bar && t->verbosity == LM_LOG_NOTICE;
    t->sink = (lm_sink){ log_library, progress, in_a_log ? LOG_SECONDS : 0 };
}

void lm_say(lm_tool *t, lm_log_level level, const char *fmt, ...)
{
    char text[1024];
    va_list ap;

    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    lm_signal_wait(text);
    log_line(&t->sink, level, text);
}
