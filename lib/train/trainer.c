/* trainer.c -- the loop. */
#include "train/trainer.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "base/file.h"
#include "base/mem.h"
#include "base/stop.h"
#include "base/text.h"
#include "format/folder_run.h"
#include "train/flat.h"
#include "train/monitor.h"

struct lm_trainer {
    lm_trainer_opts o;
    lm_trainer_io io;
    lm_backend *b;
    lm_model *model;
    lm_exec *exec;
    lm_train_state s;
    lm_evaluator eval;
    lm_feed *train_feed, *val_feed;
    lm_batch *batch; /* [accumulate] */
    float scale;
    float *rope;
    lm_monitor *monitor;
    lm_ckpt *ckpt;
    lm_memory_plan plan;

    lm_train_result r;
    double started, last_save;
    int64_t saved, saving; /* step of the last checkpoint, of the one without a record; -1: none */
    double val_bytes_per_token; /* of the validation set; 0: unknown */
};

/* What one step found out. */
typedef struct {
    double loss, norm, lr, seconds;
    int64_t tokens;
    bool logged;
    lm_monitor_reading reading;
} step_info;

static lm_build build_of(const lm_trainer_opts *o, lm_mode mode)
{
    return (lm_build){ .mode = mode,
                       .batch = o->batch,
                       .seq = o->seq,
                       .precision = o->precision,
                       .documents = o->documents,
                       .dropout = o->dropout };
}

lm_code lm_trainer_plan(const lm_trainer_opts *o, const lm_config *c, bool validation, bool lmz,
                        lm_backend *b, lm_memory_plan *out, lm_err *e)
{
    lm_build tb = build_of(o, LM_MODE_TRAIN), eb = build_of(o, LM_MODE_EVAL);
    lm_model *train = NULL, *eval = NULL;
    lm_code rc = lm_model_build(c, &tb, &train, e);
    if (!rc && validation)
        rc = lm_model_build(c, &eb, &eval, e);
    if (!rc)
        rc = lm_memory_of(train, eval, b, o->optim, &o->hyper, o->accumulate, out, e);
    if (!rc)
        lm_memory_add(out, "checkpoint coder", lm_ckpt_coder_bytes(lmz));
    lm_model_free(train);
    lm_model_free(eval);
    return rc;
}

static lm_code check_memory(lm_trainer *t, lm_err *e)
{
    char need[32], have[32];
    double available = (double)lm_mem_available();
    if (lm_trainer_plan(&t->o, t->io.config, t->io.val && t->o.eval_every, t->io.checkpoint.lmz,
                        t->b, &t->plan, e))
        return e->code;
    if (!t->b->host_memory || available <= 0 || t->plan.total <= available)
        return LM_OK;
    return lm_fail(e, LM_ELIMIT, "memory",
                   "use a smaller --batch-size with more --gradient-accumulation-steps, shorter "
                   "--seq-len, or --dtype bf16",
                   "the run needs %s, %s are free", lm_show_bytes(t->plan.total, need),
                   lm_show_bytes(available, have));
}

static lm_code make_feeds(lm_trainer *t, lm_err *e)
{
    lm_feed_opts fo = {
        .seq = t->o.seq, .documents = t->o.documents, .shuffle = true, .seed = t->o.seed
    };
    if (lm_feed_new(t->io.train, &fo, &t->train_feed, e))
        return e->code;
    fo.shuffle = false;
    if (t->io.val && t->o.eval_every && lm_feed_new(t->io.val, &fo, &t->val_feed, e))
        return e->code;
    if (lm_alloc_n(&t->batch, (size_t)t->o.accumulate, sizeof *t->batch, "batches", e))
        return e->code;
    for (int64_t i = 0; i < t->o.accumulate; i++)
        if (lm_batch_new(&t->batch[i], t->b, t->o.batch, t->o.seq, e))
            return e->code;
    return LM_OK;
}

static lm_code make_graphs(lm_trainer *t, lm_err *e)
{
    lm_build tb = build_of(&t->o, LM_MODE_TRAIN), eb = build_of(&t->o, LM_MODE_EVAL);
    if (lm_model_build(t->io.config, &tb, &t->model, e) ||
        lm_exec_new(t->model->graph, t->b, &t->model->loss, 1, &t->exec, e) ||
        lm_train_state_new(t->model, t->b, t->o.optim, &t->o.hyper, &t->s, e) ||
        lm_alloc_n(&t->rope, (size_t)(t->model->rope_rows * t->model->config.head_dim),
                   sizeof(float), "a rotary table", e))
        return e->code;
    if (t->val_feed && lm_evaluator_new(t->io.config, &eb, t->b, t->exec, &t->eval, e))
        return e->code;
    return lm_monitor_new(t->model->block, &t->monitor, e);
}

static lm_code load(lm_trainer *t, lm_err *e)
{
    lm_model *m = t->model;
    if (lm_weights_load(m, t->io.weights, t->b->par, t->s.param, e) ||
        (t->io.resume && lm_ckpt_load(t->io.resume, &t->s, e)))
        return e->code;
    if (t->s.low)
        lm_weights_round(m, t->s.param, t->s.low, t->b->par);
    lm_weights_bind(m, t->exec, t->s.param, t->s.low, t->rope);
    for (int i = 0; i < m->n_params; i++)
        if (m->grad[i] != LM_NONE)
            lm_exec_bind(t->exec, m->grad[i], t->s.grad + m->param[i].offset);
    if (t->val_feed)
        lm_evaluator_bind(&t->eval, t->s.param, t->s.low);
    return LM_OK;
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
    if (check_memory(t, e) || make_feeds(t, e) || make_graphs(t, e) || load(t, e) ||
        (io->checkpoint.run_dir && lm_ckpt_new(&io->checkpoint, &t->ckpt, e))) {
        lm_trainer_free(t);
        return e->code;
    }
    *out = t;
    return LM_OK;
}

void lm_trainer_free(lm_trainer *t)
{
    if (!t)
        return;
    lm_ckpt_free(t->ckpt); /* waits: it reads the blocks */
    for (int64_t i = 0; t->batch && i < t->o.accumulate; i++)
        lm_batch_fini(&t->batch[i]);
    lm_free(t->batch);
    lm_evaluator_fini(&t->eval);
    lm_exec_free(t->exec);
    lm_train_state_fini(&t->s);
    lm_model_free(t->model);
    lm_feed_free(t->train_feed);
    lm_feed_free(t->val_feed);
    lm_monitor_free(t->monitor);
    lm_free(t->rope);
    lm_free(t);
}

const lm_train_state *lm_trainer_state(const lm_trainer *t)
{
    return &t->s;
}

size_t lm_trainer_times(lm_trainer *t, const lm_exec_time **out)
{
    return lm_exec_times(t->exec, out);
}

/* ---- one step ---- */

static lm_code draw_batches(lm_trainer *t, int64_t *valid, lm_err *e)
{
    double began = lm_now();
    *valid = 0;
    for (int64_t i = 0; i < t->o.accumulate; i++) {
        if (lm_batch_fill(&t->batch[i], t->train_feed, t->s.sample, INT64_MAX, e))
            return e->code;
        t->s.sample += t->o.batch;
        *valid += t->batch[i].valid;
    }
    t->r.seconds_data += lm_now() - began;
    return LM_OK;
}

static double sum_loss(const lm_trainer *t, const lm_batch *b)
{
    const float *loss = lm_exec_data(t->exec, t->model->loss);
    double sum = 0;
    for (int64_t i = 0; i < b->batch * b->seq; i++)
        sum += loss[i];
    return sum;
}

static lm_code forward_backward(lm_trainer *t, int64_t valid, double *loss, lm_err *e)
{
    lm_step step = { .seed = t->o.seed, .step = t->s.step };
    t->scale = valid ? (float)(1.0 / (double)valid) : 0.0f;
    *loss = 0;
    for (int64_t i = 0; i < t->o.accumulate; i++) {
        step.micro = i;
        *t->batch[i].scale = t->scale;
        lm_batch_bind(&t->batch[i], t->model, t->exec);
        if (lm_batch_push(&t->batch[i], NULL, e) || lm_exec_run(t->exec, &step, e))
            return e->code;
        *loss += sum_loss(t, &t->batch[i]);
    }
    *loss = valid ? *loss / (double)valid : 0;
    return LM_OK;
}

static lm_code numeric_stop(lm_trainer *t, int64_t step, const char *what, double value, lm_err *e)
{
    const char *last = NULL;
    char todo[200], where[64];
    if (t->ckpt && lm_ckpt_wait(t->ckpt, e))
        return e->code;
    if (t->ckpt)
        last = lm_ckpt_last(t->ckpt);
    if (!last)
        last = t->io.resume;
    snprintf(todo, sizeof todo, "lower --lr or --max-grad-norm and %s%s",
             last ? "resume from " : "begin anew", last ? last : "");
    snprintf(where, sizeof where, "step %" PRId64, step);
    return lm_fail(e, LM_ENUMERIC, where, todo, "the %s is %s", what,
                   isnan(value) ? "not a number" : "infinite");
}

static lm_code update(lm_trainer *t, const step_info *i, lm_err *e)
{
    double sumsq = i->norm * i->norm;
    for (int part = 0; part < 2; part++) {
        int64_t from = part ? t->model->decay_end : 0;
        int64_t to = part ? t->model->block : t->model->decay_end;
        lm_optim_run r = { .n = to - from,
                           .param = t->s.param + from,
                           .grad = t->s.grad + from,
                           .low = t->s.low ? t->s.low + from : NULL,
                           .lr = i->lr,
                           .clip_norm = t->o.clip_norm,
                           .sumsq = &sumsq,
                           .clip_value = t->o.clip_value,
                           .decay = part == 0,
                           .t = t->s.step };
        for (int k = 0; k < t->s.n_states; k++)
            r.state[k] = t->s.state[k] + from;
        if (r.n && t->o.optim->run(t->b, &t->o.hyper, &r, e))
            return e->code;
    }
    return LM_OK;
}

static lm_code train_step(lm_trainer *t, step_info *i, lm_err *e)
{
    double began = lm_now(), t0;
    if (draw_batches(t, &i->tokens, e) || forward_backward(t, i->tokens, &i->loss, e))
        return e->code;
    t0 = lm_now();
    if (lm_sumsq(t->b, t->s.grad, t->model->block, t->s.norm_work, &i->norm, e))
        return e->code;
    i->norm = sqrt(i->norm);
    i->lr = lm_schedule_lr(&t->o.schedule, t->s.step);
    if (!isfinite(i->loss))
        return numeric_stop(t, t->s.step + 1, "loss", i->loss, e);
    if (!isfinite(i->norm))
        return numeric_stop(t, t->s.step + 1, "gradient norm", i->norm, e);
    t->r.seconds_optimizer += lm_now() - t0;
    t0 = lm_now();
    if (t->ckpt && lm_ckpt_wait_copied(t->ckpt, e))
        return e->code;
    t->r.seconds_checkpoint += lm_now() - t0;
    t0 = lm_now();
    i->logged = t->o.log_every && (t->s.step + 1) % t->o.log_every == 0;
    if (i->logged)
        lm_monitor_before(t->monitor, t->s.param, t->s.grad);
    if (i->tokens && update(t, i, e))
        return e->code;
    if (i->logged)
        lm_monitor_after(t->monitor, t->s.param, &i->reading);
    t->r.seconds_optimizer += lm_now() - t0;
    t->s.step++;
    t->s.tokens += i->tokens;
    t->r.steps_run++;
    t->r.tokens += i->tokens;
    t->r.loss = i->loss;
    i->seconds = lm_now() - began;
    t->s.seconds += i->seconds;
    return LM_OK;
}

/* ---- around the steps ---- */

static double mfu(const lm_trainer *t, double tokens_per_second)
{
    return t->o.peak_flops > 0 ? tokens_per_second * t->plan.flops_per_token / t->o.peak_flops
                               : NAN;
}

static lm_code report_step(lm_trainer *t, const step_info *i, lm_err *e)
{
    lm_metrics *m = t->io.metrics;
    double rate = (double)(t->plan.tokens_per_step) / i->seconds;
    char note[96];

    snprintf(note, sizeof note, "loss %.4f, %.0f tokens/s", i->loss, rate);
    lm_progress(t->io.sink, "train", (double)t->s.step, (double)t->o.steps, "steps", note);
    if (!i->logged)
        return LM_OK;
    lm_log(t->io.sink, LM_LOG_INFO,
           "step %" PRId64 ": loss %.4f, norm %.3f, lr %.3g, %.0f tokens/s", t->s.step, i->loss,
           i->norm, i->lr, rate);
    lm_metrics_begin(m, "step");
    lm_metrics_int(m, "step", t->s.step);
    lm_metrics_int(m, "tokens", t->s.tokens);
    lm_metrics_f32(m, "seconds", t->s.seconds);
    lm_metrics_f64(m, "loss", i->loss);
    lm_metrics_f64(m, "lr", i->lr);
    lm_metrics_f64(m, "grad_norm", i->norm);
    lm_metrics_f32(m, "grad_p50", i->reading.p50);
    lm_metrics_f32(m, "grad_p90", i->reading.p90);
    lm_metrics_f32(m, "grad_p99", i->reading.p99);
    lm_metrics_f32(m, "grad_max", i->reading.max);
    lm_metrics_f32(m, "update_ratio", i->reading.update_ratio);
    lm_metrics_f32(m, "tokens_per_second", rate);
    if (t->o.peak_flops > 0)
        lm_metrics_f32(m, "mfu", mfu(t, rate));
    lm_metrics_int(m, "memory_bytes", (int64_t)lm_rss_now());
    if (lm_metrics_end(m, e))
        return e->code;
    if (!t->io.tensorboard)
        return LM_OK;
    lm_tb_scalar tb[] = { { "train/loss", i->loss },
                          { "train/grad_norm", i->norm },
                          { "train/lr", i->lr },
                          { "train/update_ratio", i->reading.update_ratio },
                          { "train/tokens_per_second", rate } };
    return lm_tb_add(t->io.tensorboard, t->s.step, t->io.wall_clock(), tb, sizeof tb / sizeof *tb,
                     e);
}

/* Nats per token over bytes per token: bits per byte. */
static lm_code measure_bytes(lm_trainer *t, int64_t windows, lm_err *e)
{
    double bytes = 0, tokens = 0;
    lm_batch *b = &t->eval.batch;
    if (!t->io.id_bytes || t->val_bytes_per_token > 0)
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

static lm_code validate(lm_trainer *t, bool *stop, lm_err *e)
{
    lm_metrics *m = t->io.metrics;
    lm_eval_sum sum = { 0 };
    double began = lm_now();
    int64_t windows = lm_feed_windows(t->val_feed), most = t->o.eval_batches * t->o.batch;
    if (t->o.eval_batches && windows > most)
        windows = most;
    if (measure_bytes(t, windows, e) ||
        lm_evaluator_windows(&t->eval, t->val_feed, 0, windows, NULL, &sum, e))
        return e->code;
    t->r.seconds_eval += lm_now() - began;
    if (!sum.tokens || lm_stopping())
        return LM_OK;
    double loss = t->r.val_loss = sum.nll / (double)sum.tokens;
    t->s.evaluated = t->s.step;
    lm_log(t->io.sink, LM_LOG_INFO, "step %" PRId64 ": validation loss %.4f", t->s.step, loss);
    lm_metrics_begin(m, "eval");
    lm_metrics_int(m, "step", t->s.step);
    lm_metrics_int(m, "tokens", t->s.tokens);
    lm_metrics_f32(m, "seconds", t->s.seconds);
    lm_metrics_f64(m, "loss", loss);
    lm_metrics_f64(m, "perplexity", exp(loss));
    if (t->val_bytes_per_token > 0)
        lm_metrics_f64(m, "bits_per_byte", loss / M_LN2 / t->val_bytes_per_token);
    if (lm_metrics_end(m, e))
        return e->code;
    if (t->io.tensorboard && lm_tb_add(t->io.tensorboard, t->s.step, t->io.wall_clock(),
                                       &(lm_tb_scalar){ "eval/loss", loss }, 1, e))
        return e->code;
    if (loss < t->s.best_loss - t->o.min_delta) { /* NaN counts as no improvement */
        t->s.best_loss = loss;
        t->s.bad_evals = 0;
    } else {
        t->s.bad_evals++;
    }
    *stop = t->o.patience > 0 && t->s.bad_evals >= t->o.patience;
    return LM_OK;
}

/* The record of a checkpoint that is whole by now. */
static lm_code report_saved(lm_trainer *t, lm_err *e)
{
    lm_metrics *m = t->io.metrics;
    if (t->saving < 0 || lm_ckpt_busy(t->ckpt))
        return LM_OK;
    lm_metrics_begin(m, "checkpoint");
    lm_metrics_int(m, "step", t->saving);
    lm_metrics_str(m, "path", lm_ckpt_last(t->ckpt));
    t->saving = -1;
    return lm_metrics_end(m, e);
}

/* Begin a checkpoint.  It never holds a weight that is not finite: the last step's update is looked
 * at here, since no loss will. */
static lm_code save(lm_trainer *t, lm_err *e)
{
    double began = lm_now(), norm;
    if (!t->ckpt)
        return LM_OK;
    if (lm_sumsq(t->b, t->s.param, t->model->block, t->s.norm_work, &norm, e))
        return e->code;
    if (!isfinite(norm))
        return numeric_stop(t, t->s.step, "norm of the weights", norm, e);
    if (lm_ckpt_wait(t->ckpt, e) || report_saved(t, e) || lm_ckpt_begin(t->ckpt, &t->s, e))
        return e->code;
    t->saving = t->saved = t->s.step;
    t->last_save = lm_now();
    t->r.seconds_checkpoint += t->last_save - began;
    return LM_OK;
}

static bool time_to_save(const lm_trainer *t)
{
    if (t->o.save_every && t->s.step % t->o.save_every == 0)
        return true;
    return t->o.save_seconds > 0 && lm_now() - t->last_save >= t->o.save_seconds;
}

static bool time_to_validate(const lm_trainer *t)
{
    return t->val_feed && t->s.evaluated != t->s.step &&
           (t->s.step % t->o.eval_every == 0 || t->s.step == t->o.steps);
}

static lm_code loop(lm_trainer *t, lm_err *e)
{
    bool stop = false;
    /* A signal may have cut the last evaluation before the resume short. */
    if (t->io.resume && time_to_validate(t) && validate(t, &stop, e))
        return e->code;
    while (t->s.step < t->o.steps && !lm_stopping() && !stop) {
        step_info i = { 0 };
        if (train_step(t, &i, e) || report_step(t, &i, e) || report_saved(t, e))
            return e->code;
        if (time_to_validate(t) && validate(t, &stop, e))
            return e->code;
        if ((lm_poked() || time_to_save(t)) && save(t, e))
            return e->code;
    }
    t->r.end = lm_stopping() ? LM_TRAIN_STOPPED : stop ? LM_TRAIN_CONVERGED : LM_TRAIN_DONE;
    if (t->saved == t->s.step || (t->r.end == LM_TRAIN_STOPPED && !t->r.steps_run))
        return LM_OK;
    return save(t, e);
}

/* Is the state that the run begins with a checkpoint of this very run? */
static lm_code find_saved(lm_trainer *t, lm_err *e)
{
    char name[32], *path = NULL;
    t->saved = t->saving = -1;
    if (!t->io.resume || !t->ckpt)
        return LM_OK;
    if (lm_path_join(&path, t->io.checkpoint.run_dir, lm_run_step_name(t->s.step, name), e))
        return e->code;
    if (lm_path_same(path, t->io.resume))
        t->saved = t->s.step;
    lm_free(path);
    return LM_OK;
}

static void sum_up(lm_trainer *t)
{
    const lm_exec_time *line;
    size_t n = lm_exec_times(t->exec, &line);
    double busy;
    for (size_t i = 0; i < n; i++)
        *(line[i].phase == LM_PHASE_FORWARD ? &t->r.seconds_forward : &t->r.seconds_backward) +=
            line[i].seconds;
    t->r.step = t->s.step;
    t->r.seconds = lm_now() - t->started;
    busy =
        t->r.seconds_forward + t->r.seconds_backward + t->r.seconds_optimizer + t->r.seconds_data;
    if (busy > 0) {
        t->r.tokens_per_second = (double)(t->r.steps_run * t->plan.tokens_per_step) / busy;
        t->r.mfu = mfu(t, t->r.tokens_per_second);
    }
}

lm_code lm_trainer_run(lm_trainer *t, lm_train_result *r, lm_err *e)
{
    t->started = t->last_save = lm_now();
    lm_code rc = find_saved(t, e);
    if (!rc)
        rc = loop(t, e);
    double began = lm_now();
    if (t->ckpt) {
        lm_err second = { 0 };
        if ((lm_ckpt_wait(t->ckpt, &second) || report_saved(t, &second)) && !rc) {
            *e = second;
            rc = second.code;
        }
    }
    t->r.seconds_checkpoint += lm_now() - began;
    sum_up(t);
    *r = t->r;
    return rc;
}
