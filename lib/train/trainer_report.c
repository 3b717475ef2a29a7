/* SPDX-License-Identifier: Apache-2.0 */
/* trainer_report.c -- steps and evaluations as log lines, records and events. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>

#include "base/clock.h"
#include "base/text.h"
#include "train/report.h"
#include "train/trainer_impl.h"

double trainer_share(const lm_trainer *t, double flops_per_second)
{
    return t->o.peak_flops > 0 ? flops_per_second / t->o.peak_flops : NAN;
}

/* Log once, if its speed is known. */
static void log_device(const lm_trainer *t, const step_info *i, double rate)
{
    char share[80] = "", ranks[40] = "";
    double flops = rate * t->plan.flops_per_token;
    if (t->o.peak_flops > 0)
        snprintf(share, sizeof share, ", %.1f %% of the peak (%.1f %% attended)",
                 100 * trainer_share(t, flops), 100 * trainer_share(t, i->flops / i->seconds));
    if (t->io.comm)
        snprintf(ranks, sizeof ranks, " on each of %d ranks", lm_comm_size(t->io.comm));
    lm_log(t->io.sink, LM_LOG_INFO, "%s (%s), kernels %s%s: %.3g TFLOP/s%s", t->b->name,
           t->b->device, t->b->detail, ranks, flops * 1e-12, share);
}

/* What the step is followed by, and its loss. */
static const char *headline_of(const lm_trainer *t, const step_info *i, char out[64])
{
    double value = 0;
    const char *followed = trainer_followed(t, &value);
    return lm_train_headline(followed, value, i->loss, out);
}

/* For a log (not a terminal): report the progress, at most every `beat` seconds. */
static void log_beat(lm_trainer *t, const step_info *i, double rate)
{
    double now = lm_now(), beat = t->io.sink ? t->io.sink->beat : 0;
    char left[32], headline[64];
    if (beat <= 0 || t->o.most_seconds > 0 || now - t->last_line < beat)
        return;
    t->last_line = now;
    lm_log(t->io.sink, LM_LOG_NOTICE, "step %" PRId64 " of %" PRId64 ": %s, %.0f tokens/s, %s left",
           t->s.step, t->o.steps, headline_of(t, i, headline), rate,
           lm_show_seconds((now - t->started) / (double)t->r.steps_run *
                               (double)(t->o.steps - t->s.step),
                           left));
}

/* `sampled`: the monitors have read this step. */
static lm_code tell_tensorboard(lm_trainer *t, const step_info *i, bool sampled, double rate,
                                lm_err *e)
{
    lm_tb_scalar tb[] = { { "train/loss", i->loss },
                          { "train/grad_norm", i->norm },
                          { "train/lr", i->lr },
                          { "train/tokens_per_second", rate },
                          { "train/update_ratio", i->reading.update_ratio } };
    size_t n = sizeof tb / sizeof *tb - (sampled ? 0 : 1);
    return t->io.tensorboard ? lm_tb_add(t->io.tensorboard, t->s.step, t->io.wall_clock(), tb, n, e)
                             : LM_OK;
}

/* The mean loss of the modules that predict tokens further on, and that of each one. */
static void report_ahead(const lm_trainer *t, const step_info *i)
{
    const int64_t n = lm_model_losses_ahead(t->program->train);
    double sum = 0;
    int64_t with = 0; /* modules: in a step of short documents, the last ones have no targets */
    for (; with < n && i->ahead_tokens[with] > 0; with++)
        sum += i->ahead[with];
    if (!with)
        return;
    lm_metrics_f64(t->io.metrics, "mtp_loss", sum / (double)with);
    lm_metrics_list(t->io.metrics, "mtp_losses", i->ahead, (size_t)with);
}

static lm_code report(lm_trainer *t, const step_info *i, bool sampled, lm_err *e)
{
    lm_metrics *m = t->io.metrics;
    double rate = (double)(t->plan.tokens_per_step) / i->seconds;
    char headline[64], note[80];

    lm_log(t->io.sink, LM_LOG_INFO, "step %" PRId64 ": %s, norm %.3f, lr %.3g, %.0f tokens/s%s",
           t->s.step, headline_of(t, i, headline), i->norm, i->lr, rate,
           trainer_experts_note(t, i, note));
    lm_metrics_begin(m, "step");
    lm_metrics_int(m, "step", t->s.step);
    lm_metrics_int(m, "tokens", t->s.tokens);
    lm_metrics_f32(m, "seconds", t->s.seconds);
    lm_metrics_f64(m, "loss", i->loss);
    if (t->program->aux_sum != LM_NONE)
        lm_metrics_f64(m, t->o.nsp.on ? "next_sentence_loss" : "moe_aux_loss", i->aux);
    report_ahead(t, i);
    trainer_objective_report(t, false);
    lm_metrics_f64(m, "lr", i->lr);
    lm_metrics_f64(m, "grad_norm", i->norm);
    if (sampled) {
        lm_metrics_f32(m, "grad_p50", i->reading.p50);
        lm_metrics_f32(m, "grad_p90", i->reading.p90);
        lm_metrics_f32(m, "grad_p99", i->reading.p99);
        lm_metrics_f32(m, "grad_max", i->reading.max);
        lm_metrics_f32(m, "update_ratio", i->reading.update_ratio);
    }
    lm_metrics_f32(m, "tokens_per_second", rate);
    if (t->io.comm && t->b->host_memory) /* a device's streams wait for each other unseen */
        lm_metrics_f32(m, "comm_exposed_share", i->used.seconds / i->seconds);
    if (t->pipe)
        lm_metrics_f32(m, "pipeline_bubble", trainer_pipe_bubble(t));
    for (int a = 0; a < LM_AXES; a++)
        if (t->along[a])
            lm_metrics_int(m, lm_comm_bytes_names[a], (int64_t)i->used.bytes[a]);
    if (t->o.peak_flops > 0) {
        lm_metrics_f32(m, "mfu", trainer_share(t, rate * t->plan.flops_per_token));
        lm_metrics_f32(m, "mfu_attended", trainer_share(t, i->flops / i->seconds));
    }
    lm_metrics_int(m, "memory_bytes", (int64_t)lm_rss_now());
    return lm_metrics_end(m, e) || trainer_experts_report(t, i, sampled, e)
               ? e->code
               : tell_tensorboard(t, i, sampled, rate, e);
}

lm_code trainer_report_step(lm_trainer *t, step_info *i, lm_err *e)
{
    double rate = (double)(t->plan.tokens_per_step) / i->seconds;
    char headline[64], note[96];

    snprintf(note, sizeof note, "%s, %.0f tokens/s", headline_of(t, i, headline), rate);
    lm_progress(t->io.sink, "train", (double)t->s.step, (double)t->o.steps, "steps", note);
    if (t->r.steps_run == 1)
        log_device(t, i, rate);
    log_beat(t, i, rate);
    /* Behind the step, whose bytes and seconds do not hold it. */
    if (i->logged && t->pipe &&
        lm_monitor_read_stages(t->monitor, t->program->train, t->along[LM_AXIS_PP], &i->reading, e))
        return e->code;
    return i->logged ? report(t, i, true, e) : LM_OK;
}

lm_code trainer_report_last(lm_trainer *t, lm_err *e)
{
    if (!t->r.steps_run || t->last.logged || !t->o.log_every)
        return LM_OK;
    t->last.logged = true;
    return report(t, &t->last, false, e);
}

lm_code trainer_report_eval(lm_trainer *t, double loss, lm_err *e)
{
    lm_metrics *m = t->io.metrics;
    lm_log(t->io.sink, LM_LOG_INFO, "step %" PRId64 ": validation loss %.4f", t->s.step, loss);
    lm_metrics_begin(m, "eval");
    lm_metrics_int(m, "step", t->s.step);
    lm_metrics_int(m, "tokens", t->s.tokens);
    lm_metrics_f32(m, "seconds", t->s.seconds);
    lm_metrics_f64(m, "loss", loss);
    if (t->io.objective)
        trainer_objective_report(t, true);
    else
        lm_metrics_f64(m, t->o.mlm.share > 0 ? "pseudo_perplexity" : "perplexity", exp(loss));
    if (t->val_bytes_per_token > 0)
        lm_metrics_f64(m, "bits_per_byte", loss / M_LN2 / t->val_bytes_per_token);
    if (lm_metrics_end(m, e))
        return e->code;
    return t->io.tensorboard ? lm_tb_add(t->io.tensorboard, t->s.step, t->io.wall_clock(),
                                         &(lm_tb_scalar){ "eval/loss", loss }, 1, e)
                             : LM_OK;
}
