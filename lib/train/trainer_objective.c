/* SPDX-License-Identifier: Apache-2.0 */
/* trainer_objective.c -- steps and evaluations whose loss an objective computes on the host.
 *
 * Unlike other steps these wait for the device in the middle of each micro-batch: the derivatives with which its
 * backward half begins depend on the results of its forward half. */
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "base/clock.h"
#include "train/trainer_impl.h"

/* Of the losses of a micro-batch; its entropies and values, if they are asked for, are behind them. */
static size_t part_bytes(const lm_trainer *t)
{
    return (size_t)(t->o.batch * t->o.seq) * sizeof(float);
}

static bool has_entropy(const lm_trainer *t)
{
    return t->o.entropy != LM_ENTROPY_NONE;
}

static size_t rows_bytes(const lm_trainer *t)
{
    return part_bytes(t) * (1 + has_entropy(t) + t->o.value);
}

lm_code trainer_objective_ready(lm_trainer *t, lm_err *e)
{
    const lm_objective *x = t->io.objective;
    const lm_objective_site site = { .backend = t->b,
                                     .par = t->io.par ? t->io.par : t->b->par,
                                     .config = t->io.config,
                                     .model = t->program->train,
                                     .store = t->s.store,
                                     .exec = t->program->exec,
                                     .eval = t->eval.model,
                                     .eval_exec = t->eval.exec,
                                     .precision = t->o.precision,
                                     .seed = t->o.seed,
                                     .batch = t->o.batch,
                                     .seq = t->o.seq,
                                     .accumulate = t->o.accumulate };
    if (!t->b->host_memory &&
        t->b->host_alloc(t->b, rows_bytes(t), "the losses of a batch", (void **)&t->rows, e))
        return e->code;
    if (x->ready && x->ready(x->ctx, &site, e))
        return e->code;
    return x->load && t->s.resumed ? x->load(x->ctx, t->s.step, t->s.resumed, e) : LM_OK;
}

lm_code trainer_objective_save(lm_trainer *t, lm_err *e)
{
    const lm_objective *x = t->io.objective;
    t->s.objective.len = 0;
    return x && x->save ? x->save(x->ctx, t->s.step, &t->s.objective, e) : LM_OK;
}

void trainer_objective_fini(lm_trainer *t)
{
    if (t->rows)
        t->b->host_free(t->b, t->rows, rows_bytes(t));
    t->rows = NULL;
}

void trainer_objective_report(lm_trainer *t, bool val)
{
    const lm_objective *x = t->io.objective;
    const lm_round r = { t->s.step, val };
    if (x && x->report)
        x->report(x->ctx, &r, t->io.metrics);
}

const char *trainer_followed(const lm_trainer *t, double *value)
{
    const lm_objective *x = t->io.objective;
    return x && x->followed ? x->followed(x->ctx, value) : NULL;
}

/* ---- a micro-batch ---- */

/* Send the batch to where the graph reads it. */
static lm_code send(lm_trainer *t, lm_err *e)
{
    lm_batch *b = t->batch;
    if (lm_batch_push(b, NULL, e))
        return e->code;
    return t->input ? t->b->copy(t->b, t->input, b->rooms.dev, b->rooms.bytes, t->b->main, e)
                    : LM_OK;
}

/* A value of the forward half on the host: in its own memory, or copied to part i of `rows`. */
static lm_code take_part(lm_trainer *t, lm_vid value, int i, const float **out, lm_err *e)
{
    const float *from = lm_exec_data(t->program->exec, value);
    float *to = t->rows ? t->rows + i * t->o.batch * t->o.seq : NULL;
    *out = t->rows ? to : from;
    return t->rows ? t->b->copy(t->b, to, from, part_bytes(t), t->b->main, e) : LM_OK;
}

static lm_code take_rows(lm_trainer *t, lm_row_results *out, lm_err *e)
{
    const lm_model *m = t->program->train;
    if (take_part(t, m->loss, 0, &out->nll, e) ||
        (has_entropy(t) && take_part(t, m->entropy, 1, &out->entropy, e)) ||
        (t->o.value && take_part(t, m->value, 1 + has_entropy(t), &out->value, e)))
        return e->code;
    return t->b->sync(t->b, t->b->main, e);
}

static lm_code grade(lm_trainer *t, const lm_round *r, int64_t micro, lm_err *e)
{
    const lm_objective *x = t->io.objective;
    lm_batch *b = t->batch;
    lm_row_results rows = { NULL };
    if (take_rows(t, &rows, e))
        return e->code;
    for (int64_t i = 0; i < b->batch * b->seq; i++) {
        if (b->targets[i] >= 0 && !isfinite(rows.nll[i]))
            return trainer_numeric_stop(t, t->s.step + 1, "log-probability of a token",
                                        -(double)rows.nll[i], e);
        if (b->targets[i] >= 0 && rows.value && !isfinite(rows.value[i]))
            return trainer_numeric_stop(t, t->s.step + 1, "value of a token", (double)rows.value[i],
                                        e);
    }
    const bool trains = t->o.entropy == LM_ENTROPY_TRAINS;
    const lm_row_slopes to = { b->scale, rows.value ? b->dvalue : NULL,
                               trains ? b->dentropy : NULL };
    lm_batch_scale(b, 0);
    memset(b->dvalue, 0, part_bytes(t));
    memset(b->dentropy, 0, part_bytes(t));
    return x->grade(x->ctx, r, micro, b, &rows, &to, e);
}

static lm_code run_micro(lm_trainer *t, const lm_round *r, int64_t micro, int64_t micros, lm_err *e)
{
    const lm_objective *x = t->io.objective;
    lm_step step = { .seed = t->o.seed, .step = t->s.step, .micro = micro, .more = micro > 0 };
    lm_batch *b = t->batch;
    double lr = lm_schedule_lr(&t->o.schedule, t->s.step), began = lm_now();
    if (x->fill(x->ctx, r, micro, b, e))
        return e->code;
    lm_update_numbers_at(t->program->update, lr, t->s.updates, b->now);
    *b->daux = 1.0f / (float)micros;
    t->r.seconds_data += lm_now() - began;
    if (send(t, e) || lm_program_run(t->program, LM_SECTION_FORWARD, &step, e) ||
        grade(t, r, micro, e) || send(t, e))
        return e->code;
    return lm_program_run(t->program, micro ? LM_SECTION_OTHER : LM_SECTION_FIRST, &step, e);
}

/* ---- rounds ---- */

static lm_code finish(lm_trainer *t, const lm_round *r, double *loss, lm_err *e)
{
    const lm_objective *x = t->io.objective;
    return x->finish(x->ctx, r, loss, e);
}

static lm_code begin(lm_trainer *t, const lm_round *r, int64_t *micros, lm_err *e)
{
    const lm_objective *x = t->io.objective;
    t->refused = x->begin(x->ctx, r, micros, e) != LM_OK;
    return e->code;
}

lm_code trainer_objective_step(lm_trainer *t, step_info *i, lm_err *e)
{
    const lm_config *c = t->io.config;
    const lm_round r = { t->s.step, false };
    double pairs = 0, near[LM_MOST_WINDOWS] = { 0 };
    int64_t micros = 0, window[LM_MOST_WINDOWS];
    const int windows = lm_config_windows(c, window);
    const bool both = lm_config_bidirectional(c);
    i->tokens = 0;
    i->loss = 0;
    if (begin(t, &r, &micros, e))
        return e->code;
    i->given_up = micros < 0;
    i->micros = micros > 0 ? micros : 0;
    for (int64_t k = 0; k < micros; k++) {
        if (run_micro(t, &r, k, micros, e))
            return e->code;
        i->tokens += t->batch->valid;
        pairs += (double)lm_batch_pairs(t->batch, 0, both);
        for (int w = 0; w < windows; w++)
            near[w] += (double)lm_batch_pairs(t->batch, window[w], both);
    }
    i->flops = trainer_flops(t, (double)(micros * t->o.batch * t->o.seq), pairs, near);
    return micros > 0 ? finish(t, &r, &i->loss, e) : LM_OK;
}

lm_code trainer_objective_validate(lm_trainer *t, double *loss, bool *any, lm_err *e)
{
    const lm_objective *x = t->io.objective;
    const lm_round r = { t->s.step, true };
    lm_evaluator *v = &t->eval;
    lm_eval_sum unused = { 0 };
    int64_t micros = 0;
    if (begin(t, &r, &micros, e))
        return e->code;
    for (int64_t k = 0; k < micros && !t->asked.stop; k++) {
        lm_row_results rows = { NULL };
        if (x->fill(x->ctx, &r, k, &v->batch, e) || lm_evaluator_run(v, &unused, &rows.nll, e) ||
            (v->model->entropy >= 0 && lm_evaluator_entropies(v, &rows.entropy, e)) ||
            x->grade(x->ctx, &r, k, &v->batch, &rows, NULL, e) || trainer_ask(t, e))
            return e->code;
    }
    *any = micros > 0 && !t->asked.stop;
    *loss = 0;
    return *any ? finish(t, &r, loss, e) : LM_OK;
}
