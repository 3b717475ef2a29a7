/* SPDX-License-Identifier: Apache-2.0 */
/* schedule.c -- from the options of plot-run to a pipeline schedule and its times. */
#include "plot-run/schedule.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "base/file.h"
#include "base/text.h"

enum { FILE_MOST = 1 << 28, COSTS = 4 };

/* "pp=8"; 0: not given. */
static lm_code read_mesh(const schedule_opts *o, int64_t *ranks, lm_err *e)
{
    *ranks = 0;
    if (!o->mesh)
        return LM_OK;
    if (strncmp(o->mesh, "pp=", 3) || !lm_parse_count(o->mesh + 3, ranks) || *ranks < 1)
        return lm_fail(e, LM_EUSAGE, "--mesh", "write pp=8: a schedule has this axis only",
                       "'%s' is not a number of ranks", o->mesh);
    return LM_OK;
}

static lm_code read_rows(const schedule_opts *o, int64_t ranks, lm_pipeline *out, lm_err *e)
{
    lm_buf text = { 0 };

    if (!lm_file_read(o->spec, FILE_MOST, &text, e))
        (void)lm_pipeline_read(text.data ? text.data : "", text.len, lm_path_shown(o->spec), out,
                               e);
    lm_buf_fini(&text);
    if (!e->code && ((ranks && ranks != out->ranks) || (o->micros && o->micros != out->micros)))
        return lm_fail(e, LM_EUSAGE, lm_path_shown(o->spec), "leave out --mesh and --micro-batches",
                       "has %" PRId32 " ranks and %" PRId32 " micro-batches", out->ranks,
                       out->micros);
    return e->code;
}

/* "F,B,W" or "F,B,W,COMM", of which `part` is a stage's. */
static lm_code read_costs(const char *text, double part, const char *where, lm_pipe_cost *out,
                          lm_err *e)
{
    double v[COSTS] = { 0 };
    int n;
    bool ok = lm_parse_list(text, v, COSTS, &n) && n >= 3;

    for (int i = 0; i < COSTS; i++)
        ok = ok && v[i] >= 0 && v[i] < 1e12;
    if (!ok)
        return lm_fail(e, LM_EUSAGE, where, "write milliseconds, none below 0: 2,2,1.5,0.1",
                       "'%.60s' is not F,B,W,COMM", text);
    *out = (lm_pipe_cost){ v[0] * part, v[1] * part, v[2] * part, v[3] };
    return LM_OK;
}

/* A line for each stage. */
static lm_code read_costs_file(const char *path, schedule *s, lm_err *e)
{
    lm_buf text = { 0 };
    char *line, *rest;
    int32_t n = 0;

    if (lm_file_read(path, FILE_MOST, &text, e))
        return e->code;
    rest = text.data;
    while (!e->code && rest && (line = strsep(&rest, "\n"))) {
        size_t len = strlen(line);

        if (len && line[len - 1] == '\r')
            line[len - 1] = '\0';
        if (!*line)
            continue;
        if (n < s->rows.stages)
            (void)read_costs(line, 1, lm_path_shown(path), &s->cost[n], e);
        n++;
    }
    lm_buf_fini(&text);
    if (!e->code && n != s->rows.stages)
        return lm_fail(e, LM_EUSAGE, lm_path_shown(path), "write a line for each stage",
                       "%" PRId32 " lines for %" PRId32 " stages", n, s->rows.stages);
    return e->code;
}

static lm_code set_costs(const schedule_opts *o, schedule *s, lm_err *e)
{
    lm_pipe_cost all;
    double sum = 0;

    if (o->costs && o->costs_file)
        return lm_fail(e, LM_EUSAGE, "--costs", "give one of them", "is given with --costs-file");
    if (lm_alloc_n(&s->cost, (size_t)s->rows.stages, sizeof *s->cost, "costs of stages", e))
        return e->code;
    if (o->costs_file && read_costs_file(o->costs_file, s, e))
        return e->code;
    if (!o->costs_file && read_costs(o->costs ? o->costs : "1,1,1,0",
                                     (double)s->rows.ranks / s->rows.stages, "--costs", &all, e))
        return e->code;
    for (int i = 0; i < s->rows.stages; i++) {
        s->cost[i] = o->costs_file ? s->cost[i] : all;
        sum += s->cost[i].f + s->cost[i].b + s->cost[i].w;
    }
    if (!(sum > 0))
        return lm_fail(e, LM_EUSAGE, o->costs_file ? "--costs-file" : "--costs", NULL,
                       "no step takes time");
    return LM_OK;
}

lm_code schedule_open(const schedule_opts *o, schedule *out, lm_err *e)
{
    int64_t ranks;

    *out = (schedule){ .name = o->spec };
    if (read_mesh(o, &ranks, e))
        return e->code;
    if (!lm_pipeline_is_name(o->spec) && strpbrk(o->spec, "./")) {
        out->name = lm_path_shown(lm_path_base(o->spec));
        (void)read_rows(o, ranks, &out->rows, e);
    } else if (lm_pipeline_is_name(o->spec) && (!ranks || !o->micros)) {
        return lm_fail(e, LM_EUSAGE, "--schedule", "give --mesh pp=N and --micro-batches N",
                       "'%s' has no sizes of its own", o->spec);
    } else {
        (void)lm_pipeline_make(o->spec, ranks, o->micros, &out->rows, e);
    }
    if (!e->code && !set_costs(o, out, e))
        (void)lm_pipeline_time(&out->rows, out->cost, &out->times, e);
    return e->code;
}

void schedule_fini(schedule *s)
{
    lm_pipe_times_fini(&s->times, s->rows.ranks);
    lm_free(s->cost);
    lm_pipeline_fini(&s->rows);
}
