/* SPDX-License-Identifier: Apache-2.0 */
/* disk.c -- checkpoints on disk. */
#include "train/disk.h"

#include <math.h>
#include <sys/statvfs.h>

#include "base/file.h"
#include "format/folder_run.h"

/* Number of steps in (from, to] that a period divides. */
static int64_t multiples(int64_t from, int64_t to, int64_t period)
{
    return period > 0 ? to / period - from / period : 0;
}

/* Checkpoints that will be written: at most one per step. */
static double planned(const lm_trainer_opts *o, int64_t step, int64_t keep)
{
    double left = (double)(o->steps - step), n = 1;
    n += (double)multiples(step, o->steps - 1, o->save_every);
    n += (double)multiples(step, o->steps - 1, o->eval_every);
    if (o->save_seconds > 0 && keep > 0)
        n += (double)keep + 1;
    return n < left ? n : left;
}

static lm_code count_present(const char *run, int64_t *out, lm_err *e)
{
    char **names = NULL;
    size_t n = 0;
    *out = 0;
    if (!run || !lm_path_is_dir(run))
        return LM_OK;
    lm_code rc = lm_dir_list(run, &names, &n, e);
    for (size_t i = 0; !rc && i < n; i++) {
        int64_t step;
        rc = lm_run_checkpoint(run, names[i], &step, e);
        *out += !rc && step >= 0;
    }
    lm_names_free(names, n);
    return rc;
}

lm_code lm_train_disk(const lm_trainer_opts *o, const lm_memory_plan *plan, int64_t step,
                      int64_t keep, const char *run, lm_disk *out, lm_err *e)
{
    struct statvfs fs;
    int64_t present;
    if (count_present(run, &present, e))
        return e->code;
    *out = (lm_disk){ .free = INFINITY, .checkpoint = plan->checkpoint };
    if (step < o->steps) {
        double most = planned(o, step, keep) + (double)present;
        /* Old ones are removed after the new one is complete; `best` may be an old one. */
        double kept = (double)keep + 1 + (o->eval_every > 0);
        double peak = keep > 0 && kept < most ? kept : most;
        out->at_once = (int64_t)fmax(peak, (double)present + 1);
        out->need = out->checkpoint * (double)(out->at_once - present);
    }
    if (run && !statvfs(run, &fs))
        out->free = (double)fs.f_bavail * (double)fs.f_frsize;
    return LM_OK;
}

lm_code lm_train_disk_tier(const lm_trainer_opts *o, const lm_memory_plan *plan, int64_t step,
                           const lm_run_tier *t, lm_disk *out, lm_err *e)
{
    lm_trainer_opts own = *o;
    own.save_every = t->every;
    own.save_seconds = t->seconds;
    own.eval_every = 0;
    return lm_train_disk(&own, plan, step, t->keep, t->folder, out, e);
}
