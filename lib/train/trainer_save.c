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

/* ---- places ---- */

/* Of several ranks each writes a part of a checkpoint, unless it is one stream. */
static lm_code add_place(lm_trainer *t, const lm_ckpt_opts *of, int64_t every, double seconds,
                         lm_err *e)
{
    trainer_place *p = &t->place[t->places++];
    lm_ckpt_opts o = *of;
    if (t->io.comm) {
        o.rank = lm_comm_rank(t->io.comm);
        o.ranks = lm_comm_size(t->io.comm);
    }
    *p = (trainer_place){ .every = every, .seconds = seconds, .saving = -1 };
    t->writes = t->leads || !o.lmz;
    return t->writes ? lm_ckpt_new(&o, &t->s, &p->ckpt, e) : LM_OK;
}

lm_code trainer_save_new(lm_trainer *t, lm_err *e)
{
    lm_ckpt_opts o = t->io.checkpoint;
    const lm_run_tiers *tiers = t->io.tiers;
    if (!o.run_dir)
        return LM_OK;
    lm_code rc = add_place(t, &o, t->o.save_every, t->o.save_seconds, e);
    o.aside = true;
    o.replace = false;
    for (int i = 0; tiers && !rc && i < tiers->n; i++) {
        o.run_dir = tiers->at[i].folder;
        o.keep = tiers->at[i].keep;
        rc = add_place(t, &o, tiers->at[i].every, tiers->at[i].seconds, e);
    }
    return rc;
}

void trainer_save_fini(lm_trainer *t)
{
    for (int k = 0; k < t->places; k++)
        lm_ckpt_free(t->place[k].ckpt);
    t->places = 0;
}

unsigned trainer_save_due(const lm_trainer *t)
{
    unsigned due = t->asked.save;
    for (int k = 0; k < t->places; k++)
        if (t->place[k].every && t->s.step % t->place[k].every == 0)
            due |= 1u << k;
    /* an older run in this folder is replaced before there is anything newer elsewhere */
    return due && t->io.checkpoint.replace && t->saved < 0 ? due | TRAINER_OWN : due;
}

lm_code trainer_save_copied(lm_trainer *t, lm_err *e)
{
    for (int k = 0; k < t->places; k++)
        if (t->place[k].ckpt && lm_ckpt_wait_copied(t->place[k].ckpt, e))
            return e->code;
    return LM_OK;
}

/* ---- parts of several ranks ---- */

/* All ranks have written their parts of a checkpoint. */
static lm_code close_parts(lm_trainer *t, trainer_place *p, lm_err *e)
{
    double wrote = (double)lm_ckpt_wrote(p->ckpt);
    if (trainer_ranks_total(t, &wrote, e))
        return e->code;
    p->parts = false;
    return t->leads ? lm_ckpt_all_done(p->ckpt, (uint64_t)wrote, e) : LM_OK;
}

lm_code trainer_save_flags(lm_trainer *t, unsigned asked, double now, int32_t *flag, lm_err *e)
{
    for (int k = 0; k < t->places; k++) {
        trainer_place *p = &t->place[k];
        const bool late = t->leads && p->seconds > 0 && now - p->began >= p->seconds;
        bool done = true;
        if (p->parts && lm_ckpt_part(p->ckpt, &done, e))
            return e->code;
        flag[2 * k] = late || ((t->asked.save | asked) >> k & 1);
        flag[2 * k + 1] = !done;
    }
    return LM_OK;
}

lm_code trainer_save_met(lm_trainer *t, const int32_t *flag, lm_err *e)
{
    t->asked.save = 0;
    for (int k = 0; k < t->places; k++) {
        t->asked.save |= flag[2 * k] ? 1u << k : 0;
        if (t->place[k].parts && !flag[2 * k + 1] && close_parts(t, &t->place[k], e))
            return e->code;
    }
    return LM_OK;
}

static lm_code wait_for_parts(lm_trainer *t, trainer_place *p, lm_err *e)
{
    if (!p->parts)
        return LM_OK;
    if (lm_ckpt_wait_part(p->ckpt, e))
        return e->code;
    trainer_ranks_pause_all(t, lm_now() - t->last_save);
    return close_parts(t, p, e) || trainer_ranks_go_on(t, e) ? e->code : LM_OK;
}

/* Rank 0 makes the folder, the others write to it. */
static lm_code begin_parts(lm_trainer *t, trainer_place *p, lm_err *e)
{
    char made[PATH_MAX] = "";
    trainer_ranks_pause(t);
    if (t->leads && lm_ckpt_begin(p->ckpt, &t->s, e))
        return e->code;
    if (!lm_ckpt_shared(p->ckpt))
        return LM_OK;
    if (t->leads)
        snprintf(made, sizeof made, "%s", lm_ckpt_made(p->ckpt));
    if (lm_comm_broadcast(t->io.comm, made, sizeof made, 0, e) ||
        (!t->leads && lm_ckpt_join(p->ckpt, &t->s, made, e)))
        return e->code;
    p->parts = true;
    return LM_OK;
}

/* ---- one checkpoint ---- */

/* What rank 0 alone reports. */
static lm_code report(lm_trainer *t, const trainer_place *p, int64_t step, lm_err *e)
{
    lm_metrics *m = t->io.metrics;
    const bool own = p == t->place;
    if (own) {
        trainer_trace_saved(t);
        lm_metrics_settle(m); /* the older run has been replaced */
        t->whole = step;
    }
    lm_metrics_begin(m, "checkpoint");
    lm_metrics_int(m, "step", step);
    lm_metrics_str(m, "path", lm_ckpt_last(p->ckpt));
    return lm_metrics_end(m, e);
}

static lm_code end_at(lm_trainer *t, trainer_place *p, lm_err *e)
{
    const int64_t step = p->saving;
    p->saving = -1;
    if (!p->ckpt || wait_for_parts(t, p, e) || lm_ckpt_wait(p->ckpt, e) || step < 0 || !t->leads ||
        lm_ckpt_failed(p->ckpt))
        return e->code;
    return report(t, p, step, e);
}

lm_code trainer_save_end(lm_trainer *t, lm_err *e)
{
    for (int k = 0; k < t->places; k++)
        if (end_at(t, &t->place[k], e))
            return e->code;
    return LM_OK;
}

lm_code trainer_save_report(lm_trainer *t, lm_err *e)
{
    for (int k = 0; k < t->places; k++) {
        trainer_place *p = &t->place[k];
        if (p->saving >= 0 && !p->parts && !lm_ckpt_busy(p->ckpt) && end_at(t, p, e))
            return e->code;
    }
    return LM_OK;
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

static lm_code begin_at(lm_trainer *t, trainer_place *p, lm_err *e)
{
    if (begin_parts(t, p, e))
        return e->code;
    p->saving = t->s.step;
    p->began = lm_now();
    return LM_OK;
}

/* What follows from tensors that ranks share is computed here, where they may exchange these; otherwise writers do it. */
static lm_code fold_shared(lm_trainer *t, lm_err *e)
{
    const lm_ckpt_opts *o = &t->io.checkpoint;
    return o->fold && t->s.store->owners ? o->fold(o->fold_ctx, t->s.store, e) : LM_OK;
}

/* On each rank that writes them: begin checkpoints. */
static lm_code begin_saving(lm_trainer *t, unsigned places, lm_err *e)
{
    double began = lm_now();
    for (int k = 0; k < t->places; k++)
        if ((places >> k & 1) && end_at(t, &t->place[k], e))
            return e->code;
    if (trainer_objective_save(t, e) || trainer_show(t, e) || fold_shared(t, e))
        return e->code;
    for (int k = 0; k < t->places; k++)
        if ((places >> k & 1) && begin_at(t, &t->place[k], e))
            return e->code;
    t->last_save = lm_now(); /* from here on parts are written */
    if (trainer_hide(t, e))
        return e->code;
    const double ended = lm_now();
    t->r.seconds_checkpoint += ended - began;
    if (t->trace && t->traced && !t->trace_writing && (places & TRAINER_OWN)) {
        lm_trace_span(t->trace, TRACE_CHECKPOINT, "begin", began, ended);
        t->trace_writing = true;
    }
    return LM_OK;
}

lm_code trainer_save(lm_trainer *t, unsigned places, lm_err *e)
{
    if (!places)
        return LM_OK;
    t->asked.save = 0;
    trainer_ranks_pause(t);
    if ((((t->places && t->writes) || t->is_shared) && check_weights(t, e)) ||
        (t->writes && begin_saving(t, places, e)) || trainer_ranks_go_on(t, e))
        return e->code;
    if (places & TRAINER_OWN)
        t->saved = t->s.step;
    t->copying = true;
    return LM_OK;
}

lm_code trainer_save_best(lm_trainer *t, lm_err *e)
{
    char *name = NULL;
    if (t->saved != t->s.step)
        return trainer_save(t, TRAINER_OWN, e);
    if (!t->writes)
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
    if (!t->io.resume || !t->places || !t->leads)
        return LM_OK;
    if (lm_path_join(&path, t->io.checkpoint.run_dir, lm_run_step_name(t->s.step, name), e))
        return e->code;
    if (lm_path_same(path, t->io.resume))
        t->saved = t->whole = t->s.step;
    lm_free(path);
    return find_best(t, e);
}
