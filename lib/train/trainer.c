/* SPDX-License-Identifier: Apache-2.0 */
/* trainer.c -- makes a trainer, and runs the loop around its steps. */
#include "train/trainer.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "base/file.h"
#include "base/mem.h"
#include "base/stop.h"
#include "train/trainer_impl.h"

static lm_code make_feed(const lm_packed *packed, const lm_tokens *tokens, const lm_feed_opts *o,
                         lm_feed **out, lm_err *e)
{
    return packed ? lm_feed_new_packed(packed, o, out, e) : lm_feed_new(tokens, o, out, e);
}

static bool has_val(const lm_trainer *t)
{
    return (t->io.val || t->io.val_packed) && t->o.eval_every;
}

static lm_code make_feeds(lm_trainer *t, lm_err *e)
{
    if (t->io.objective)
        return LM_OK;
    lm_feed_opts fo = { .seq = t->o.seq,
                        .documents = t->o.documents,
                        .shuffle = true,
                        .seed = t->o.seed,
                        .vocab = t->io.ids ? t->io.ids : t->io.config->vocab,
                        .mlm = t->o.mlm.share > 0 ? &t->o.mlm : NULL,
                        .nsp = t->o.nsp.on ? &t->o.nsp : NULL,
                        .span = t->o.span,
                        .source = t->o.source,
                        .start = t->io.config->start };
    if (make_feed(t->io.packed, t->io.train, &fo, &t->train_feed, e))
        return e->code;
    fo.shuffle = false;
    if (fo.mlm || fo.span) /* the same masks and spans in each evaluation, of any run */
        fo.seed = 0;
    if (has_val(t) && make_feed(t->io.val_packed, t->io.val, &fo, &t->val_feed, e))
        return e->code;
    return LM_OK;
}

static int64_t n_batches(const lm_trainer *t)
{
    return trainer_has_one_batch(t) ? 1 : t->sets * t->micros;
}

static lm_code take_program(lm_trainer *t, lm_err *e)
{
    bool validation = has_val(t) || (t->io.objective && t->o.eval_every);
    t->program = t->io.program;
    t->own_program = !t->program;
    return t->program ? LM_OK
                      : lm_trainer_program(&t->o, t->io.config, validation, t->b, &t->program, e);
}

static size_t batch_bytes(const lm_trainer *t)
{
    return lm_batch_bytes(t->o.batch, t->o.seq, lm_update_n_numbers(t->program->update),
                          lm_model_losses_ahead(t->program->train), t->program->o.source);
}

static lm_code make_batches(lm_trainer *t, lm_err *e)
{
    int n_now = lm_update_n_numbers(t->program->update);
    t->sets = trainer_has_one_batch(t) ? 1 : 2;
    if (t->b->stream_new(t->b, &t->copies, e) ||
        lm_alloc_n(&t->batch, (size_t)n_batches(t), sizeof *t->batch, "batches", e))
        return e->code;
    for (int64_t i = 0; i < n_batches(t); i++)
        if (lm_batch_new_pairs(&t->batch[i], t->b, t->o.batch, t->o.seq, n_now,
                               lm_model_losses_ahead(t->program->train), t->program->o.source, e))
            return e->code;
    return t->b->host_memory ? LM_OK
                             : t->b->alloc(t->b, batch_bytes(t), "a micro-batch", &t->input, e);
}

/* There are evaluations in which the model runs. */
static bool validates(const lm_trainer *t)
{
    return t->io.objective ? t->program->eval != NULL : t->val_feed != NULL;
}

static lm_code make_graphs(lm_trainer *t, lm_err *e)
{
    lm_program *p = t->program;
    if (lm_program_ready(p, t->o.timed, t->io.sink, e) ||
        lm_train_state_new(p, t->io.par, &t->s, e) || lm_rotary_new(p->train, t->b, &t->rope, e) ||
        lm_mirror_new(t->b, sizeof(step_numbers), "a step's numbers", &t->numbers, e) ||
        trainer_experts_new(t, e) ||
        (validates(t) && lm_evaluator_of(p->eval, &p->eval_plan, t->b, p->exec, &t->eval, e)))
        return e->code;
    return trainer_marks(t, e) || lm_monitor_new(t->b, p->train->train_end, &t->monitor, e)
               ? e->code
               : LM_OK;
}

/* The constants of the update, one behind another, each at a multiple of 64 bytes. */
static lm_code make_constants(lm_trainer *t, lm_err *e)
{
    const lm_update_constant *c;
    int n = lm_update_constants(t->program->update, &c);
    size_t at = 0;
    for (int i = 0; i < n; i++)
        t->constants_bytes += (c[i].bytes + 63) / 64 * 64;
    if (!n || t->b->alloc(t->b, t->constants_bytes, "constants", &t->constants, e))
        return e->code;
    for (int i = 0; i < n; i++) {
        char *to = (char *)t->constants + at;
        if (c[i].number && t->b->copy(t->b, to, c[i].number, c[i].bytes, t->b->main, e))
            return e->code;
        lm_exec_bind(t->program->updating, c[i].value, to);
        at += (c[i].bytes + 63) / 64 * 64;
    }
    return t->b->sync(t->b, t->b->main, e);
}

/* The memory of the update's values. */
static void bind_update(lm_trainer *t)
{
    const lm_update *u = t->program->update;
    const lm_update_values *v = lm_update_value(u);
    const lm_store *s = t->s.store;
    lm_exec *x = t->program->updating;
    const lm_store_state *state;
    const lm_vid *value;
    step_numbers *n = t->numbers.dev;
    int n_states = lm_update_states(u, &state, &value);
    lm_exec_bind(t->program->exec, t->program->loss_sum, &n->loss);
    if (t->program->aux_sum != LM_NONE)
        lm_exec_bind(t->program->exec, t->program->aux_sum, &n->aux);
    for (int64_t k = 0; k < lm_model_losses_ahead(t->program->train); k++)
        lm_exec_bind(t->program->exec, t->program->ahead_sum[k], &n->ahead[k]);
    lm_exec_bind(x, v->loss, &n->loss);
    lm_exec_bind(x, v->sumsq, &n->sumsq);
    lm_exec_bind(x, v->weights, &n->weights);
    lm_exec_bind(x, v->numbers, lm_batch_now(t->batch, t->input ? t->input : t->batch->rooms.dev));
    lm_exec_bind(x, v->param, lm_store_flat(s, LM_KEPT_PARAM, 0));
    lm_exec_bind(x, v->grad, lm_store_flat(s, LM_KEPT_GRAD, 0));
    if (v->low != LM_NONE)
        lm_exec_bind(x, v->low, lm_store_flat(s, LM_KEPT_DERIVED, 0));
    for (int k = 0; k < n_states; k++)
        lm_exec_bind(x, value[k], lm_store_flat(s, LM_KEPT_OPT, k));
    lm_monitor_bind(t->monitor, v, x);
}

/* Weights, and the state of a resumed run. */
static lm_code load(lm_trainer *t, lm_err *e)
{
    lm_store *s = t->s.store;
    lm_code rc = lm_store_draw(s, t->io.weights ? LM_TENSORS_NEW : LM_TENSORS_BASE, t->o.seed, e);
    if (!rc && t->io.weights)
        rc = lm_store_load(s, t->io.weights, e);
    if (!rc)
        rc = t->io.adapt ? t->io.adapt(t->io.adapt_ctx, s, e)
                         : lm_store_draw(s, LM_TENSORS_ADAPTER, t->o.seed, e);
    if (rc)
        return rc;
    return t->io.resume && lm_ckpt_load(t->io.resume, &t->s, e) ? trainer_numeric_loaded(t, e)
                                                                : LM_OK;
}

static lm_code fill(lm_trainer *t, lm_err *e)
{
    lm_model *m = t->program->train;
    lm_exec *x = t->program->exec;
    lm_store *s = t->s.store;
    if (trainer_ranks_load(t, load, e))
        return e->code;
    lm_store_derive(s);
    if (trainer_share_gather(t, e))
        return e->code;
    lm_store_bind(s, m, x);
    lm_rotary_bind(&t->rope, m, x);
    lm_batch_bind_at(t->batch, t->input ? t->input : t->batch->rooms.dev, m, x);
    if (validates(t)) /* it may lack tensors of the training: the head of pairs */
        lm_store_bind_part(s, m, t->eval.model, t->eval.exec);
    bind_update(t);
    if (make_constants(t, e) || trainer_ranks_ready(t, e))
        return e->code;
    return t->io.resume ? LM_OK : trainer_update(t, LM_SECTION_START, 0, e);
}

/* Free memory before any is allocated, by any rank. */
static lm_code check_memory(lm_trainer *t, lm_err *e)
{
    size_t total;
    lm_trainer_plan(&t->o, t->program, t->io.checkpoint.lmz, &t->plan);
    if (!t->b->host_memory && t->b->memory(t->b, &t->free_before, &total, e))
        return e->code;
    t->r.device_planned = t->plan.device;
    return (t->leads && trainer_fit(t, e)) || trainer_ranks_meet(t, e) ? e->code : LM_OK;
}

lm_code lm_trainer_new(const lm_trainer_opts *o, const lm_trainer_io *io, lm_backend *b,
                       lm_trainer **out, lm_err *e)
{
    lm_trainer *t = NULL;
    *out = NULL;
    if (lm_alloc_n(&t, 1, sizeof *t, "a trainer", e))
        return e->code;
    t->o = *o;
    t->io = *io;
    t->b = b;
    t->r.loss = t->r.val_loss = NAN;
    t->saved = t->whole = t->held = -1;
    t->r.timed = b->host_memory || o->timed;
    if (trainer_ranks_set(t, e) || take_program(t, e) || check_memory(t, e) ||
        trainer_trace_open(t, e) || make_feeds(t, e) || make_batches(t, e) || make_graphs(t, e) ||
        fill(t, e) || (io->objective && trainer_objective_ready(t, e)) || trainer_save_new(t, e)) {
        lm_trainer_free(t);
        return e->code;
    }
    *out = t;
    return LM_OK;
}

void lm_trainer_free(lm_trainer *t)
{
    lm_err ignored = { 0 };
    if (!t)
        return;
    trainer_save_fini(t);             /* waits: writers read the blocks */
    t->b->sync(t->b, NULL, &ignored); /* after a failure, work may still be queued */
    if (t->input)
        t->b->free(t->b, t->input, batch_bytes(t));
    if (t->constants)
        t->b->free(t->b, t->constants, t->constants_bytes);
    for (int64_t i = 0; t->batch && i < n_batches(t); i++)
        lm_batch_fini(&t->batch[i]);
    lm_free(t->batch);
    trainer_objective_fini(t);
    lm_evaluator_fini(&t->eval);
    if (t->program)
        lm_program_rest(t->program);
    lm_train_state_fini(&t->s);
    lm_rotary_fini(&t->rope);
    trainer_ranks_fini(t);
    lm_mirror_fini(&t->numbers);
    trainer_experts_fini(t);
    if (t->own_program)
        lm_program_free(t->program);
    lm_feed_free(t->train_feed);
    lm_feed_free(t->val_feed);
    lm_monitor_free(t->monitor);
    t->b->marks_free(t->b, t->marks);
    t->b->stream_free(t->b, t->copies);
    lm_trace_free(t->trace);
    lm_out_drop(t->trace_out);
    lm_free(t);
}

int64_t lm_trainer_saved(const lm_trainer *t)
{
    return t->whole;
}

size_t lm_trainer_times(lm_trainer *t, const lm_exec_time **out)
{
    return lm_program_times(t->program, out);
}

/* ---- around the steps ---- */

/* Nats per token over bytes per token: bits per byte. */
static lm_code measure_bytes(lm_trainer *t, int64_t windows, lm_err *e)
{
    double bytes = 0, tokens = 0;
    lm_batch *b = &t->eval.batch;
    if (!t->io.id_bytes || t->val_bytes_per_token > 0 || !t->leads)
        return LM_OK;
    for (int64_t i = 0; i < windows; i += b->batch) {
        if (lm_batch_fill(b, t->val_feed, i, windows, e))
            return e->code;
        for (int64_t k = 0; k < b->batch * b->seq; k++)
            if (b->targets[k] >= 0) {
                bytes += t->io.id_bytes[b->targets[k]];
                tokens++;
            }
    }
    t->val_bytes_per_token = tokens > 0 ? bytes / tokens : 0;
    return LM_OK;
}

lm_code trainer_ask(lm_trainer *t, lm_err *e)
{
    const double now = lm_now();
    /* one clock for all ranks; launchers hand a request for a checkpoint to each */
    const bool first = t->leads;
    const bool enough = first && t->o.most_seconds > 0 && t->r.steps_run > LM_TRAIN_WARM &&
                        now - t->started >= t->o.most_seconds;
    int32_t flag[2 + 2 * TRAINER_PLACES] = { t->asked.stop || lm_stopping(),
                                             t->asked.enough || enough };
    const size_t n = 2 + 2 * (size_t)t->places;
    if (trainer_save_flags(t, first && lm_poked() ? TRAINER_OWN : 0, now, flag + 2, e) ||
        trainer_ranks_agree(t, flag, n, e) || trainer_save_met(t, flag + 2, e))
        return e->code;
    t->asked.stop = flag[0];
    t->asked.enough = flag[1];
    return LM_OK;
}

static lm_code run_batch(lm_trainer *t, lm_eval_sum *sum, const float **rows, lm_err *e)
{
    return t->pipe ? trainer_pipe_evaluate(t, sum, rows, e)
                   : lm_evaluator_run(&t->eval, sum, rows, e);
}

/* The batch that begins with window `own`, if there is one: *rows of its losses.  Where graphs gather parameters all ranks run,
 * one without windows the first batch once more, whose losses do not count. */
static lm_code run_own(lm_trainer *t, int64_t own, int64_t windows, lm_eval_sum *sum,
                       const float **rows, lm_err *e)
{
    lm_eval_sum unused = { 0 };
    const bool has = own < windows, alone = !t->along[LM_AXIS_DP];
    *rows = NULL;
    if (!has && !t->gatherer)
        return LM_OK;
    if (lm_batch_fill(&t->eval.batch, t->val_feed, has ? own : 0, windows, e) ||
        run_batch(t, alone ? sum : &unused, rows, e))
        return e->code;
    *rows = has ? *rows : NULL;
    return LM_OK;
}

/* The losses of the first windows of the validation data, in batches that are dealt to the ranks; a signal ends them
 * early. */
static lm_code run_windows(lm_trainer *t, int64_t windows, lm_eval_sum *sum, lm_err *e)
{
    lm_evaluator *v = &t->eval;
    const int64_t n = v->batch.batch;
    for (int64_t i = 0; i < windows && !t->asked.stop; i += n * t->ranks) {
        const float *rows;
        if (run_own(t, i + n * t->rank, windows, sum, &rows, e) ||
            trainer_ranks_evaluated(t, rows, sum, e) || trainer_ask(t, e))
            return e->code;
    }
    return trainer_pipe_evaluated(t, sum, e);
}

/* Count an evaluation; *best: its loss is the lowest so far.  NaN is no improvement. */
static void judge(lm_trainer *t, double loss, bool *best)
{
    if (loss < t->s.best_loss - t->o.min_delta) {
        t->s.best_loss = loss;
        t->s.bad_evals = 0;
    } else {
        t->s.bad_evals++;
    }
    if (loss < t->s.best_val) {
        t->s.best_val = loss;
        t->s.best_step = t->s.step;
        *best = true;
    }
}

/* *any: there are targets. */
static lm_code evaluate(lm_trainer *t, double *loss, bool *any, lm_err *e)
{
    lm_eval_sum sum = { 0 };
    int64_t windows = lm_feed_windows(t->val_feed), most = t->o.eval_batches * t->o.batch;
    if (t->o.eval_batches && windows > most)
        windows = most;
    trainer_ranks_pause(t);
    if (measure_bytes(t, windows, e) || trainer_ranks_go_on(t, e) ||
        run_windows(t, windows, &sum, e))
        return e->code;
    *any = sum.tokens > 0;
    *loss = *any ? sum.nll / (double)sum.tokens : 0;
    return LM_OK;
}

static lm_code validate(lm_trainer *t, bool *stop, bool *best, lm_err *e)
{
    double began = lm_now(), loss;
    bool any;
    lm_err second = { 0 };
    if (trainer_show(t, e))
        return e->code;
    lm_code rc = t->io.objective ? trainer_objective_validate(t, &loss, &any, e)
                                 : evaluate(t, &loss, &any, e);
    if (trainer_hide(t, rc ? &second : e) || rc)
        return e->code;
    t->r.seconds_eval += lm_now() - began;
    if (!any || t->asked.stop)
        return LM_OK;
    t->r.val_loss = loss;
    t->s.evaluated = t->s.step;
    if (trainer_report_eval(t, loss, e))
        return e->code;
    judge(t, loss, best);
    *stop = t->o.patience > 0 && t->s.bad_evals >= t->o.patience;
    return LM_OK;
}

static bool time_to_validate(const lm_trainer *t)
{
    return validates(t) && t->s.evaluated != t->s.step &&
           (t->s.step % t->o.eval_every == 0 || t->s.step == t->o.steps);
}

static lm_code loop(lm_trainer *t, lm_err *e)
{
    bool stop = false, best = false;
    if (trainer_ask(t, e))
        return e->code;
    /* A signal may have interrupted the last evaluation before the resume. */
    if (t->io.resume && time_to_validate(t) && validate(t, &stop, &best, e))
        return e->code;
    if (best && trainer_save_best(t, e))
        return e->code;
    while (t->s.step < t->o.steps && !t->asked.stop && !stop && !t->asked.enough) {
        step_info i = { 0 };
        if (trainer_write_trace(t, false, e) || trainer_step(t, &i, e) || trainer_trace_merge(t, e))
            return e->code;
        if (i.given_up) {
            if (trainer_ask(t, e))
                return e->code;
            break;
        }
        trainer_ranks_pace(t, i.seconds);
        if (trainer_report_step(t, &i, e) || trainer_save_report(t, e))
            return e->code;
        best = false;
        if (trainer_ask(t, e) || (time_to_validate(t) && validate(t, &stop, &best, e)))
            return e->code;
        if (trainer_save(t, trainer_save_due(t) | (best ? TRAINER_OWN : 0), e))
            return e->code;
    }
    t->r.end = t->asked.stop ? LM_TRAIN_STOPPED : stop ? LM_TRAIN_CONVERGED : LM_TRAIN_DONE;
    if (t->saved == t->s.step || (t->r.end == LM_TRAIN_STOPPED && !t->r.steps_run))
        return LM_OK;
    return trainer_save(t, TRAINER_OWN, e);
}

/* After a failure of the objective (a reward command that ends): the steps before it are kept, for a resumed run.
 * That failure is the one that is reported. */
static void keep_steps(lm_trainer *t)
{
    lm_err unseen = { 0 };
    if (t->refused && t->r.steps_run && t->saved != t->s.step &&
        !trainer_save(t, TRAINER_OWN, &unseen))
        trainer_save_end(t, &unseen); /* while the ranks can still meet */
}

/* All ranks end with the reason of the one that has it. */
static void give_up(lm_trainer *t, lm_err *e)
{
    lm_err reason = { 0 };
    if (!t->refused || t->refuses)
        trainer_ranks_abort(t, e);
    else if (trainer_ranks_meet(t, &reason))
        *e = reason;
}

static void sum_up(lm_trainer *t)
{
    const lm_exec_time *line;
    size_t n = lm_exec_times(t->program->exec, &line), left, total;
    lm_err ignored = { 0 };
    for (size_t i = 0; i < n; i++)
        *(line[i].phase == LM_PHASE_FORWARD ? &t->r.seconds_forward : &t->r.seconds_backward) +=
            line[i].seconds;
    t->r.step = t->s.step;
    t->r.followed = trainer_followed(t, &t->r.follow);
    t->r.best_step = t->s.best_step;
    t->r.best_val_loss = t->s.best_step >= 0 ? t->s.best_val : NAN;
    t->r.seconds = lm_now() - t->started;
    if (t->r.seconds_steps > 0) {
        t->r.tokens_per_second =
            (double)(t->r.steps_run * t->plan.tokens_per_step) / t->r.seconds_steps;
        t->r.mfu = trainer_share(t, t->r.tokens_per_second * t->plan.flops_per_token);
        t->r.mfu_attended = trainer_share(t, t->r.flops / t->r.seconds_steps);
    }
    if (!t->b->host_memory && !t->b->memory(t->b, &left, &total, &ignored) && left < t->free_before)
        t->r.device_used = (double)(t->free_before - left);
}

/* Finish all work in progress, even after a failure. */
static lm_code wind_up(lm_trainer *t, lm_err *e)
{
    double began = lm_now();
    lm_code rc = trainer_save_end(t, e);
    t->r.seconds_checkpoint += lm_now() - began;
    return rc ? rc : trainer_write_trace(t, true, e);
}

/* The others wait until rank 0 has written the last checkpoint. */
static lm_code part(lm_trainer *t, lm_err *e)
{
    trainer_ranks_pause(t);
    return trainer_ranks_meet(t, e);
}

lm_code lm_trainer_run(lm_trainer *t, lm_train_result *r, lm_err *e)
{
    lm_err second = { 0 };
    t->started = t->last_save = t->last_line = lm_now();
    for (int k = 0; k < t->places; k++)
        t->place[k].began = t->started;
    lm_code rc = trainer_save_find(t, e);
    if (!rc)
        rc = trainer_ranks_kept(t, e);
    if (!rc)
        rc = loop(t, e);
    if (rc) {
        keep_steps(t);
        give_up(t, e);
    }
    if ((!rc || rc == LM_ENUMERIC) && trainer_report_last(t, &second) && !rc) {
        *e = second;
        rc = second.code;
    }
    memset(&second, 0, sizeof second);
    if ((wind_up(t, &second) || (!rc && part(t, &second))) && !rc) {
        *e = second;
        rc = second.code;
    }
    if (!rc && t->trace && t->leads)
        lm_log(t->io.sink, LM_LOG_WARN, "%s: no step was taken that could be traced", t->io.trace);
    sum_up(t);
    *r = t->r;
    return rc;
}
