/* SPDX-License-Identifier: Apache-2.0 */
/* trainer_save.c -- when a trainer begins and ends checkpoints, and which of them is the best. */
#include <limits.h>
#include <math.h>
#include <stdio.h>

#include "base/clock.h"
#include "base/file.h"
#include "base/mem.h"
#include "format/folder_run.h"
#include "train/trainer_impl.h"

/* ---- parts of several ranks ---- */

/* All ranks have written their parts of a checkpoint. */
static lm_code close_parts(lm_trainer *t, lm_err *e)
{
    double wrote = (double)lm_ckpt_wrote(t->ckpt);
    if (trainer_ranks_total(t, &wrote, e))
        return e->code;
    t->parts = false;
    return t->leads ? lm_ckpt_all_done(t->ckpt, (uint64_t)wrote, e) : LM_OK;
}

lm_code trainer_save_missing(lm_trainer *t, int32_t *missing, lm_err *e)
{
    bool done = true;
    lm_code rc = t->parts ? lm_ckpt_part(t->ckpt, &done, e) : LM_OK;
    *missing = !done;
    return rc;
}

lm_code trainer_save_met(lm_trainer *t, int32_t missing, lm_err *e)
{
    return t->parts && !missing ? close_parts(t, e) : LM_OK;
}

static lm_code wait_for_parts(lm_trainer *t, lm_err *e)
{
    if (!t->parts)
        return LM_OK;
    if (lm_ckpt_wait_part(t->ckpt, e))
        return e->code;
    trainer_ranks_pause_all(t, lm_now() - t->last_save);
    return close_parts(t, e) || trainer_ranks_go_on(t, e) ? e->code : LM_OK;
}

/* Rank 0 makes the folder, the others write to it. */
static lm_code begin_parts(lm_trainer *t, lm_err *e)
{
    char made[PATH_MAX] = "";
    trainer_ranks_pause(t);
    if (t->leads && lm_ckpt_begin(t->ckpt, &t->s, e))
        return e->code;
    if (!lm_ckpt_shared(t->ckpt))
        return LM_OK;
    if (t->leads)
        snprintf(made, sizeof made, "%s", lm_ckpt_made(t->ckpt));
    if (lm_comm_broadcast(t->io.comm, made, sizeof made, 0, e) ||
        (!t->leads && lm_ckpt_join(t->ckpt, &t->s, made, e)))
        return e->code;
    t->parts = true;
    return LM_OK;
}

/* ---- one checkpoint ---- */

/* What rank 0 alone reports. */
static lm_code report(lm_trainer *t, int64_t step, lm_err *e)
{
    lm_metrics *m = t->io.metrics;
    trainer_trace_saved(t);
    lm_metrics_settle(m); /* the older run has been replaced */
    lm_metrics_begin(m, "checkpoint");
    lm_metrics_int(m, "step", step);
    lm_metrics_str(m, "path", lm_ckpt_last(t->ckpt));
    t->whole = step;
    return lm_metrics_end(m, e);
}

lm_code trainer_save_end(lm_trainer *t, lm_err *e)
{
    const int64_t step = t->saving;
    t->saving = -1;
    if (wait_for_parts(t, e) || lm_ckpt_wait(t->ckpt, e) || step < 0 || !t->leads ||
        lm_ckpt_failed(t->ckpt))
        return e->code;
    return report(t, step, e);
}

lm_code trainer_save_report(lm_trainer *t, lm_err *e)
{
    return t->saving < 0 || t->parts || lm_ckpt_busy(t->ckpt) ? LM_OK : trainer_save_end(t, e);
}

static lm_code weights_norm(lm_trainer *t, double *out, lm_err *e)
{
    const step_numbers *n = t->numbers.host;
    if (trainer_update(t, LM_SECTION_CHECK, t->s.step, e) ||
        lm_mirror_pull(&t->numbers, sizeof *n, NULL, e) || t->b->sync(t->b, t->b->main, e))
        return e->code;
    *out = sqrt(n->weights);
    return LM_OK;
}

/* A checkpoint never holds a weight that is not finite: the update of the last step is checked here, because no later loss
 * would show it. */
static lm_code check_weights(lm_trainer *t, lm_err *e)
{
    double norm;
    if (weights_norm(t, &norm, e))
        return e->code;
    return isfinite(norm) ? LM_OK
                          : trainer_numeric_stop(t, t->s.step, "norm of the weights", norm, e);
}

/* On each rank that writes it: begin a checkpoint. */
static lm_code begin_saving(lm_trainer *t, lm_err *e)
{
    double began = lm_now();
    if (trainer_save_end(t, e) || trainer_objective_save(t, e) || trainer_show(t, e) ||
        begin_parts(t, e))
        return e->code;
    t->last_save = lm_now(); /* from here on parts are written */
    if (trainer_hide(t, e))
        return e->code;
    t->saving = t->s.step;
    const double ended = lm_now();
    t->r.seconds_checkpoint += ended - began;
    if (t->trace && t->traced && !t->trace_writing) {
        lm_trace_span(t->trace, TRACE_CHECKPOINT, "begin", began, ended);
        t->trace_writing = true;
    }
    return LM_OK;
}

lm_code trainer_save(lm_trainer *t, lm_err *e)
{
    t->asked.save = false;
    trainer_ranks_pause(t);
    if (((t->ckpt || t->is_shared) && check_weights(t, e)) || (t->ckpt && begin_saving(t, e)) ||
        trainer_ranks_go_on(t, e))
        return e->code;
    t->saved = t->s.step;
    t->copying = true;
    return LM_OK;
}

lm_code trainer_save_best(lm_trainer *t, lm_err *e)
{
    char *name = NULL;
    if (t->saved != t->s.step)
        return trainer_save(t, e);
    if (!t->ckpt)
        return LM_OK;
    if (trainer_save_end(t, e) || !t->leads ||
        lm_run_find_step(t->io.checkpoint.run_dir, t->s.step, &name, e))
        return e->code;
    lm_code rc = name ? lm_run_publish_best(t->io.checkpoint.run_dir, name, e) : LM_OK;
    lm_free(name);
    return rc;
}

/* Link `best` again: a kill may have happened between the checkpoint and its link.  If this run
 * does not hold the best checkpoint of the state, it has no best one yet. */
static lm_code find_best(lm_trainer *t, lm_err *e)
{
    const char *run = t->io.checkpoint.run_dir;
    char *name = NULL;
    lm_code rc = LM_OK;
    if (t->s.best_step >= 0)
        rc = lm_run_find_step(run, t->s.best_step, &name, e);
    if (!rc && name)
        rc = lm_run_publish_best(run, name, e);
    if (!name) {
        t->s.best_step = -1;
        t->s.best_val = INFINITY;
    }
    lm_free(name);
    return rc;
}

lm_code trainer_save_find(lm_trainer *t, lm_err *e)
{
    char name[32], *path = NULL;
    if (!t->io.resume || !t->ckpt || !t->leads)
        return LM_OK;
    if (lm_path_join(&path, t->io.checkpoint.run_dir, lm_run_step_name(t->s.step, name), e))
        return e->code;
    if (lm_path_same(path, t->io.resume))
        t->saved = t->whole = t->s.step;
    lm_free(path);
    return find_best(t, e);
}
