/* SPDX-License-Identifier: Apache-2.0 */
/* trainer_step.c -- one optimiser step.
 *
 * All work is enqueued on the main stream, and the device makes all decisions: loss and squared
 * gradients are summed there, and the optimiser does not write when one of them is not finite.
 * Meanwhile the host draws the next batches, waits once, and reads the results.
 *
 * On a device the sections of a step are recordings (program_run.c), so the arguments of kernels
 * must not change from step to step: each micro-batch is copied to the same memory, with the
 * optimiser's numbers. */
#include <inttypes.h>
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "train/trainer_impl.h"

/* Marks around the optimiser's part.  On the host there may be a wait for a checkpoint between the
 * second and the third. */
enum { MARK_BEGIN, MARK_NORM, MARK_UPDATE, MARK_END, MARKS };

lm_code trainer_marks(lm_trainer *t, lm_err *e)
{
    return t->b->marks_new(t->b, MARKS, &t->marks, e);
}

/* ---- batches ---- */

static lm_batch *batch_of(const lm_trainer *t, int set, int64_t micro)
{
    return &t->batch[trainer_has_one_batch(t) ? 0 : set * t->micros + micro];
}

/* The host's time for data. */
static void count_data(lm_trainer *t, double began)
{
    double ended = lm_now();
    t->r.seconds_data += ended - began;
    if (t->tracing)
        lm_trace_span(t->trace, TRACE_DATA, "draw", began, ended);
}

/* lambda / D of each row's loss of a module, divided by T as the model's own (arXiv:2412.19437, eq. 24 and 25). */
static double ahead_scale(const lm_trainer *t, int64_t valid)
{
    const int64_t n = lm_model_losses_ahead(t->program->train);
    return n ? t->o.ahead_weight / (double)n / (double)valid : 0;
}

/* What determines the scale of the gradients of a step, and its FLOPs: whole numbers. */
enum {
    COUNT_VALID,
    COUNT_PAIRS,
    COUNT_NEAR, /* pairs inside each window */
    COUNT_AHEAD = COUNT_NEAR + LM_MOST_WINDOWS,
    COUNTS = COUNT_AHEAD + LM_MOST_AHEAD
};

/* Add those of this rank's micro-batches, of which the first window is `sample`.  With one batch they are filled one after
 * another (hand_over), otherwise now. */
static lm_code count_batches(lm_trainer *t, int set, int64_t sample, double n[COUNTS], lm_err *e)
{
    const lm_config *c = t->io.config;
    int64_t window[LM_MOST_WINDOWS];
    const int windows = lm_config_windows(c, window);
    const bool late = trainer_has_one_batch(t), both = lm_config_bidirectional(c);
    for (int64_t i = 0; i < t->micros; i++, sample += t->o.batch) {
        lm_batch *b = batch_of(t, set, i);
        t->held = -1;
        if (late)
            lm_batch_mark(b, t->train_feed, sample);
        else if (lm_batch_fill(b, t->train_feed, sample, INT64_MAX, e))
            return e->code;
        lm_batch_fill_ahead(b);
        for (int64_t k = 0; k < b->ahead; k++)
            n[COUNT_AHEAD + k] += (double)b->ahead_valid[k];
        n[COUNT_VALID] += (double)b->valid;
        n[COUNT_PAIRS] += (double)lm_batch_pairs(b, 0, both);
        for (int k = 0; k < windows; k++)
            n[COUNT_NEAR + k] += (double)lm_batch_pairs(b, window[k], both);
    }
    return LM_OK;
}

/* This rank's micro-batches of step number `step`, before which there were `updates`, and whose first window is `sample`:
 * set the scale of the gradients and the optimiser's numbers, and send them. */
static lm_code draw(lm_trainer *t, int set, int64_t step, int64_t updates, int64_t sample,
                    lm_err *e)
{
    const double began = lm_now(), lr = lm_schedule_lr(&t->o.schedule, step);
    double n[COUNTS] = { 0 };
    if (count_batches(t, set, sample + t->first * t->o.batch, n, e))
        return e->code;
    count_data(t, began);
    if (trainer_ranks_count(t, n, COUNTS, e))
        return e->code;
    const int64_t valid = (int64_t)n[COUNT_VALID];
    for (int64_t i = 0; i < (trainer_has_one_batch(t) ? 1 : t->micros); i++) {
        lm_batch *b = batch_of(t, set, i);
        lm_batch_scale(b, valid ? (float)(1.0 / (double)valid) : 0.0f);
        lm_batch_scale_ahead(b, valid ? (float)ahead_scale(t, valid) : 0.0f);
        *b->daux = 1.0f / (float)t->o.accumulate;
        lm_update_numbers_at(t->program->update, lr, updates, b->now);
        if (lm_batch_push(b, t->copies, e))
            return e->code;
    }
    t->valid[set] = valid;
    for (int64_t k = 0; k < LM_MOST_AHEAD; k++)
        t->ahead_valid[set][k] = (int64_t)n[COUNT_AHEAD + k];
    t->flops[set] =
        trainer_flops(t, (double)t->plan.tokens_per_step, n[COUNT_PAIRS], &n[COUNT_NEAR]);
    return LM_OK;
}

static int64_t windows_a_step(const lm_trainer *t)
{
    return t->o.accumulate * t->o.batch;
}

/* Main waits for the batches of this step.  Those of the next step may be overwritten once main has
 * finished the earlier step that read them. */
static lm_code take_batches(lm_trainer *t, lm_err *e)
{
    if (!t->drawn && draw(t, t->set, t->s.step, t->s.updates, t->s.sample, e))
        return e->code;
    t->drawn = false;
    return t->b->follow(t->b, t->b->main, t->copies, e) ||
                   t->b->follow(t->b, t->copies, t->b->main, e)
               ? e->code
               : LM_OK;
}

/* Called while the device works. */
static lm_code draw_ahead(lm_trainer *t, lm_err *e)
{
    int next = (t->set + 1) % t->sets;
    if (t->sets > 1 && t->s.step + 1 < t->o.steps) {
        if (draw(t, next, t->s.step + 1, t->s.updates + (t->valid[t->set] > 0),
                 t->s.sample + windows_a_step(t), e))
            return e->code;
        t->drawn = true;
    }
    t->set = next;
    return LM_OK;
}

/* ---- forward and backward ---- */

lm_code trainer_hand_over(lm_trainer *t, int64_t i, lm_err *e)
{
    const int64_t sample = t->s.sample + (t->first + i) * t->o.batch;
    lm_batch *b = batch_of(t, t->set, i);
    double began = lm_now();
    if (t->input)
        return t->b->copy(t->b, t->input, b->rooms.dev, b->rooms.bytes, t->b->main, e);
    if (t->held == sample)
        return LM_OK;
    if (lm_batch_fill(b, t->train_feed, sample, INT64_MAX, e))
        return e->code;
    t->held = sample;
    lm_batch_fill_ahead(b);
    count_data(t, began);
    return LM_OK;
}

static lm_code run_micros(lm_trainer *t, lm_err *e)
{
    lm_step step = { .seed = t->o.seed, .step = t->s.step };
    const int64_t leaf = t->o.accumulate / t->o.leaves; /* micro-batches */
    for (int64_t i = 0; i < t->micros; i++) {
        step.micro = t->first + i;
        step.more = i % leaf > 0;
        if (!step.more)
            trainer_addends_clear(t);
        if (trainer_hand_over(t, i, e) ||
            trainer_ahead_run(t, step.more ? LM_SECTION_OTHER : LM_SECTION_FIRST, i, &step, e) ||
            ((i + 1) % leaf == 0 && trainer_addends_join(t, e)) ||
            trainer_ranks_add(t, i, &step, e))
            return e->code;
    }
    return LM_OK;
}

static lm_code forward_backward(lm_trainer *t, lm_err *e)
{
    if (t->pipe ? trainer_pipe_step(t, e) : run_micros(t, e))
        trainer_ahead_drop(t, e);
    return e->code;
}

/* ---- the optimiser ---- */

lm_code trainer_update(lm_trainer *t, lm_section_id s, int64_t step, lm_err *e)
{
    const lm_step now = { .seed = t->o.seed, .step = step };
    t->program->updates = t->s.updates;
    return lm_program_run(t->program, s, &now, e);
}

/* The parameters are stored in the memory of the gradients, which is unused between steps. */
lm_code trainer_show(lm_trainer *t, lm_err *e)
{
    if (!lm_update_shows(t->program->update))
        return LM_OK;
    return lm_store_stash(t->s.store, false, e) ||
                   trainer_update(t, LM_SECTION_SHOW, t->s.step, e) || trainer_share_gather(t, e)
               ? e->code
               : LM_OK;
}

/* Also waits for a checkpoint's bytes, which are read from there. */
lm_code trainer_hide(lm_trainer *t, lm_err *e)
{
    if (!lm_update_shows(t->program->update))
        return LM_OK;
    if (trainer_save_copied(t, e) || lm_store_stash(t->s.store, true, e))
        return e->code;
    lm_store_derive(t->s.store);
    return trainer_share_gather(t, e);
}

static void mark(lm_trainer *t, int i)
{
    if (lm_program_timed(t->program))
        t->b->mark(t->b, t->marks, i, t->b->main);
}

/* Samples of a logged step. */
static lm_code sample(lm_trainer *t, const step_info *i, bool before, lm_err *e)
{
    if (!i->logged)
        return LM_OK;
    if (trainer_update(t, before ? LM_SECTION_BEFORE : LM_SECTION_AFTER, t->s.step, e))
        return e->code;
    for (int k = before ? 0 : 2; trainer_shares(t) && k < (before ? 2 : 3); k++)
        if (trainer_share_samples(t, lm_monitor_samples(t->monitor, k), e))
            return e->code;
    return before ? lm_monitor_before(t->monitor, e) : lm_monitor_after(t->monitor, e);
}

/* The blocks may be changed from here on; in later steps this looks whether the writer has ended. */
static lm_code wait_copied(lm_trainer *t, lm_err *e)
{
    const bool meets = t->copying;
    t->copying = false;
    if (trainer_save_copied(t, e))
        return e->code;
    if (meets)
        trainer_ranks_pause_all(t, lm_now() - t->last_save);
    return meets ? trainer_ranks_go_on(t, e) : LM_OK;
}

static lm_code update(lm_trainer *t, const step_info *i, lm_err *e)
{
    double began;
    mark(t, MARK_BEGIN);
    if (i->tokens && trainer_update(t, LM_SECTION_PENALTY, t->s.step, e))
        return e->code;
    if (trainer_update(t, LM_SECTION_NORM, t->s.step, e))
        return e->code;
    mark(t, MARK_NORM);
    began = lm_now();
    if (wait_copied(t, e))
        return e->code;
    t->r.seconds_checkpoint += lm_now() - began;
    mark(t, MARK_UPDATE);
    if (sample(t, i, true, e) ||
        (i->tokens &&
         (trainer_update(t, LM_SECTION_STEP, t->s.step, e) || trainer_share_gather(t, e))) ||
        sample(t, i, false, e))
        return e->code;
    mark(t, MARK_END);
    if (trainer_experts_pull(t, e))
        return e->code;
    return lm_mirror_pull(&t->numbers, offsetof(step_numbers, weights), NULL, e);
}

static lm_code take_times(lm_trainer *t, double began, lm_err *e)
{
    double at[MARKS];
    if (!lm_program_timed(t->program))
        return LM_OK;
    if (t->b->marks_read(t->b, t->marks, MARKS, at, e))
        return e->code;
    t->r.seconds_optimizer += at[MARK_NORM] - at[MARK_BEGIN] + at[MARK_END] - at[MARK_UPDATE];
    if (t->tracing) {
        lm_trace_span(t->trace, TRACE_OPTIMIZER, "gradient norm", began, began + at[MARK_NORM]);
        lm_trace_span(t->trace, TRACE_OPTIMIZER, t->o.groups.use[0].optim->name,
                      began + at[MARK_UPDATE], began + at[MARK_END]);
    }
    return LM_OK;
}

/* ---- all of it ---- */

/* Check the results of the device: the weights have changed only if both numbers are finite. */
static lm_code check_numbers(lm_trainer *t, step_info *i, lm_err *e)
{
    const step_numbers *n = t->numbers.host;
    if (!t->io.objective)
        i->loss = i->tokens ? n->loss / (double)i->tokens : NAN;
    i->aux = i->micros ? n->aux / (double)i->micros : 0;
    for (int64_t k = 0; k < lm_model_losses_ahead(t->program->train); k++)
        i->ahead[k] = i->ahead_tokens[k] ? n->ahead[k] / (double)i->ahead_tokens[k] : NAN;
    i->norm = sqrt(n->sumsq);
    bool idle = !t->io.objective && !i->tokens; /* it has no loss, and changes nothing */
    if (idle)
        lm_log(t->io.sink, LM_LOG_WARN, "step %" PRId64 " has no token that trains: it is skipped",
               t->s.step + 1);
    if (!idle && !isfinite(i->loss))
        return trainer_numeric_stop(t, t->s.step + 1, "loss", i->loss, e);
    if (!isfinite(i->norm))
        return trainer_numeric_stop(t, t->s.step + 1, "gradient norm", i->norm, e);
    if (i->logged && !t->pipe) /* stages exchange theirs for the record */
        lm_monitor_read(t->monitor, &i->reading);
    return LM_OK;
}

lm_code trainer_step(lm_trainer *t, step_info *i, lm_err *e)
{
    double began = lm_now(), updating;
    const rank_use before = trainer_ranks_used(t);
    if (trainer_trace_begin(t, e) || (!t->io.objective && take_batches(t, e)))
        return e->code;
    i->tokens = t->valid[t->set];
    memcpy(i->ahead_tokens, t->ahead_valid[t->set], sizeof i->ahead_tokens);
    i->micros = t->o.accumulate;
    i->lr = lm_schedule_lr(&t->o.schedule, t->s.step) * t->o.groups.use[0].rate;
    i->flops = t->flops[t->set];
    i->logged =
        t->o.log_every && ((t->s.step + 1) % t->o.log_every == 0 || t->s.step + 1 == t->o.steps);
    if (t->io.objective ? trainer_objective_step(t, i, e) : forward_backward(t, e))
        return e->code;
    if (i->given_up)
        return trainer_trace_end(t, e);
    updating = lm_now();
    if (update(t, i, e) || draw_ahead(t, e) || t->b->sync(t->b, t->b->main, e) ||
        check_numbers(t, i, e) || take_times(t, updating, e) || trainer_trace_end(t, e))
        return e->code;
    if (t->io.after && i->tokens &&
        t->io.after(t->io.adapt_ctx, t->s.store, t->s.updates + 1, &i->loss, e))
        return e->code;
    if (i->tokens && trainer_experts_balance(t, e))
        return e->code;
    t->s.step++;
    t->s.sample += windows_a_step(t);
    t->s.tokens += i->tokens;
    t->s.updates += i->tokens > 0;
    t->r.steps_run++;
    t->r.tokens += i->tokens;
    t->r.loss = i->loss;
    i->seconds = lm_now() - began;
    const rank_use after = trainer_ranks_used(t);
    i->used = (rank_use){ .seconds = after.seconds - before.seconds };
    for (int a = 0; a < LM_AXES; a++)
        i->used.bytes[a] = after.bytes[a] - before.bytes[a];
    t->s.seconds += i->seconds;
    t->r.seconds_steps += i->seconds;
    t->r.seconds_begin += t->r.steps_run <= LM_TRAIN_WARM ? i->seconds : 0;
    t->r.flops += i->flops;
    t->last = *i;
    return LM_OK;
}
