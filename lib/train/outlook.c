/* SPDX-License-Identifier: Apache-2.0 */
/* outlook.c -- collects and formats the memory and time of a run. */
#include "train/outlook.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>

#include "base/json.h"
#include "base/mem.h"
#include "base/par.h"
#include "base/text.h"
#include "comm/threads.h"

lm_code lm_outlook_make(const lm_trainer_opts *o, const lm_program *p, const lm_outlook_ask *ask,
                        const lm_memory_plan *plan, lm_outlook *out, lm_err *e)
{
    *out = (lm_outlook){ .plan = *plan,
                         .steps = o->steps - ask->step,
                         .resumed = ask->step > 0,
                         .measure_asked = ask->measure };
    out->elsewhere = !o->ranks_here && lm_mesh_ranks(&o->mesh) > LM_THREAD_RANKS;
    if ((!out->elsewhere && lm_trainer_verdict(o, p, ask->lmz, plan, &out->verdict, e)) ||
        lm_train_disk(o, plan, ask->step, ask->keep, NULL, &out->space, e) ||
        lm_mesh_plan_make(o, p, ask->lmz, p->backend->par ? lm_par_threads(p->backend->par) : 0,
                          &out->each, e))
        return e->code;
    return LM_OK;
}

void lm_outlook_fini(lm_outlook *o)
{
    lm_mesh_plan_fini(&o->each);
}

static void memory_json(lm_jw *w, const lm_memory_plan *p, bool device, const char *rows,
                        const char *total)
{
    lm_jw_obj(w, rows);
    for (int i = 0; i < p->n_rows; i++)
        if (p->row[i].device == device)
            lm_jw_int(w, p->row[i].name, (int64_t)p->row[i].bytes);
    lm_jw_close_obj(w);
    lm_jw_int(w, total, (int64_t)(device ? p->device : p->total));
}

/* For the remaining steps. */
static double hours(const lm_outlook *o)
{
    return o->measure.seconds_per_step * (double)o->steps / 3600;
}

static void free_json(lm_jw *w, const lm_outlook *o)
{
    if (o->plan.device > 0)
        lm_jw_int(w, "device_memory_free", (int64_t)o->verdict.device_free);
    if (o->verdict.host_free > 0)
        lm_jw_int(w, "memory_free", (int64_t)o->verdict.host_free);
    else
        lm_jw_f64(w, "memory_free", NAN); /* null: unknown */
    lm_jw_bool(w, "fits", o->verdict.fits);
    if (!o->verdict.fits)
        lm_jw_str(w, "cure", o->verdict.cure);
}

static void given_json(lm_jw *w, const lm_memory_plan *p)
{
    for (int i = 0; i < LM_AXES; i++)
        if (p->given[i] > 0)
            lm_jw_int(w, lm_comm_bytes_names[i], (int64_t)p->given[i]);
}

static void flops_json(lm_jw *w, const lm_memory_plan *p)
{
    lm_jw_obj(w, "graph_flops_per_micro_batch");
    for (int i = 0; i < LM_PHASE_UPDATE; i++)
        lm_jw_f64(w, lm_phase_name((lm_phase)i), p->graph_flops[i]);
    lm_jw_close_obj(w);
}

/* Ranks that are alike, with the coordinates that they share. */
static void each_json(lm_jw *w, const lm_mesh_plan *each)
{
    if (!each->n)
        return;
    lm_jw_int(w, "lists", each->lists);
    if (each->bubble >= 0)
        lm_jw_f64(w, "bubble", each->bubble);
    lm_jw_arr(w, "each_rank");
    for (int k = 0; k < each->n; k++) {
        const lm_rank_plan *r = &each->rank[k];
        lm_jw_obj(w, NULL);
        lm_jw_int(w, "ranks", r->ranks);
        for (int i = 0; i < LM_AXES; i++)
            if (r->at[i] >= 0)
                lm_jw_int(w, lm_axis_names[i], r->at[i]);
        if (r->plan.device > 0)
            memory_json(w, &r->plan, true, "device_memory", "device_memory_total");
        memory_json(w, &r->plan, false, "memory", "memory_total");
        given_json(w, &r->plan);
        flops_json(w, &r->plan);
        lm_jw_close_obj(w);
    }
    lm_jw_close_arr(w);
}

static void verdict_json(lm_jw *w, const lm_outlook *o)
{
    lm_jw_int(w, "checkpoint_bytes", (int64_t)o->space.checkpoint);
    lm_jw_int(w, "checkpoints_at_once", o->space.at_once);
    if (!o->elsewhere)
        free_json(w, o);
    if (!o->measure.steps)
        return;
    lm_jw_int(w, "steps", o->steps);
    lm_jw_int(w, "measured_steps", o->measure.steps);
    lm_jw_f64(w, "seconds_per_step", o->measure.seconds_per_step);
    lm_jw_f64(w, "tokens_per_second", o->measure.tokens_per_second);
    lm_jw_f64(w, "hours", hours(o));
}

lm_code lm_outlook_json(const lm_outlook *o, void (*also)(lm_jw *), lm_buf *out, lm_err *e)
{
    const lm_memory_plan *p = &o->plan;
    lm_jw w;
    lm_jw_begin(&w, out, 2, e);
    lm_jw_obj(&w, NULL);
    lm_jw_int(&w, "parameters", p->params);
    lm_jw_int(&w, "matmul_parameters", p->matmul_params);
    if (p->device > 0)
        memory_json(&w, p, true, "device_memory", "device_memory_total");
    memory_json(&w, p, false, "memory", "memory_total");
    if (p->ranks > 1)
        lm_jw_int(&w, "ranks", p->ranks);
    given_json(&w, p);
    lm_jw_int(&w, "activation_lower_bound", (int64_t)p->lower_bound);
    lm_jw_int(&w, "tokens_per_step", p->tokens_per_step);
    lm_jw_f64(&w, "flops_per_token", p->flops_per_token);
    lm_jw_f64(&w, "flops_per_step", p->flops_per_token * (double)p->tokens_per_step);
    flops_json(&w, p);
    verdict_json(&w, o);
    each_json(&w, &o->each);
    if (also)
        also(&w);
    lm_jw_close_obj(&w);
    return lm_jw_end(&w);
}

static lm_code memory_rows(const lm_memory_plan *p, bool device, const char *total, lm_buf *out,
                           lm_err *e)
{
    char size[32];
    for (int i = 0; i < p->n_rows; i++)
        if (p->row[i].device == device && lm_buf_addf(out, e, "%-26s %12s\n", p->row[i].name,
                                                      lm_show_bytes(p->row[i].bytes, size)))
            return e->code;
    return lm_buf_addf(out, e, "%-26s %12s\n", total,
                       lm_show_bytes(device ? p->device : p->total, size));
}

/* "  tp=0  256 ranks: 4.1 GiB each, and each gives 1.2 GiB in a step" */
static lm_code rank_line(const lm_rank_plan *r, lm_buf *out, lm_err *e)
{
    char at[80] = "", have[32], gives[32];
    double given = 0;
    int n = 0;
    for (int i = 0; i < LM_AXES; i++) {
        given += r->plan.given[i];
        if (r->at[i] >= 0)
            n += snprintf(at + n, sizeof at - (size_t)n, "%s%s=%d", n ? "," : "", lm_axis_names[i],
                          r->at[i]);
    }
    return lm_buf_addf(out, e,
                       "  %-12s %6" PRId64 " rank%s: %s each, and each gives %s in a step\n",
                       n ? at : "all", r->ranks, lm_plural(r->ranks),
                       lm_show_bytes(r->plan.device > 0 ? r->plan.device : r->plan.total, have),
                       lm_show_bytes(given, gives));
}

static lm_code rank_lines(const lm_mesh_plan *each, lm_buf *out, lm_err *e)
{
    for (int k = 0; k < each->n; k++)
        if (rank_line(&each->rank[k], out, e))
            return e->code;
    return each->n && each->bubble >= 0
               ? lm_buf_addf(out, e,
                             "ranks along pp wait %.1f %% of a step if all FLOPs take equal time\n",
                             100 * each->bubble)
               : LM_OK;
}

/* "fits here: 1.9 GiB of 12 GiB that are free", or a choice that would fit. */
static lm_code verdict_line(const lm_outlook *o, lm_buf *out, lm_err *e)
{
    const lm_train_verdict *v = &o->verdict;
    if (o->elsewhere)
        return lm_buf_addf(out, e, "%d ranks are more than one machine has: nothing was compared\n",
                           o->plan.ranks);
    bool device = v->fits ? o->plan.device > 0 : v->device;
    char need[32], have[32];
    lm_show_bytes(device ? o->plan.device : o->plan.total, need);
    lm_show_bytes(device ? v->device_free : v->host_free, have);
    const char *whose = o->plan.device > 0 ? device ? " of the device" : " of the host" : "";
    if (v->fits && !device && v->host_free <= 0)
        return lm_buf_addf(out, e, "needs %s; what is free here is unknown\n", need);
    if (v->fits)
        return lm_buf_addf(out, e, "fits here: %s of %s%s that are free\n", need, have, whose);
    return lm_buf_addf(out, e, "does not fit here: needs %s, %s%s are free: %s\n", need, have,
                       whose, v->cure);
}

static lm_code checkpoint_line(const lm_outlook *o, lm_buf *out, lm_err *e)
{
    char each[32];
    lm_show_bytes(o->space.checkpoint, each);
    if (o->steps <= 0)
        return lm_buf_addf(out, e, "no step is left: no checkpoint (of %s) would be written\n",
                           each);
    return lm_buf_addf(out, e, "a checkpoint takes %s on disk, at most %" PRId64 " at once\n", each,
                       o->space.at_once);
}

static lm_code time_line(const lm_outlook *o, lm_buf *out, lm_err *e)
{
    const lm_train_measure *m = &o->measure;
    if (o->measure_asked && o->elsewhere)
        return lm_buf_addf(out, e,
                           "not measured: this machine cannot run a step of so many ranks\n");
    if (o->measure_asked && !o->verdict.fits)
        return lm_buf_addf(out, e, "not measured: it does not fit\n");
    if (!m->steps)
        return LM_OK;
    return lm_buf_addf(out, e,
                       "measured: %.3g s a step, %.0f tokens/s; %" PRId64
                       " step%s%s take %.3g hours, without evaluations and checkpoints\n",
                       m->seconds_per_step, m->tokens_per_second, o->steps, lm_plural(o->steps),
                       o->resumed ? " that are left" : "", hours(o));
}

lm_code lm_outlook_table(const lm_outlook *o, lm_buf *out, lm_err *e)
{
    const lm_memory_plan *p = &o->plan;
    bool both = p->device > 0;
    char total[32] = "total";
    if (p->ranks > 1)
        snprintf(total, sizeof total, "total of %d ranks", p->ranks);
    if (both &&
        (memory_rows(p, true, "total of the device", out, e) || lm_buf_add(out, "\n", 1, e)))
        return e->code;
    if (memory_rows(p, false, both ? "total of the host" : total, out, e) ||
        (both && lm_buf_add(out, "\n", 1, e)))
        return e->code;
    if (lm_buf_addf(out, e,
                    "parameters %" PRId64 ", tokens a step %" PRId64
                    ", FLOP a token %.4g, a step %.4g\n",
                    p->params, p->tokens_per_step, p->flops_per_token,
                    p->flops_per_token * (double)p->tokens_per_step) ||
        rank_lines(&o->each, out, e) || checkpoint_line(o, out, e) || time_line(o, out, e))
        return e->code;
    return verdict_line(o, out, e);
}
