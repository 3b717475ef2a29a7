/* SPDX-License-Identifier: Apache-2.0 */
/* report.c -- formats the numbers of a training. */
#include "train/report.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>

#include "base/json.h"
#include "base/mem.h"
#include "base/text.h"

void lm_train_report_place(lm_metrics *m, const lm_backend *b, const lm_trainer_opts *o,
                           const lm_config *c)
{
    static const char *const names[LM_INNER_AXES] = { "ranks_tp", "ranks_ep", "ranks_cp" };
    lm_metrics_str(m, "device", b->name);
    lm_metrics_str(m, "kernels", b->detail);
    lm_metrics_str(m, "hardware", b->device);
    lm_metrics_str(m, "dtype", lm_dtype_name(o->precision.low));
    lm_metrics_int(m, "parameters", lm_config_params(c));
    if (lm_mesh_ranks(&o->mesh) > 1)
        lm_metrics_int(m, "ranks", lm_mesh_ranks(&o->mesh));
    for (int i = 0; i < LM_INNER_AXES; i++)
        if (lm_mesh_along(&o->mesh, lm_inner_axes[i]) > 1)
            lm_metrics_int(m, names[i], lm_mesh_along(&o->mesh, lm_inner_axes[i]));
    if (o->pipe) {
        lm_metrics_int(m, "ranks_pp", lm_mesh_along(&o->mesh, LM_AXIS_PP));
        lm_metrics_int(m, "stages", o->pipe->stages.n);
    }
    if (o->leaves > 1)
        lm_metrics_int(m, "leaves", o->leaves);
    if (o->peak_flops > 0)
        lm_metrics_f32(m, "peak_flops", o->peak_flops);
}

const char *lm_train_status(const lm_train_result *r, lm_code rc)
{
    static const char *const ends[] = { "done", "stopped", "converged" };
    return rc == LM_ENUMERIC ? "nan" : rc ? "failed" : ends[r->end];
}

lm_code lm_train_result_json(const lm_train_result *r, const char *status, lm_buf *out, lm_err *e)
{
    lm_jw w;
    lm_jw_begin(&w, out, 0, e);
    lm_jw_obj(&w, NULL);
    lm_jw_str(&w, "status", status);
    lm_jw_int(&w, "step", r->step);
    lm_jw_int(&w, "tokens", r->tokens);
    lm_jw_f64(&w, "loss", r->loss);
    if (r->followed)
        lm_jw_f64(&w, r->followed, r->follow);
    lm_jw_f64(&w, "val_loss", r->val_loss);
    lm_jw_f64(&w, "best_val_loss", r->best_val_loss);
    lm_jw_f64(&w, "best_step", r->best_step >= 0 ? (double)r->best_step : NAN);
    lm_jw_f64(&w, "seconds", r->seconds);
    lm_jw_f64(&w, "tokens_per_second", r->tokens_per_second);
    lm_jw_f64(&w, "mfu", r->mfu);
    lm_jw_f64(&w, "mfu_attended", r->mfu_attended);
    if (r->device_planned > 0) {
        lm_jw_int(&w, "device_memory_planned_bytes", (int64_t)r->device_planned);
        lm_jw_int(&w, "device_memory_bytes", (int64_t)r->device_used);
    }
    lm_jw_int(&w, "peak_memory_bytes", (int64_t)lm_rss_peak());
    lm_jw_close_obj(&w);
    return lm_jw_end(&w);
}

double lm_train_shown(double loss)
{
    return fabs(loss) < 0.00005 ? 0 : loss;
}

const char *lm_train_headline(const char *followed, double value, double loss, char out[64])
{
    int n = followed ? snprintf(out, 64, "%.20s %.4f, ", followed, lm_train_shown(value)) : 0;
    snprintf(out + n, 64 - (size_t)n, "loss %.4f", lm_train_shown(loss));
    return out;
}

lm_code lm_train_result_line(const lm_train_result *r, const char *status, lm_buf *out, lm_err *e)
{
    char tokens[32], share[64] = "", memory[32], planned[32], device[96] = "", best[80] = "",
                     headline[64];
    if (r->mfu > 0)
        snprintf(share, sizeof share, " (%.0f %% of the peak, %.0f %% attended)", 100 * r->mfu,
                 100 * r->mfu_attended);
    if (r->device_planned > 0)
        snprintf(device, sizeof device, "%s of the device (%s planned), ",
                 lm_show_bytes(r->device_used, memory), lm_show_bytes(r->device_planned, planned));
    if (r->best_step >= 0)
        snprintf(best, sizeof best, "best validation loss %.4f at step %" PRId64 ", ",
                 r->best_val_loss, r->best_step);
    return lm_buf_addf(
        out, e,
        "%s: step %" PRId64 ", %s, %s%s tokens in %.1f s, %.0f "
        "tokens/s%s, peak memory %s%s%s",
        status, r->step, lm_train_headline(r->followed, r->follow, r->loss, headline), best,
        lm_show_count((double)r->tokens, tokens), r->seconds, r->tokens_per_second, share, device,
        lm_show_bytes((double)lm_rss_peak(), memory), *device ? " of the host" : "");
}

lm_code lm_train_times_table(const lm_exec_time *line, size_t n, lm_buf *out, lm_err *e)
{
    double all = 0;
    for (size_t i = 0; i < n; i++)
        all += line[i].seconds;
    for (size_t i = 0; i < n; i++)
        if (lm_buf_addf(out, e, "%-8s %-16s %6.2f %%  %8.3f s  %9.1f GFLOP/s\n",
                        lm_phase_name(line[i].phase), line[i].op, 100 * line[i].seconds / all,
                        line[i].seconds, line[i].flops / line[i].seconds * 1e-9))
            return e->code;
    return LM_OK;
}

lm_code lm_train_report_end(lm_metrics *m, const lm_train_result *r, const char *status, lm_err *e)
{
    lm_metrics_begin(m, "end");
    lm_metrics_str(m, "status", status);
    lm_metrics_int(m, "step", r->step);
    lm_metrics_f32(m, "seconds", r->seconds);
    lm_metrics_f32(m, "seconds_steps", r->seconds_steps);
    lm_metrics_f32(m, "seconds_data", r->seconds_data);
    if (r->timed) {
        lm_metrics_f32(m, "seconds_forward", r->seconds_forward);
        lm_metrics_f32(m, "seconds_backward", r->seconds_backward);
        lm_metrics_f32(m, "seconds_optimizer", r->seconds_optimizer);
    }
    lm_metrics_f32(m, "seconds_eval", r->seconds_eval);
    lm_metrics_f32(m, "seconds_checkpoint", r->seconds_checkpoint);
    lm_metrics_f32(m, "tokens_per_second", r->tokens_per_second);
    if (r->mfu > 0) {
        lm_metrics_f32(m, "mfu", r->mfu);
        lm_metrics_f32(m, "mfu_attended", r->mfu_attended);
    }
    if (r->device_planned > 0) {
        lm_metrics_int(m, "device_memory_planned_bytes", (int64_t)r->device_planned);
        lm_metrics_int(m, "device_memory_bytes", (int64_t)r->device_used);
    }
    lm_metrics_int(m, "peak_memory_bytes", (int64_t)lm_rss_peak());
    return lm_metrics_end(m, e);
}
