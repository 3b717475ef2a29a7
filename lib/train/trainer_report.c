/* SPDX-License-Identifier: Apache-2.0 */
/* trainer_report.c -- steps and evaluations as log lines, records and events; the trace's file. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>

#include "base/mem.h"
#include "train/trainer_impl.h"

double trainer_mfu(const lm_trainer *t, double tokens_per_second)
{
    return t->o.peak_flops > 0 ? tokens_per_second * t->plan.flops_per_token / t->o.peak_flops
                               : NAN;
}

/* Once, when there is something to say of its speed. */
static void log_device(const lm_trainer *t, double rate)
{
    char share[48] = "";
    if (t->o.peak_flops > 0)
        snprintf(share, sizeof share, ", %.1f %% of the peak", 100 * trainer_mfu(t, rate));
    lm_log(t->io.sink, LM_LOG_INFO, "%s (%s), kernels %s: %.3g TFLOP/s%s", t->b->name, t->b->device,
           t->b->detail, rate * t->plan.flops_per_token * 1e-12, share);
}

static lm_code tell_tensorboard(lm_trainer *t, const step_info *i, double rate, lm_err *e)
{
    lm_tb_scalar tb[] = { { "train/loss", i->loss },
                          { "train/grad_norm", i->norm },
                          { "train/lr", i->lr },
                          { "train/update_ratio", i->reading.update_ratio },
                          { "train/tokens_per_second", rate } };
    return t->io.tensorboard ? lm_tb_add(t->io.tensorboard, t->s.step, t->io.wall_clock(), tb,
                                         sizeof tb / sizeof *tb, e)
                             : LM_OK;
}

lm_code trainer_report_step(lm_trainer *t, const step_info *i, lm_err *e)
{
    lm_metrics *m = t->io.metrics;
    double rate = (double)(t->plan.tokens_per_step) / i->seconds;
    char note[96];

    snprintf(note, sizeof note, "loss %.4f, %.0f tokens/s", i->loss, rate);
    lm_progress(t->io.sink, "train", (double)t->s.step, (double)t->o.steps, "steps", note);
    if (t->r.steps_run == 1)
        log_device(t, rate);
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
        lm_metrics_f32(m, "mfu", trainer_mfu(t, rate));
    lm_metrics_int(m, "memory_bytes", (int64_t)lm_rss_now());
    return lm_metrics_end(m, e) ? e->code : tell_tensorboard(t, i, rate, e);
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
    lm_metrics_f64(m, "perplexity", exp(loss));
    if (t->val_bytes_per_token > 0)
        lm_metrics_f64(m, "bits_per_byte", loss / M_LN2 / t->val_bytes_per_token);
    if (lm_metrics_end(m, e))
        return e->code;
    return t->io.tensorboard ? lm_tb_add(t->io.tensorboard, t->s.step, t->io.wall_clock(),
                                         &(lm_tb_scalar){ "eval/loss", loss }, 1, e)
                             : LM_OK;
}

void trainer_trace_saved(lm_trainer *t)
{
    double begin, end;
    if (!t->trace || !t->trace_writing)
        return;
    lm_ckpt_span(t->ckpt, &begin, &end);
    if (end > begin)
        lm_trace_span(t->trace, TRACE_WRITER, "write", begin, end);
    t->trace_writing = false;
}

lm_code trainer_write_trace(lm_trainer *t, bool end, lm_err *e)
{
    if (!t->trace || !t->traced || (t->trace_writing && !end && t->saving >= 0))
        return LM_OK;
    trainer_trace_saved(t);
    lm_out *out = t->trace_out;
    lm_code rc = lm_trace_write(t->trace, out, e);
    t->trace_out = NULL;
    lm_trace_free(t->trace);
    t->trace = NULL;
    if (!rc)
        return lm_out_commit(out, e);
    lm_out_drop(out);
    return rc;
}
