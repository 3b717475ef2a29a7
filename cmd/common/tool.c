/* SPDX-License-Identifier: Apache-2.0 */
/* tool.c -- the beginning and the end of every tool. */
#include "common/tool.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/mem.h"
#include "base/stop.h"
#include "base/text.h"
#include "base/writer.h"
#include "common/frame.h"
#include "common/ranks.h"
#include "format/folder.h"

static const char standard_output[] = "standard output"; /* the name that lm_out_open uses */

/* Severity of an exit status: a failure overrides "no", a numerical stop overrides a failure. */
static int rank(int status)
{
    static const int order[] = { [0] = 0, [3] = 1, [1] = 2, [4] = 3, [2] = 4 };

    return order[status];
}

static void remember(lm_tool *t, int status)
{
    if (rank(status) > rank(t->status))
        t->status = status;
}

static int status_of(lm_code code)
{
    return code == LM_EUSAGE ? 2 : code == LM_ENUMERIC ? 4 : 1;
}

static bool stdout_lost; /* already reported: a full disk is one message */
static bool only_help;   /* SIGPIPE is ignored: the product does not depend on the reader */

/* Without a way to ask the others, rank 0 prints first: a launcher then ends the others, which mostly would say the same. */
static bool is_speaker(lm_tool *t, lm_err *e)
{
    if (t->comm || t->all_ranks)
        return lm_ranks_fail(t, e);
    return t->rank == 0 || (!lm_stopping() && !sleep(3) && !lm_stopping());
}

/* The place in the words of the tool. */
static void show_place(lm_err *e)
{
    const char *where = strcmp(e->where, "-") ? e->where : "standard input"; /* the name as given */
    char place[sizeof e->where];

    where = lm_place_shown(where, place, sizeof place);
    if (where != e->where)
        memmove(e->where, where, strlen(where) + 1);
}

static void report(lm_tool *t, lm_err *e, bool speaks)
{
    char todo[512];
    const lm_code code = e->code;

    if (speaks)
        lm_say(t, LM_LOG_ERROR, "%s%s%s%s%s%s%s", e->where, e->where[0] ? ": " : "", e->what,
               e->sys ? ": " : "", e->sys ? strerror(e->sys) : "", e->todo[0] ? ": " : "",
               lm_advice_shown(e->todo, todo, sizeof todo));
    if (code == LM_EBUG)
        abort();
    remember(t, status_of(code));
    *e = (lm_err){ 0 };
}

void lm_complain(lm_tool *t, lm_err *e)
{
    if (!e->code)
        return;
    show_place(e); /* before other ranks see it */
    stdout_lost |= !strcmp(e->where, standard_output);
    report(t, e, is_speaker(t, e));
}

void lm_complain_beside(lm_tool *t, lm_err *e)
{
    if (!e->code)
        return;
    show_place(e);
    report(t, e, t->rank == 0);
}

void lm_misuse(lm_tool *t, const char *where, const char *todo, const char *what, ...)
{
    lm_err e = { .code = LM_EUSAGE };
    va_list ap;

    snprintf(e.where, sizeof e.where, "%s", where ? where : "");
    snprintf(e.todo, sizeof e.todo, "%s", todo ? todo : "");
    va_start(ap, what);
    vsnprintf(e.what, sizeof e.what, what, ap);
    va_end(ap);
    lm_complain(t, &e);
    exit(lm_end(t));
}

lm_history_step lm_tool_step(const lm_tool *t)
{
    return (lm_history_step){ .tool = t->name,
                              .version = LM_VERSION,
                              .argv = t->told_argv,
                              .argc = t->told_argc,
                              .hide_paths = getenv("SOURCE_DATE_EPOCH") != NULL,
                              .none = !lm_the_frame.history };
}

lm_bundle_opts lm_tool_bundle(lm_tool *t, lm_par *par)
{
    return (lm_bundle_opts){ .tmpdir = t->tmpdir, .par = par, .sink = &t->sink };
}

lm_code lm_print_text(lm_code rc, lm_buf *text, const char *end)
{
    if (!rc) {
        fwrite(text->data, 1, text->len, stdout);
        fputs(end, stdout);
    }
    lm_buf_fini(text);
    return rc;
}

void lm_answer_no(lm_tool *t)
{
    remember(t, 3);
}

static void check_operands(lm_tool *t)
{
    char todo[160];

    if (t->filter && t->argc == 0 && t->min_args == 0) {
        static char dash[] = "-";

        t->argv[t->argc++] = dash;
    }
    if (t->argc >= t->min_args && (t->max_args < 0 || t->argc <= t->max_args))
        return;
    snprintf(todo, sizeof todo, "usage: %s [OPTION ...] %s", t->name, t->args ? t->args : "");
    if (t->argc < t->min_args)
        lm_misuse(t, "operands", todo, "%d given, %d needed", t->argc, t->min_args);
    lm_misuse(t, t->argv[t->max_args], todo, "one operand too many");
}

/* From here on rank 0 speaks, unless something is wrong. */
static void open_ranks(lm_tool *t)
{
    lm_err e = { 0 };

    if (lm_ranks_open(t, &e)) {
        lm_complain(t, &e);
        exit(lm_end(t));
    }
    if (t->rank > 0 && t->verbosity > LM_LOG_ERROR)
        t->verbosity = LM_LOG_ERROR;
    lm_sink_init(t);
}

static void say_facts(lm_tool *t)
{
    lm_say(t, LM_LOG_INFO, "version %s, kernels %s, threads %d, seed %lld", LM_VERSION,
           lm_cpu_level_name(t->cpu), t->threads, (long long)t->seed);
}

/* --help and similar options: true if one was given and printed. */
static bool print_and_no_more(lm_tool *t, lm_code *rc, lm_err *e)
{
    const lm_frame *f = &lm_the_frame;

    if (t->rank > 0) /* rank 0 prints it */
        return f->help || f->version || f->completion || f->print_config;
    if (f->help || f->version)
        (f->help ? lm_help_print : lm_version_print)(t);
    else if (f->completion)
        *rc = lm_completion_print(t, f->completion, e);
    else if (f->print_config)
        *rc = lm_options_print(t, e);
    else
        return false;
    return !*rc;
}

/* Of standard output the reason of a failed write is kept. */
static void open_stdout(void)
{
    FILE *f = lm_writer_open(lm_writer_stdout());

    if (!f) /* the usual stream remains */
        return;
    if (isatty(STDOUT_FILENO))
        setvbuf(f, NULL, _IOLBF, 0);
    stdout = f;
}

void lm_begin(lm_tool *t, int argc, char **argv)
{
    lm_err e = { 0 };
    lm_code rc;

    open_stdout();
    t->full_argc = argc;
    t->full_argv = argv;
    t->verbosity = LM_LOG_NOTICE;
    if (!t->device)
        t->device = "cpu";
    lm_ranks_look(t);
    lm_signals_init(t);
    lm_frame_build(t);
    lm_sink_init(t);
    rc = lm_options_parse(t, &e);
    lm_sink_init(t); /* with the requested verbosity */
    if (!rc && print_and_no_more(t, &rc, &e)) {
        only_help = true;
        exit(lm_end(t));
    }
    if (rc) {
        lm_complain(t, &e);
        exit(lm_end(t));
    }
    if (t->output && lm_path_is_stdout(t->output))
        t->output = "-";
    open_ranks(t);
    check_operands(t);
    lm_refuse_ending(t, t->output, t->makes);
    lm_refuse_run_link(t, t->output);
    say_facts(t);
}

/* Check that all output was written. */
static void close_stdout(lm_tool *t)
{
    lm_err e = { 0 };
    int why;
    bool bad;

    errno = 0;
    bad = fflush(stdout) || ferror(stdout);
    why = lm_writer_stdout()->error ? lm_writer_stdout()->error : errno;
    if (fclose(stdout) && !bad &&
        errno != EBADF) { /* started with a closed stdout, nothing written */
        bad = true;
        why = errno;
    }
    if (!bad || stdout_lost || (why == EPIPE && only_help))
        return;
    if (why == EPIPE && t->lasting) {
        lm_say(t, LM_LOG_WARN, "standard output: the reader has gone");
        return;
    }
    errno = why ? why : EIO;
    lm_fail_write(standard_output, &e);
    lm_complain(t, &e);
}

int lm_end(lm_tool *t)
{
    lm_sink_clear();
    close_stdout(t);
    lm_out_drop_all();
    if (lm_ranks_close(t))
        remember(t, 1);
    if (t->verbosity >= LM_LOG_INFO && !lm_the_frame.help && !lm_the_frame.version)
        lm_say(t, LM_LOG_INFO, "peak memory %.1f MiB", (double)lm_rss_peak() / 1048576);
    lm_free(t->argv);
    t->argv = NULL;
    lm_signal_raise();
    return t->status;
}
