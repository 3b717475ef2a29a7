/* SPDX-License-Identifier: Apache-2.0 */
/* resume.c -- the schedule of a resumed run. */
#include "train/resume.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

typedef enum { KEEP, EXTEND, REWARM } how;
const char *const lm_resume_names[] = { "keep", "extend", "rewarm", NULL };

static const int64_t most = INT64_C(1) << 60;

/* The position of the schedule, from a checkpoint; older checkpoints have none, and began at 0. */
static lm_code read_place(const json_t *options, const char *where, int64_t steps, lm_schedule *s,
                          lm_err *e)
{
    const json_t *o = json_object_get(options, "schedule");
    int64_t from = 0, total = steps, warmup = s->warmup;
    double start = 0;
    if (json_is_object(o) && (lm_json_i64(o, "from", 0, most, &from, where, e) ||
                              lm_json_i64(o, "steps", 0, most, &total, where, e) ||
                              lm_json_i64(o, "warmup", 0, most, &warmup, where, e) ||
                              lm_json_f64_or(o, "start", 0, &start, where, e)))
        return e->code;
    s->from = from;
    s->total = total;
    s->warmup = warmup;
    s->start = start;
    return LM_OK;
}

/* The schedule of the checkpoint's run. */
static lm_code read_schedule(const json_t *o, const char *where, int64_t *steps, lm_schedule *s,
                             lm_err *e)
{
    const char *kind;
    if (lm_json_i64_or(o, "steps", 1000, 1, most, steps, where, e) ||
        lm_json_str_or(o, "lr-schedule", lm_sched_names[s->kind], &kind, where, e) ||
        lm_json_f64_or(o, "lr", s->lr, &s->lr, where, e) ||
        lm_json_f64_or(o, "min-lr-ratio", s->min_ratio, &s->min_ratio, where, e) ||
        lm_json_f64_or(o, "gamma", s->gamma, &s->gamma, where, e) ||
        lm_json_i64_or(o, "warmup", s->warmup, 0, most, &s->warmup, where, e) ||
        lm_json_i64_or(o, "decay-steps", -1, -1, most, &s->decay, where, e) ||
        lm_json_i64_or(o, "step-size", s->step_size, 1, most, &s->step_size, where, e) ||
        lm_json_i64_or(o, "cycles", s->cycles, 1, most, &s->cycles, where, e) ||
        read_place(o, where, *steps, s, e))
        return e->code;
    s->kind = lm_sched_find(kind);
    if (s->kind == LM_SCHED_COUNT)
        return lm_fail(e, LM_EFORMAT, where, NULL, "unknown lr-schedule \"%s\"", kind);
    s->decay = s->decay >= 0 ? s->decay : s->total / 10;
    return LM_OK;
}

static void lay_out(how h, const lm_resume_ask *ask, const lm_schedule *old, lm_schedule *s)
{
    if (h == EXTEND)
        s->total = ask->steps - s->from;
    if (h != REWARM)
        return;
    s->from = ask->step;
    s->total = ask->steps - ask->step;
    s->start = ask->step > 0 ? lm_schedule_lr(old, ask->step - 1) : 0;
    if (ask->warmup_given ? s->warmup > 0 : old->warmup > 0)
        return;
    s->warmup = s->total >= 100 ? s->total / 100 : 1;
}

/* Empty if the rate does not change. */
static void explain(how h, const lm_resume_ask *ask, const lm_schedule *old, const lm_schedule *s,
                    char note[256])
{
    static const char *const does[] = { "ends at step", "is laid out anew up to step",
                                        "begins anew and ends at step" };
    static const char *const others[] = { "extend or rewarm", "keep or rewarm", "keep or extend" };
    double before = lm_schedule_lr(old, ask->step - 1), now = lm_schedule_lr(s, ask->step),
           last = lm_schedule_lr(s, ask->steps - 1);
    char end[64] = ""; /* of more than one step */
    if (before == now && now == last)
        return;
    if (ask->steps > ask->step + 1)
        snprintf(end, sizeof end, " and %.3g at step %" PRId64, last, ask->steps);
    snprintf(note, 256,
             "the %s schedule %s %" PRId64 ": the learning rate was %.3g, is %.3g at step %" PRId64
             "%s (schedule continuation %s; the others are %s)",
             lm_sched_names[s->kind], does[h], s->from + s->total, before, now, ask->step + 1, end,
             lm_resume_names[h], others[h]);
}

lm_code lm_resume_schedule(const json_t *options, const char *where, const lm_resume_ask *ask,
                           lm_schedule *s, char note[256], lm_err *e)
{
    lm_schedule old = *s;
    int64_t before;
    how h = EXTEND;
    note[0] = 0;
    old.lr = ask->lr > 0 ? ask->lr : s->lr;
    if (read_schedule(options, where, &before, &old, e))
        return e->code;
    s->from = old.from;
    s->total = old.total;
    s->start = old.start;
    if (!ask->warmup_given)
        s->warmup = old.warmup;
    for (int i = KEEP; i <= REWARM; i++)
        if (ask->how && !strcmp(ask->how, lm_resume_names[i]))
            h = (how)i;
    bool change = (ask->how || ask->steps != before) && ask->steps > ask->step;
    if (change)
        lay_out(h, ask, &old, s);
    s->decay = ask->decay >= 0 ? ask->decay : s->total / 10;
    if (change && ask->step > 0)
        explain(h, ask, &old, s, note);
    return LM_OK;
}

lm_code lm_resume_keep_schedule(json_t *options, const lm_schedule *s, lm_err *e)
{
    json_t *o = json_pack("{s:I,s:I,s:I,s:f}", "from", (json_int_t)s->from, "steps",
                          (json_int_t)s->total, "warmup", (json_int_t)s->warmup, "start", s->start);
    if (!o || json_object_set_new(options, "schedule", o))
        return lm_fail(e, LM_ELIMIT, "options", NULL, "no memory for the schedule");
    return LM_OK;
}
