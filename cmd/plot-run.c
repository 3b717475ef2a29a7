/* SPDX-License-Identifier: Apache-2.0 */
/* plot-run -- draw the metrics of one or more runs, or a pipeline schedule.  See man/man1/plot-run.1. */
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/file.h"
#include "base/mem.h"
#include "base/stop.h"
#include "base/text.h"
#include "common/tool.h"
#include "format/chart.h"
#include "format/chart_experts.h"
#include "format/chart_runs.h"
#include "format/metrics.h"
#include "parallel/pipeline_draw.h"
#include "plot-run/schedule.h"

static struct {
    lm_strs keys, names;
    const char *x, *title, *format;
    double smooth, interval;
    bool log_x, log_y, eval, follow, experts;
    int64_t width, height;
    schedule_opts schedule;
} opt = { .x = "step", .eval = true, .interval = 1 };

static const char *const x_choices[] = { "step", "tokens", "seconds", NULL };
static const char *const format_choices[] = { "svg", "png", "text", "csv", NULL };

static const lm_opt options[] = {
    LM_GROUP("What is drawn"),
    LM_LIST('k', "key", &opt.keys, "KEY",
            "draw this number of the records, a panel each [reward, margins or loss]"),
    LM_CHOICE('x', "x", &opt.x, "AXIS", x_choices, "x axis: step, tokens or seconds [step]"),
    LM_REAL('s', "smooth", &opt.smooth, "BETA", 0, 0.99999,
            "moving average, 0.9 is usual [0: none]"),
    LM_FLAG(0, "eval", &opt.eval, "mark the values of evaluations [yes]"),
    LM_FLAG(0, "log-x", &opt.log_x, "logarithmic x axis"),
    LM_FLAG(0, "log-y", &opt.log_y, "logarithmic y axes"),
    LM_FLAG(0, "experts", &opt.experts,
            "a map instead: the load of each expert of a mixture over the steps"),
    LM_LIST('n', "name", &opt.names, "NAME", "names of the runs in the legend, in their order"),
    LM_STR('t', "title", &opt.title, "TEXT", "title [name of the run]"),
    LM_GROUP("A pipeline schedule instead"),
    LM_STR_OF(0, "schedule", &opt.schedule.spec, "NAME|FILE", lm_pipeline_names,
              "gpipe, 1f1b, interleaved:V, breadth-first:V, zb-h1, zb-h2, zb-v, dualpipe, "
              "dualpipev, or rows"),
    LM_STR(0, "mesh", &opt.schedule.mesh, "pp=N", "ranks"),
    LM_COUNT(0, "micro-batches", &opt.schedule.micros, "N", 1, LM_PIPE_MICROS, "of a step"),
    LM_STR(0, "costs", &opt.schedule.costs, "F,B,W,COMM",
           "ms of a rank: forward, gradients of inputs and weights, sending [1,1,1,0]"),
    LM_STR(0, "costs-file", &opt.schedule.costs_file, "FILE", "the same, a line for each stage"),
    LM_GROUP("Picture"),
    LM_CHOICE(0, "format", &opt.format, "FORMAT", format_choices,
              "svg, png or text; csv: rows of a schedule [by -o]"),
    LM_COUNT('w', "width", &opt.width, "N", 20, LM_CHART_MAX,
             "pixels [960], or columns of text [terminal]"),
    LM_COUNT(0, "height", &opt.height, "N", 6, LM_CHART_MAX,
             "pixels [540], or rows of text [terminal]"),
    LM_GROUP("While the run works"),
    LM_FLAG('F', "follow", &opt.follow, "draw again as the file grows, until its end record"),
    LM_TIME(0, "interval", &opt.interval, "TIME", 0.05, 86400, "seconds between reads [1s]"),
    LM_END
};

static const char *const examples[] = { "plot-run run.jsonl",
                                        "plot-run -s 0.9 -o loss.svg a.jsonl b.jsonl", NULL };

static lm_tool tool = {
    .name = "plot-run",
    .args = "[FILE ...]",
    .brief = "draw the metrics of runs, or a pipeline schedule, as SVG, PNG or in the terminal",
    .opts = options,
    .makes = LM_MAKES_OTHER,
    .use = LM_USE_OUTPUT | LM_USE_JSON,
    .max_args = -1,
    .filter = true,
    .examples = examples,
};

/* The runs of the command line; file[i] is NULL until it can be opened (--follow). */
static lm_metrics_file **file;
static const char **name;
static int runs;

/* Without --key: the key of the only panel, chosen again as files grow. */
static const char *usual_key[] = { "loss" };

static lm_run_chart request(void)
{
    lm_run_chart r = { .file = file,
                       .name = name,
                       .runs = runs,
                       .key = opt.keys.v,
                       .keys = opt.keys.n,
                       .x = opt.x,
                       .smooth = opt.smooth,
                       .eval = opt.eval,
                       .log_x = opt.log_x,
                       .log_y = opt.log_y,
                       .title = opt.title };

    if (opt.keys.v == usual_key)
        usual_key[0] = lm_run_chart_usual(&r);
    return r;
}

/* ---- output ---- */

static const char *pick_format(void)
{
    const char *dot = tool.output ? strrchr(lm_path_base(tool.output), '.') : NULL;

    if (opt.format)
        return opt.format;
    if (tool.json)
        return "json";
    if (!tool.output || !strcmp(tool.output, "-"))
        return "text";
    for (int i = 0; dot && format_choices[i]; i++)
        if (!strcmp(dot + 1, format_choices[i]))
            return format_choices[i];
    if (dot && !strcmp(dot, ".txt"))
        return "text";
    lm_misuse(&tool, tool.output, "name it .svg, .png or .txt, or give --format",
              "the name does not determine the format");
}

static bool want_color(void)
{
    const char *no = getenv("NO_COLOR"), *term = getenv("TERM");

    return !tool.output && isatty(STDOUT_FILENO) && !(no && *no) &&
           !(term && !strcmp(term, "dumb"));
}

static void text_size(int *cols, int *rows)
{
    struct winsize w;

    *cols = 80;
    *rows = 24;
    if (!tool.output && isatty(STDOUT_FILENO) && !ioctl(STDOUT_FILENO, TIOCGWINSZ, &w) &&
        w.ws_col >= 20 && w.ws_row >= 6) {
        *cols = w.ws_col < 1000 ? w.ws_col : 1000;
        *rows = (w.ws_row < 500 ? w.ws_row : 500) - 1; /* one line for the prompt */
        if (!opt.follow && *rows > 9 + 22 * opt.keys.n)
            *rows = 9 + 22 * opt.keys.n;
    }
    if (opt.width)
        *cols = (int)opt.width;
    if (opt.height)
        *rows = (int)opt.height;
}

static lm_code render(const lm_chart *c, const char *format, lm_buf *out, lm_err *e)
{
    int w = opt.width ? (int)opt.width : 960, cols, rows;
    int h = opt.height ? (int)opt.height : opt.keys.n < 2 ? 540 : 140 + 260 * opt.keys.n;

    if (h > LM_CHART_MAX)
        h = LM_CHART_MAX;
    if (!strcmp(format, "svg"))
        return lm_chart_svg(c, w, h, out, e);
    if (!strcmp(format, "png"))
        return lm_chart_png(c, w, h, out, e);
    text_size(&cols, &rows);
    return lm_chart_text(c, cols, rows, want_color(), out, e);
}

/* The map of the only run. */
static lm_code render_experts(const char *format, lm_arena *arena, lm_buf *out, lm_err *e)
{
    int w = opt.width ? (int)opt.width : 960, h = opt.height ? (int)opt.height : 540, cols, rows;
    lm_chart_map map;

    if (lm_experts_chart_make(file[0], opt.title ? opt.title : name[0], arena, &map, e))
        return e->code;
    if (!strcmp(format, "svg"))
        return lm_chart_map_svg(&map, w, h, out, e);
    if (!strcmp(format, "png"))
        return lm_chart_map_png(&map, w, h, out, e);
    text_size(&cols, &rows);
    return lm_chart_map_text(&map, cols, want_color(), out, e);
}

static lm_code render_lanes(const schedule *s, const char *format, lm_arena *arena, lm_buf *out,
                            lm_err *e)
{
    int w = opt.width ? (int)opt.width : 960,
        h = opt.height ? (int)opt.height : 120 + 34 * s->rows.ranks, cols, rows;
    lm_chart_lanes lanes;

    if (lm_pipeline_chart(&s->rows, &s->times, s->cost, s->name, opt.title, arena, &lanes, e))
        return e->code;
    h = h < LM_CHART_MIN ? LM_CHART_MIN : h > LM_CHART_MAX ? LM_CHART_MAX : h;
    if (!strcmp(format, "svg"))
        return lm_chart_lanes_svg(&lanes, w, h, out, e);
    if (!strcmp(format, "png"))
        return lm_chart_lanes_png(&lanes, w, h, out, e);
    text_size(&cols, &rows);
    return lm_chart_lanes_text(&lanes, cols, want_color(), out, e);
}

static lm_code render_schedule(const char *format, lm_arena *arena, lm_buf *out, lm_err *e)
{
    schedule s;

    if (!schedule_open(&opt.schedule, &s, e)) {
        if (!strcmp(format, "csv"))
            (void)lm_pipeline_write(&s.rows, out, e);
        else if (!strcmp(format, "json"))
            (void)(lm_pipeline_json(&s.rows, &s.times, s.name, out, e) ||
                   lm_buf_add(out, "\n", 1, e));
        else
            (void)render_lanes(&s, format, arena, out, e);
    }
    schedule_fini(&s);
    return e->code;
}

static lm_code render_runs(const char *format, lm_arena *arena, lm_buf *out, lm_err *e)
{
    lm_run_chart r = request();
    lm_chart chart;

    if (lm_run_chart_make(&r, arena, &chart, e))
        return e->code;
    return render(&chart, format, out, e);
}

/* With --follow on a terminal, each picture is written over the previous one. */
static void show_again(const lm_buf *text, bool first)
{
    const char *from = text->data, *end = text->data + text->len;

    fputs(first ? "\033[H\033[2J" : "\033[H", stdout);
    while (from < end) {
        const char *nl = memchr(from, '\n', (size_t)(end - from));
        size_t len = nl ? (size_t)(nl - from) : (size_t)(end - from);

        fwrite(from, 1, len, stdout);
        fputs("\033[K\n", stdout);
        from += len + 1;
    }
    fputs("\033[J", stdout);
    fflush(stdout);
}

/* `out`: opened before the work began, or NULL for standard output. */
static lm_code draw(const char *format, lm_out *out, bool first, lm_err *e)
{
    lm_arena *arena = NULL;
    lm_buf b = { 0 };
    lm_code rc = lm_arena_new(&arena, 1 << 16, e);

    if (!rc)
        rc = (opt.schedule.spec ? render_schedule
              : opt.experts     ? render_experts
                                : render_runs)(format, arena, &b, e);
    if (!rc && out) {
        rc = lm_write_all(lm_out_fd(out), b.data, b.len, lm_out_path(out), e);
        if (!rc)
            rc = lm_out_commit(out, e);
        else
            lm_out_drop(out);
        out = NULL;
    } else if (!rc && opt.follow && isatty(STDOUT_FILENO) && !strcmp(format, "text")) {
        show_again(&b, first);
    } else if (!rc) {
        fwrite(b.data, 1, b.len, stdout);
    }
    lm_out_drop(out);
    lm_buf_fini(&b);
    lm_arena_free(arena);
    return rc;
}

/* ---- reading ---- */

/* Open run i if it is not yet open.  With --follow a file that does not exist yet is not a
 * failure. */
static lm_code open_run(int i, lm_err *e)
{
    lm_code rc;

    if (file[i])
        return LM_OK;
    rc = lm_metrics_file_open(tool.argv[i], &file[i], e);
    if (rc == LM_EIO && opt.follow && e->sys == ENOENT) {
        *e = (lm_err){ 0 };
        return LM_OK;
    }
    return rc;
}

static lm_code poll_runs(bool last, bool *grew, bool *ended, lm_err *e)
{
    *grew = false;
    *ended = true;
    for (int i = 0; i < runs; i++) {
        bool more = false;
        lm_code rc = open_run(i, e);

        if (!rc && file[i])
            rc = lm_metrics_file_poll(file[i], last, &more, e);
        if (rc)
            return rc;
        *grew |= more;
        *ended &= file[i] && (lm_metrics_file_status(file[i]) || lm_metrics_file_eof(file[i]));
    }
    return LM_OK;
}

static void warn_skipped(void)
{
    for (int i = 0; i < runs; i++)
        if (file[i] && lm_metrics_file_skipped(file[i]) > 0)
            lm_say(&tool, LM_LOG_WARN, "%s: line %lld: not a JSON object; %lld such line%s skipped",
                   lm_path_shown(tool.argv[i]), (long long)lm_metrics_file_first_skipped(file[i]),
                   (long long)lm_metrics_file_skipped(file[i]),
                   lm_plural(lm_metrics_file_skipped(file[i])));
}

/* Names for the legend: --name, otherwise the file's name, or its path if two names would be
 * equal. */
static lm_code name_runs(lm_err *e)
{
    lm_code rc = lm_alloc_n(&name, (size_t)runs, sizeof *name, "names of runs", e);

    if (rc)
        return rc;
    for (int i = 0; i < runs; i++) {
        const char *base = lm_path_base(tool.argv[i]);
        bool twice = false;

        for (int j = 0; j < runs; j++)
            twice |= j != i && !strcmp(lm_path_base(tool.argv[j]), base);
        name[i] = i < opt.names.n ? opt.names.v[i] : twice ? tool.argv[i] : base;
        name[i] = lm_path_shown(name[i]);
    }
    return LM_OK;
}

/* Sleep until a signal at most. */
static void wait_for_news(void)
{
    double until = lm_now() + opt.interval;

    while (!lm_stopping() && lm_now() < until) {
        double left = fmin(until - lm_now(), 0.05);
        struct timespec t = { .tv_nsec = (long)(fmax(left, 0) * 1e9) };
        nanosleep(&t, NULL);
    }
}

static lm_code follow(const char *format, lm_err *e)
{
    bool screen = !tool.output && isatty(STDOUT_FILENO), first = true, pending = false;
    bool force = tool.force, ended = false;
    lm_code rc = LM_OK;

    while (!rc && !ended && !lm_stopping()) {
        bool grew;

        rc = poll_runs(false, &grew, &ended, e);
        pending |= grew;
        /* On an output that cannot be overwritten, one picture at the end is enough. */
        if (!rc && pending && (screen || (tool.output && strcmp(tool.output, "-")) || ended)) {
            lm_out *out = NULL;
            if (tool.output)
                rc = lm_out_open(tool.output, force || !first, &out, e);
            if (!rc)
                rc = draw(format, out, first, e);
            first = pending = false;
        }
        if (!rc && !ended)
            wait_for_news();
    }
    return rc;
}

static lm_code plot_once(const char *format, lm_err *e)
{
    lm_run_chart r;
    lm_out *out = NULL;
    bool grew, ended;
    lm_code rc = LM_OK;

    if (tool.output)
        rc = lm_out_open(tool.output, tool.force, &out, e);
    if (!rc && opt.schedule.spec)
        return draw(format, out, true, e);
    if (!rc)
        rc = poll_runs(true, &grew, &ended, e);
    r = request();
    if (!rc && !opt.experts)
        rc = lm_run_chart_check(&r, e);
    if (rc || lm_stopping()) {
        lm_out_drop(out);
        return rc;
    }
    return draw(format, out, true, e);
}

/* Options of schedules without one, and those of runs beside one. */
static void check_schedule(const char *format)
{
    const schedule_opts *s = &opt.schedule;
    static const char *const only_runs[] = { "key",   "x",       "smooth", "eval",   "log-x",
                                             "log-y", "experts", "name",   "follow", NULL };

    if (!s->spec && (s->mesh || s->micros || s->costs || s->costs_file))
        lm_misuse(&tool,
                  s->mesh     ? "--mesh"
                  : s->micros ? "--micro-batches"
                  : s->costs  ? "--costs"
                              : "--costs-file",
                  NULL, "serves --schedule only");
    if (!s->spec && (tool.json || !strcmp(format, "csv")))
        lm_misuse(&tool, tool.json ? "--json" : "--format", "the metrics are JSON themselves",
                  "serves --schedule only");
    if (s->spec && tool.json && opt.format)
        lm_misuse(&tool, "--json", "leave one of them out", "cannot be combined with --format");
    for (int i = 0; s->spec && only_runs[i]; i++)
        if (lm_given(&tool, only_runs[i]))
            lm_misuse(&tool, "--schedule", NULL, "is not drawn with --%s", only_runs[i]);
    if (s->spec && (runs > 1 || strcmp(tool.argv[0], "-")))
        lm_misuse(&tool, tool.argv[0], "leave out the run", "--schedule draws no metrics");
}

static void check_request(const char *format)
{
    bool text = !strcmp(format, "text");

    check_schedule(format);
    if (opt.names.n > runs)
        lm_misuse(&tool, "--name", NULL, "%d names for %d run%s", opt.names.n, runs,
                  lm_plural(runs));
    if (opt.experts && (runs != 1 || opt.follow))
        lm_misuse(&tool, "--experts", "name one run, without --follow", "draws a map of one run");
    if (!strcmp(format, "png") && (!tool.output || !strcmp(tool.output, "-")) &&
        isatty(STDOUT_FILENO) && !tool.force)
        lm_misuse(&tool, "standard output", "give -o FILE.png", "a terminal cannot show PNG");
    if ((text && opt.width > 1000) || (!text && opt.width && opt.width < LM_CHART_MIN))
        lm_misuse(&tool, "--width", NULL, "%lld: must be %s", (long long)opt.width,
                  text ? "20 to 1000 columns" : "160 to 16384 pixels");
    if ((text && opt.height > 500) || (!text && opt.height && opt.height < LM_CHART_MIN))
        lm_misuse(&tool, "--height", NULL, "%lld: must be %s", (long long)opt.height,
                  text ? "6 to 500 rows" : "160 to 16384 pixels");
    for (int i = 0; i < runs; i++)
        lm_refuse_same(&tool, tool.output, tool.argv[i]);
    lm_refuse_twice(&tool, NULL, 0);
}

int main(int argc, char **argv)
{
    lm_err e = { 0 };
    const char *format;

    lm_begin(&tool, argc, argv);
    runs = tool.argc;
    if (opt.keys.n == 0)
        opt.keys = (lm_strs){ usual_key, 1 };
    format = pick_format();
    check_request(format);
    if (!lm_alloc_n(&file, (size_t)runs, sizeof *file, "runs", &e) && !name_runs(&e))
        (void)(opt.follow ? follow(format, &e) : plot_once(format, &e));
    warn_skipped();
    lm_complain(&tool, &e);
    for (int i = 0; file && i < runs; i++)
        lm_metrics_file_close(file[i]);
    lm_free(file);
    lm_free(name);
    return lm_end(&tool);
}
