/* SPDX-License-Identifier: Apache-2.0 */
/* trainer_objective.c -- steps and evaluations whose loss an objective computes on the host.
 *
 * Unlike other steps these wait for the device in the middle of each micro-batch: the derivatives with which its
 * backward half begins depend on the results of its forward half. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/mem.h"
#include "train/checkpoint_files.h"
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

/* What rank 0 has read of a checkpoint, for the others. */
static lm_code share_resumed(lm_trainer *t, lm_err *e)
{
    lm_comm *c = t->io.comm;
    char *text = NULL;
    int64_t n = 0;
    if (!c || !t->io.resume)
        return LM_OK;
    if (t->leads && t->s.resumed) {
        text = json_dumps(t->s.resumed, JSON_COMPACT | JSON_REAL_PRECISION(17));
        if (!text)
            return lm_fail(e, LM_ELIMIT, LM_CKPT_OBJECTIVE, NULL, "no memory for a copy");
        n = (int64_t)strlen(text);
    }
    if (!lm_comm_broadcast(c, &n, sizeof n, 0, e) && n > 0) {
        char *copy = NULL;
        if (!t->leads)
            lm_alloc_n(&copy, (size_t)n, 1, LM_CKPT_OBJECTIVE, e);
        if (!e->code && !lm_comm_broadcast(c, t->leads ? text : copy, (size_t)n, 0, e) && !t->leads)
            lm_json_parse(copy, (size_t)n, LM_CKPT_OBJECTIVE, &t->s.resumed, e);
        lm_free(copy);
    }
    free(text);
    return e->code;
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
                                     .comm = t->along[LM_AXIS_DP],
                                     .seed = t->o.seed,
                                     .batch = t->o.batch,
                                     .seq = t->o.seq,
                                     .accumulate = t->o.accumulate };
    if (!t->b->host_memory &&
        t->b->host_alloc(t->b, rows_bytes(t), "the losses of a batch", (void **)&t->rows, e))
        return e->code;
    if ((x->ready && x->ready(x->ctx, &site, e)) || share_resumed(t, e))
        return e->code;
    return x->load && t->s.resumed ? x->load(x->ctx, t->s.step, t->s.resumed, e) : LM_OK;
}

lm_code trainer_objective_save(lm_trainer *t, lm_err *e)
{
    const lm_objective *x = t->io.objective;
    t->s.objective.len = 0;
    return t->leads && x && x->save ? x->save(x->ctx, t->s.step, &t->s.objective, e) : LM_OK;
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

static const char *const flaws[] = { "log-probability of a token", "value of a token" };

/* The first number of a micro-batch that is not finite. */
typedef struct {
    const char *what; /* NULL: all are */
    double value;
} flaw;

static flaw find_flaw(const lm_batch *b, const lm_row_results *rows)
{
    for (int64_t i = 0; i < b->batch * b->seq; i++) {
        if (b->targets[i] >= 0 && !isfinite(rows->nll[i]))
            return (flaw){ flaws[0], -(double)rows->nll[i] };
        if (b->targets[i] >= 0 && rows->value && !isfinite(rows->value[i]))
            return (flaw){ flaws[1], (double)rows->value[i] };
    }
    return (flaw){ NULL, 0 };
}

static lm_code grade(lm_trainer *t, const lm_round *r, int64_t micro, flaw *found, lm_err *e)
{
    const lm_objective *x = t->io.objective;
    lm_batch *b = t->batch;
    lm_row_results rows = { NULL };
    if (take_rows(t, &rows, e))
        return e->code;
    *found = find_flaw(b, &rows);
    if (found->what)
        return LM_OK;
    const bool trains = t->o.entropy == LM_ENTROPY_TRAINS;
    const lm_row_slopes to = { b->scale, rows.value ? b->dvalue : NULL,
                               trains ? b->dentropy : NULL };
    lm_batch_scale(b, 0);
    memset(b->dvalue, 0, part_bytes(t));
    memset(b->dentropy, 0, part_bytes(t));
    return x->grade(x->ctx, r, micro, b, &rows, &to, e);
}

/* What a round counts over its micro-batches: whole numbers. */
enum { TOTAL_TOKENS, TOTAL_PAIRS, TOTAL_NEAR, TOTALS = TOTAL_NEAR + LM_MOST_WINDOWS };

typedef struct {
    int64_t micros; /* of all ranks */
    double n[TOTALS];
    flaw flaw; /* with which this rank stops */
} totals;

static void count(const lm_trainer *t, totals *sum)
{
    const lm_batch *b = t->batch;
    int64_t window[LM_MOST_WINDOWS];
    const int windows = lm_config_windows(t->io.config, window);
    const bool both = lm_config_bidirectional(t->io.config);
    sum->n[TOTAL_TOKENS] += (double)b->valid;
    sum->n[TOTAL_PAIRS] += (double)lm_batch_pairs(b, 0, both);
    for (int w = 0; w < windows; w++)
        sum->n[TOTAL_NEAR + w] += (double)lm_batch_pairs(b, window[w], both);
}

/* The optimiser's, which lie in the batch. */
static void set_numbers(lm_trainer *t)
{
    lm_update_numbers_at(t->program->update, lm_schedule_lr(&t->o.schedule, t->s.step),
                         t->s.updates, t->batch->now);
}

/* more: it is not the first of its leaf. */
static lm_code run_micro(lm_trainer *t, const lm_round *r, int64_t micro, bool more, totals *sum,
                         lm_err *e)
{
    const lm_objective *x = t->io.objective;
    lm_step step = { .seed = t->o.seed, .step = t->s.step, .micro = micro, .more = more };
    lm_batch *b = t->batch;
    double began = lm_now();
    if (x->fill(x->ctx, r, micro, b, e))
        return e->code;
    set_numbers(t);
    *b->daux = 1.0f / (float)sum->micros;
    t->r.seconds_data += lm_now() - began;
    if (send(t, e) || lm_program_run(t->program, LM_SECTION_FORWARD, &step, e) ||
        grade(t, r, micro, &sum->flaw, e) || sum->flaw.what || send(t, e))
        return e->code;
    count(t, sum);
    return lm_program_run(t->program, more ? LM_SECTION_OTHER : LM_SECTION_FIRST, &step, e);
}

/* A leaf of the round's sums: the micro-batches that are its own, of which there may be none. */
static lm_code run_leaf(lm_trainer *t, const lm_round *r, int64_t leaf, totals *sum, lm_err *e)
{
    const int64_t first = leaf * sum->micros / t->o.leaves,
                  end = (leaf + 1) * sum->micros / t->o.leaves;
    if (first == end) {
        set_numbers(t);
        return send(t, e) || trainer_ranks_clear(t, e) ? e->code : LM_OK;
    }
    for (int64_t k = first; k < end; k++)
        if (run_micro(t, r, k, k > first, sum, e) || sum->flaw.what)
            return e->code;
    return LM_OK;
}

/* A number that is not finite on one rank stops all of them, which look for its origin together: the first kind that any has
 * met. */
static lm_code meet_flaws(lm_trainer *t, const flaw *own, lm_err *e)
{
    const double values[] = { -INFINITY, INFINITY, NAN };
    enum { VALUES = 3, KINDS = 2 * VALUES };
    int32_t met[KINDS] = { 0 };
    if (own->what)
        met[(own->what == flaws[1]) * VALUES + (isnan(own->value) ? 2 : own->value > 0)] = 1;
    if (trainer_ranks_agree(t, met, KINDS, e))
        return e->code;
    for (int i = 0; i < KINDS; i++)
        if (met[i])
            return trainer_numeric_stop(t, t->s.step + 1, flaws[i / VALUES], values[i % VALUES], e);
    return LM_OK;
}

/* The leaves of this rank, and the sums of all. */
static lm_code run_leaves(lm_trainer *t, const lm_round *r, totals *sum, lm_err *e)
{
    const lm_step step = { .seed = t->o.seed, .step = t->s.step };
    const int64_t own = t->o.leaves / t->ranks, first = own * t->rank;
    for (int64_t l = 0; l < own && !sum->flaw.what; l++)
        if (run_leaf(t, r, first + l, sum, e) ||
            (!sum->flaw.what && trainer_ranks_leaf(t, l, &step, e)))
            return e->code;
    if (meet_flaws(t, &sum->flaw, e) || trainer_ranks_count(t, sum->n, TOTALS, e) ||
        trainer_ranks_sum(t, e))
        return e->code;
    return LM_OK;
}

/* ---- rounds ---- */

static lm_code finish(lm_trainer *t, const lm_round *r, double *loss, lm_err *e)
{
    const lm_objective *x = t->io.objective;
    return x->finish(x->ctx, r, loss, e);
}

/* Whether a round could not begin on one of the ranks: then it is over for all, which may keep the steps before it. */
static lm_code begin(lm_trainer *t, const lm_round *r, int64_t *micros, lm_err *e)
{
    const lm_objective *x = t->io.objective;
    lm_err unseen = { 0 };
    trainer_ranks_patient(t, true); /* one may wait for a program that rewards */
    int32_t failed = x->begin(x->ctx, r, micros, e) != LM_OK;
    t->refuses = failed;
    if (trainer_ranks_agree(t, &failed, 1, e->code ? &unseen : e))
        return e->code;
    trainer_ranks_patient(t, false);
    t->refused = failed;
    if (failed)
        lm_fail(e, LM_EIO, "ranks", NULL, "a rank could not begin a step");
    return e->code;
}

lm_code trainer_objective_step(lm_trainer *t, step_info *i, lm_err *e)
{
    const lm_round r = { t->s.step, false };
    totals sum = { 0 };
    i->tokens = 0;
    i->loss = 0;
    if (begin(t, &r, &sum.micros, e))
        return e->code;
    i->given_up = sum.micros < 0;
    i->micros = sum.micros > 0 ? sum.micros : 0;
    if (sum.micros > 0 && run_leaves(t, &r, &sum, e))
        return e->code;
    i->tokens = (int64_t)sum.n[TOTAL_TOKENS];
    i->flops = trainer_flops(t, (double)(sum.micros * t->o.batch * t->o.seq), sum.n[TOTAL_PAIRS],
                             &sum.n[TOTAL_NEAR]);
    return sum.micros > 0 ? finish(t, &r, &i->loss, e) : LM_OK;
}

static lm_code validate_micro(lm_trainer *t, const lm_round *r, int64_t micro, lm_err *e)
{
    const lm_objective *x = t->io.objective;
    lm_evaluator *v = &t->eval;
    lm_eval_sum unused = { 0 };
    lm_row_results rows = { NULL };
    return x->fill(x->ctx, r, micro, &v->batch, e) || lm_evaluator_run(v, &unused, &rows.nll, e) ||
                   (v->model->entropy >= 0 && lm_evaluator_entropies(v, &rows.entropy, e)) ||
                   x->grade(x->ctx, r, micro, &v->batch, &rows, NULL, e)
               ? e->code
               : LM_OK;
}

lm_code trainer_objective_validate(lm_trainer *t, double *loss, bool *any, lm_err *e)
{
    const lm_round r = { t->s.step, true };
    int64_t micros = 0;
    if (begin(t, &r, &micros, e))
        return e->code;
    /* a rank has those from `first` on; all ask as often as the one with the most */
    const int64_t first = t->rank * micros / t->ranks, end = (t->rank + 1) * micros / t->ranks,
                  most = (micros + t->ranks - 1) / t->ranks;
    for (int64_t k = first; k < first + most && !t->asked.stop; k++)
        if ((k < end && validate_micro(t, &r, k, e)) || trainer_ask(t, e))
            return e->code;
    *any = micros > 0 && !t->asked.stop;
    *loss = 0;
    return *any ? finish(t, &r, loss, e) : LM_OK;
}
