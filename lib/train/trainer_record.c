/* SPDX-License-Identifier: Apache-2.0 */
/* trainer_record.c -- parts of a step as recordings, replayed step after step. */
#include "train/trainer_impl.h"

/* For the device's profiler, which sees nothing of what a recording is made of. */
static const char *const part_names[PARTS] = { "first micro-batch", "micro-batch", "gradient norm",
                                               "optimizer" };

static bool may_record(const lm_trainer *t, trainer_part p)
{
    return t->b->record_begin && t->part[p].ran && !t->as_it_is && !trainer_timed(t) &&
           (p != PART_UPDATE || lm_update_is_steady(t->program->update));
}

/* On refusal nothing has been done: the part may run as it is. */
static void record(lm_trainer *t, trainer_part p, trainer_work *run, const lm_step *step)
{
    lm_backend *b = t->b;
    lm_err refused = { 0 }, second = { 0 }, lost = { 0 };
    if (!b->record_begin(b, b->main, &refused)) {
        run(t, step, &refused);
        if (b->record_end(b, b->main, &t->part[p].recorded, &second) && !refused.code)
            refused = second;
    }
    if (!refused.code)
        return;
    t->as_it_is = true;
    b->sync(b, b->main, &lost); /* replays of other parts */
    trainer_unrecord(t);
    if (lost.code) /* the reason of the refusal, and told as the failure of the step */
        return;
    lm_log(t->io.sink, LM_LOG_WARN,
           "%s: steps are put there kernel by kernel, not as a recording: %s", b->name,
           refused.what);
}

static lm_code put(lm_trainer *t, trainer_part p, trainer_work *run, const lm_step *step, lm_err *e)
{
    lm_backend *b = t->b;
    if (may_record(t, p)) {
        if (!t->part[p].recorded)
            record(t, p, run, step);
        /* The update has the numbers that the last micro-batch left there. */
        bool numbers = p == PART_FIRST || p == PART_OTHER;
        if (t->part[p].recorded)
            return numbers && b->step(b, step, b->main, e)
                       ? e->code
                       : b->replay(b, t->part[p].recorded, b->main, e);
    }
    t->part[p].ran = true;
    return run(t, step, e);
}

lm_code trainer_put(lm_trainer *t, trainer_part p, trainer_work *run, const lm_step *step,
                    lm_err *e)
{
    t->b->range(t->b, part_names[p]);
    lm_code rc = put(t, p, run, step, e);
    t->b->range(t->b, NULL);
    return rc;
}

void trainer_unrecord(lm_trainer *t)
{
    for (int p = 0; p < PARTS; p++) {
        if (t->part[p].recorded)
            t->b->recording_free(t->b, t->part[p].recorded);
        t->part[p].recorded = NULL;
    }
}
