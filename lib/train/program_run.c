/* SPDX-License-Identifier: Apache-2.0 */
/* program_run.c -- sections of a program on the main stream, node by node or as recordings. */
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/mem.h"
#include "train/program.h"

/* ---- executors ---- */

static const char *const names[LM_SECTIONS] = {
    [LM_SECTION_FORWARD] = "forward",       [LM_SECTION_FIRST] = "first micro-batch",
    [LM_SECTION_OTHER] = "micro-batch",     [LM_SECTION_START] = "first states",
    [LM_SECTION_PENALTY] = "penalties",     [LM_SECTION_NORM] = "gradient norm",
    [LM_SECTION_BEFORE] = "samples before", [LM_SECTION_STEP] = "optimizer",
    [LM_SECTION_AFTER] = "samples after",   [LM_SECTION_SHOW] = "averages",
    [LM_SECTION_CHECK] = "norm of weights",
};

static void lay_out(lm_program *p)
{
    for (int s = 0; s < LM_SECTIONS; s++) {
        lm_section *x = &p->section[s];
        bool micro = s < LM_SECTION_UPDATE;
        *x = (lm_section){ .name = names[s],
                           .graph = micro ? p->train->graph : lm_update_graph(p->update),
                           .exec = micro ? p->exec : p->updating,
                           .numbered = micro,
                           .recordable = micro || s == LM_SECTION_PENALTY || s == LM_SECTION_NORM ||
                                         (s == LM_SECTION_STEP && lm_update_is_steady(p->update)) };
        if (micro) {
            size_t half = p->o.halves ? p->train->backward : 0;
            x->first = s == LM_SECTION_FORWARD ? 0 : half;
            x->last = s == LM_SECTION_FORWARD ? half : x->graph->n_nodes;
        } else
            lm_update_part_at(p->update, (lm_update_part)(s - LM_SECTION_UPDATE), &x->first,
                              &x->last);
    }
}

static lm_code time_nodes(lm_program *p, bool on, lm_err *e)
{
    return lm_exec_timing(p->exec, on, e) || lm_exec_timing(p->updating, on, e) ? e->code : LM_OK;
}

lm_code lm_program_ready(lm_program *p, bool timed, lm_sink *sink, lm_err *e)
{
    const lm_graph *update = lm_update_graph(p->update);
    size_t lines = p->train->graph->n_nodes + update->n_nodes;
    p->sink = sink;
    p->timed = timed || p->backend->host_memory;
    p->unrecorded = false;
    if (lm_alloc_n(&p->times, lines, sizeof *p->times, "times of operators", e) ||
        lm_exec_new_planned(p->train->graph, p->backend, &p->train_plan, NULL, &p->exec, e) ||
        lm_exec_new_planned(update, p->backend, &p->update_plan, p->exec, &p->updating, e) ||
        time_nodes(p, p->timed, e)) {
        lm_program_rest(p);
        return e->code;
    }
    lay_out(p);
    return LM_OK;
}

static void forget(lm_program *p)
{
    for (int s = 0; s < LM_SECTIONS; s++) {
        if (p->section[s].recorded)
            p->backend->recording_free(p->backend, p->section[s].recorded);
        p->section[s].recorded = NULL;
    }
}

void lm_program_rest(lm_program *p)
{
    forget(p);
    lm_exec_free(p->updating);
    lm_exec_free(p->exec);
    lm_free(p->times);
    p->exec = p->updating = NULL;
    p->times = NULL;
    p->trace = NULL;
}

bool lm_program_timed(const lm_program *p)
{
    return p->timed || p->trace;
}

lm_code lm_program_trace(lm_program *p, lm_trace *trace, lm_err *e)
{
    p->trace = trace;
    return time_nodes(p, lm_program_timed(p), e);
}

/* ---- running ---- */

static lm_code run_nodes(lm_program *p, const lm_section *s, const lm_step *step, lm_err *e)
{
    const bool *due = s->exec == p->updating ? lm_update_due(p->update, p->updates) : NULL;
    double began = lm_now();
    if (lm_exec_run_part(s->exec, s->first, s->last, due, step, e))
        return e->code;
    if (p->trace)
        lm_trace_exec(p->trace, 0, s->graph, s->exec, s->first, s->last,
                      s->exec == p->exec ? step->micro : -1, began);
    return LM_OK;
}

typedef struct {
    lm_program *p;
    const lm_section *s;
    const lm_step *step;
} section_run;

static lm_code run_recorded(void *ctx, lm_err *e)
{
    const section_run *r = ctx;
    return run_nodes(r->p, r->s, r->step, e);
}

/* After a refusal the section runs node by node. */
static void record(lm_program *p, lm_section *s, const lm_step *step)
{
    lm_backend *b = p->backend;
    section_run r = { p, s, step };
    lm_err refused = { 0 }, lost = { 0 };
    if (!lm_record(b, run_recorded, &r, &s->recorded, &refused))
        return;
    p->unrecorded = true;
    b->sync(b, b->main, &lost); /* replays of other sections */
    forget(p);
    if (lost.code) /* device lost: the step itself will report it */
        return;
    lm_log(p->sink, LM_LOG_WARN, "%s: steps run without a recording: %s", b->name, refused.what);
}

static lm_code run_section(lm_program *p, lm_section *s, const lm_step *step, lm_err *e)
{
    lm_backend *b = p->backend;
    if (b->record_begin && s->recordable && s->ran && !p->unrecorded && !lm_program_timed(p)) {
        if (!s->recorded)
            record(p, s, step);
        if (s->recorded)
            return s->numbered && b->step(b, step, b->main, e)
                       ? e->code
                       : b->replay(b, s->recorded, b->main, e);
    }
    s->ran = true;
    return run_nodes(p, s, step, e);
}

lm_code lm_program_run(lm_program *p, lm_section_id id, const lm_step *step, lm_err *e)
{
    lm_section *s = &p->section[id];
    if (s->first == s->last)
        return LM_OK;
    p->backend->range(p->backend, s->name);
    lm_code rc = run_section(p, s, step, e);
    p->backend->range(p->backend, NULL);
    return rc;
}

lm_code lm_program_run_nodes(lm_program *p, lm_section_id id, size_t first, size_t last,
                             const lm_step *step, lm_err *e)
{
    lm_section s = p->section[id];
    s.first = first;
    s.last = last;
    return first < last ? run_nodes(p, &s, step, e) : LM_OK;
}

lm_code lm_program_run_stage(lm_program *p, int stage, lm_stage_kind kind, const lm_step *step,
                             lm_err *e)
{
    const lm_stage *at = &p->train->stages->stage[stage];
    const lm_section s = {
        .graph = p->train->graph, .exec = p->exec, .first = at->first[kind], .last = at->last[kind]
    };
    return s.first < s.last ? run_nodes(p, &s, step, e) : LM_OK;
}

/* ---- times ---- */

static int by_seconds(const void *a, const void *b)
{
    const lm_exec_time *x = a, *y = b;
    return x->seconds > y->seconds ? -1 : x->seconds < y->seconds;
}

size_t lm_program_times(lm_program *p, const lm_exec_time **out)
{
    lm_exec *const exec[] = { p->exec, p->updating };
    size_t n = 0;
    for (int i = 0; i < 2; i++) {
        const lm_exec_time *line;
        size_t k = lm_exec_times(exec[i], &line);
        memcpy(p->times + n, line, k * sizeof *line);
        n += k;
    }
    qsort(p->times, n, sizeof *p->times, by_seconds);
    *out = p->times;
    return n;
}
